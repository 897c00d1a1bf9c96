"""First variation of a rank-based objective on groups of rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .dispatch import choose


def linearize(rewards: Tensor, weights: Tensor, *, impl: str = "auto") -> Tensor:
    """Linearised rewards of every group (IAMA, Prop. 4.2 and Alg. 3), up to a constant per group.

        r~_(i) = -sum_{k=i}^{M-1} w_k (r_(k+1) - r_(k)),      r_(1) <= .. <= r_(M) the group, sorted

    rewards (P, M), any strides, P may be 0; weights (M,), the k-th belonging to the k-th smallest reward (the last one
    meets no gap). The result has the order of ``rewards``; the best sample has 0, and with M = 1 that is all. Weights
    of 1 give r - max r. Equal rewards get equal values, equal infinities too: their gap counts as 0, as does any gap
    of weight 0. Other gaps next to an infinity are infinite.

    float32 and float64 keep their dtype; others are computed and returned in float32. Differentiable in both inputs.

    Raises ValueError for shapes that do not fit and for a NaN reward, naming the first. That check reads the data, so
    that it is left out inside ``torch.compile``, where a NaN is sorted last and spreads over its group.
    """
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"expected rewards (P, M) with M >= 1, got {tuple(rewards.shape)}.")
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"expected weights ({rewards.shape[1]},), one per rank, got {tuple(weights.shape)}.")
    if not torch.compiler.is_compiling() and rewards.isnan().any():
        group, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(f"reward of group {group}, sample {sample} is NaN; drop the sample or the group before this.")
    choose(impl, "linearize")
    rewards = reference.widen(rewards)
    return reference.linearize(rewards, weights.to(rewards))
