"""Running sums, also in deterministic mode, in which `torch.cumsum` refuses floating-point numbers on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that are summed by a product with a triangle of ones


def running_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative sums over the last dimension, in ``dtype`` (by default that of ``x``): ``x.cumsum(-1, dtype=dtype)``.

    In deterministic mode on a GPU they are sums by blocks, in one order; there an infinity or a NaN makes the results
    from the beginning of its block on NaN. Differentiable.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sums_by_blocks(x if dtype is None else x.to(dtype))
    return x.cumsum(-1, dtype=dtype)


def sums_by_blocks(x: Tensor) -> Tensor:
    """Cumulative sums by products: within blocks of `BLOCK` numbers, plus those of the blocks before."""
    n = x.shape[-1]
    if n == 0:
        return x
    size = min(n, BLOCK)
    blocks = F.pad(x, (0, -n % size)).unflatten(-1, (-1, size))
    within = blocks @ torch.ones(size, size, dtype=x.dtype, device=x.device).triu()
    if blocks.shape[-2] > 1:
        totals = sums_by_blocks(within[..., -1])
        within = within + F.pad(totals[..., :-1], (1, 0))[..., None]
    return within.flatten(-2)[..., :n]
