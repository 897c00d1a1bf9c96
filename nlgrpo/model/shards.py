"""Rows of a sharded parameter: which rank holds which, and filling them.

FSDP2 splits dimension 0 over one dimension of the mesh like ``torch.chunk``, so the last ranks may have fewer rows or
none. Along the other dimension of a 2-D mesh (HSDP), every rank holds the same rows.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Their module takes a second to import; before that, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a parameter; all rows if it is not sharded."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def rows(parameter: Tensor) -> slice:
    """Return which rows of the full parameter this rank holds; all rows if it is not sharded."""
    if not is_sharded(parameter):
        return slice(0, len(parameter))
    mesh = parameter.device_mesh
    dim = _sharded_dim(parameter)
    return slice(0, len(parameter)) if dim is None else _chunk(len(parameter), mesh.size(dim), mesh.get_local_rank(dim))


def holders(parameter: DTensor) -> list[tuple[int, slice]]:
    """List the ranks that together hold the parameter once, from the first of the mesh on, each with its rows."""
    ranks = parameter.device_mesh.mesh
    dim = _sharded_dim(parameter)
    for other in reversed(range(ranks.dim())):
        if other != dim:
            ranks = ranks.select(other, 0)
    numbers = ranks.flatten().tolist()
    return [(rank, _chunk(len(parameter), len(numbers), i)) for i, rank in enumerate(numbers)]


@torch.no_grad()
def fill(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of ``full`` into the parameter."""
    local(parameter).copy_(full[rows(parameter)])


def _sharded_dim(parameter: DTensor) -> int | None:
    """Return the dimension of the mesh over which the rows are split, or None."""
    split = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    assert len(split) <= 1
    assert all(parameter.placements[dim].is_shard(0) for dim in split)
    return split[0] if split else None


def _chunk(total: int, parts: int, index: int) -> slice:
    size = -(-total // parts)
    return slice(min(index * size, total), min((index + 1) * size, total))
