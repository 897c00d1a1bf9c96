"""From linearised rewards to advantages. Legend: P prompts, M samples per prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "loo", "none"]


def centre(linear: Tensor) -> Tensor:
    """Less the mean of each group, (P, M) -> (P, M); exactly 0 where a group is of equal values."""
    # The mean of M equal numbers may differ from them in the last bit, and a division by eps would show it.
    equal = (linear == linear[:, :1]).all(-1, keepdim=True)
    return torch.where(equal, 0.0, linear - linear.mean(-1, keepdim=True))


def subtract_baseline(linear: Tensor, baseline: Baseline) -> Tensor:
    """Less the mean of each group ("mean"), less the mean of its others ("loo", M/(M-1) times the former), or as it is.

    Of (P, M); a group of one has an advantage of 0 unless there is no baseline. ValueError for another ``baseline``.
    """
    if baseline not in ("mean", "loo", "none"):
        raise ValueError(f"baseline={baseline!r} is not known; expected 'mean', 'loo' or 'none'.")
    if baseline == "none":
        return linear
    M = linear.shape[1]
    return centre(linear) * (M / (M - 1) if baseline == "loo" and M > 1 else 1)


def advantages(
    linear: Tensor,
    *,
    scale: Literal["none", "group", "batch"] = "none",
    baseline: Baseline = "mean",
    eps: float = 1e-4,
) -> Tensor:
    """A_j = (r~_j - baseline) / scale, (P, M) -> (P, M).

    ``baseline``: see `subtract_baseline`; "none" too for what has one already (`Objective.advantage`).

    ``scale`` is 1 for "none", the default: dividing would undo the scale that the linearisation gives (IAMA, 6).
    "group" divides by std + ``eps`` of the group (with M - 1 in the denominator), as GRPO and TRL do. "batch" divides
    by that of all advantages together (P M - 1). TRL takes the rewards there, before their group means are subtracted;
    a linearised reward has a free constant per group, which must not count.

    With a baseline a group of equal values has advantages of exactly 0 in every case, and so has a group of one.

    Raises ValueError for an unknown ``scale`` or ``baseline``, a shape that is not (P, M >= 1), and values that are not
    finite.
    """
    if scale not in ("none", "group", "batch"):
        raise ValueError(f"scale={scale!r} is not known; expected 'none', 'group' or 'batch'.")
    if linear.ndim != 2 or linear.shape[1] == 0:
        raise ValueError(f"expected linearised rewards (P, M) with M >= 1, got {tuple(linear.shape)}.")
    if not linear.isfinite().all():
        group, sample = linear.isfinite().logical_not().nonzero()[0].tolist()
        raise ValueError(
            f"linearised reward of group {group}, sample {sample} is {linear[group, sample].item()}; "
            "an advantage needs finite rewards: clip the reward."
        )
    centred = subtract_baseline(linear, baseline)
    if scale == "none" or centred.numel() < 2 or linear.shape[1] == 1:
        return centred
    std = centred.std(-1, keepdim=True) if scale == "group" else centred.std()
    return centred / (std + eps)


def effective_sample_size(advantages: Tensor) -> Tensor:
    """(sum_j |A_j|)^2 / sum_j A_j^2 per group, averaged over the groups: (P, M) -> scalar in [0, M].

    How many samples of a group carry its gradient: M when all weigh the same, 1 when one does, 0 for a group of zeros.
    """
    size = advantages.abs()
    size = size / size.amax(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)  # squares of small ones vanish
    squares = size.square().sum(-1)
    return torch.where(squares == 0, 0.0, size.sum(-1).square() / squares).mean()
