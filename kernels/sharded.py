"""A parameter that FSDP2 has sharded, made whole: the one place of the ops that communicates."""

from __future__ import annotations

import torch
from torch import Tensor


def gathered(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A sharded parameter (a DTensor) whole and in ``dtype``; others as they are.

    Each rank has a gradient of the whole, from its own tokens. The parameter gets their mean, as FSDP2 gives its own.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial  # a second's import, which is not for those without any

    assert isinstance(parameter, DTensor)
    mesh, sharded = parameter.device_mesh, parameter.to(dtype)
    assert isinstance(sharded, DTensor)
    whole = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / mesh.size())
    return whole
