"""From linearised rewards to advantages. Legend: P prompts, M samples per prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nlgrpo.sections import Baseline


def centre(linear: Tensor) -> Tensor:
    """Subtract the mean of each group, (P, M) -> (P, M). A group of equal values gives exactly 0."""
    # The mean of M equal numbers may differ from them in the last bit; dividing by eps would magnify that.
    equal = (linear == linear[:, :1]).all(-1, keepdim=True)
    return torch.where(equal, 0.0, linear - linear.mean(-1, keepdim=True))


def centre_subsets(linear: Tensor, n: int) -> Tensor:
    """Return M / (M - n) times `centre`, for means over the subsets of ``n`` of a group's M > n samples.

    The factor corrects for the mean of the group, which contains n/M of each sample's own contribution.
    """
    M = linear.shape[1]
    return M / (M - n) * centre(linear)


def subtract_baseline(linear: Tensor, baseline: Baseline) -> Tensor:
    """Subtract a baseline from linearised rewards (P, M).

    "mean" subtracts the mean of the group, "loo" the mean of its others (M/(M-1) times "mean"), "none" nothing.
    A group of one sample has an advantage of 0 unless the baseline is "none". Raises ValueError for other baselines.
    """
    if baseline not in ("mean", "loo", "none"):
        raise ValueError(f"baseline={baseline!r} is not known; expected 'mean', 'loo' or 'none'.")
    if baseline == "none":
        return linear
    centred = centre(linear)
    M = linear.shape[1]
    if baseline == "loo" and M > 1:
        return centred * (M / (M - 1))
    return centred


def advantages(
    linear: Tensor,
    *,
    scale: Literal["none", "group", "batch"] = "none",
    baseline: Baseline = "mean",
    eps: float = 1e-4,
    present: Tensor | None = None,
) -> Tensor:
    """Turn linearised rewards into advantages, (P, M) -> (P, M).

        A_j = (r~_j - baseline) / scale

    ``baseline``: see `subtract_baseline`; "none" for rewards that have a baseline already (`Objective.advantage`).

    ``scale``: "none" does not divide, which keeps the scale of the linearisation (IAMA, 6). "group" divides by std +
    ``eps`` of the group (with M - 1 in the denominator), as GRPO and TRL do. "batch" divides by the std of all
    advantages (P M - 1). TRL takes the std of the rewards there, before their group means are subtracted; a linearised
    reward has a free constant per group, which must not count.

    ``present`` (P, M) bool: the samples that have a reward; None for all. The others count in no std, as if their group
    were smaller. A group with only one of them, and a batch with only one, is not divided.

    With a baseline, a group of equal values and a group of one sample have advantages of exactly 0.

    Raises ValueError for an unknown ``scale`` or ``baseline``, a shape that is not (P, M >= 1), values that are not
    finite, and ``present`` with a ``baseline`` other than "none", which would count the other samples.
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
    if present is not None and (baseline != "none" or present.shape != linear.shape):
        raise ValueError(
            f"present {tuple(present.shape)} with baseline={baseline!r}: expected a mask {tuple(linear.shape)} of the "
            "samples that have a reward, and baseline='none', because each objective subtracts its own."
        )
    centred = subtract_baseline(linear, baseline)
    if scale == "none" or centred.numel() < 2 or linear.shape[1] == 1:
        return centred
    if present is None or bool(present.all()):
        std = centred.std(-1, keepdim=True) if scale == "group" else centred.std()
        return centred / (std + eps)
    rows = present if scale == "group" else present.flatten()[None]
    count, std = _std(centred.reshape(rows.shape), rows)
    return torch.where(count < 2, centred, centred / (std + eps))


def _std(values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of present values of each row, and their std with Bessel's correction, (P, 1) each."""
    count = present.sum(-1, keepdim=True)
    mean = values.where(present, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(present, 0.0).square().sum(-1, keepdim=True)
    return count, (squares / (count - 1).clamp(min=1)).sqrt()


def effective_sample_size(advantages: Tensor) -> Tensor:
    """Effective number of samples in a group's gradient, averaged over the groups: (P, M) -> scalar in [0, M].

        (sum_j |A_j|)^2 / sum_j A_j^2

    M if all |A_j| are equal, 1 if only one is not 0, 0 for a group of zeros.
    """
    size = advantages.abs()
    # small squares would underflow
    size = size / size.amax(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
    squares = size.square().sum(-1)
    return torch.where(squares == 0, 0.0, size.sum(-1).square() / squares).mean()
