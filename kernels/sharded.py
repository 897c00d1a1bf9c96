"""Gather parameters sharded by FSDP2: the only communication in the ops."""

from __future__ import annotations

import torch
from torch import Tensor


def gathered(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sharded parameter (a DTensor) gathered and in ``dtype``; other parameters unchanged.

    Each rank computes a gradient of the full parameter from its own tokens. The parameter gets their mean, as under
    FSDP2.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial  # the import takes a second, so only if needed

    assert isinstance(parameter, DTensor)
    mesh, sharded = parameter.device_mesh, parameter.to(dtype)
    assert isinstance(sharded, DTensor)
    full = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda grad: grad / mesh.size())
    return full
