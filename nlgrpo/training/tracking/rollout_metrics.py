"""Metrics of one step's rollouts, by the names and definitions of TRL (1.16.0, ``GRPOTrainer``)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nlgrpo.errors import UserError


def rollout_metrics(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], lengths: Tensor, finished: Tensor
) -> dict[str, float]:
    """Metrics of one step: ``reward*``, ``frac_reward_zero_std`` and ``completions/*`` as TRL defines them.

    The inputs are gathered from all ranks: ``rewards[name]`` (P, M) with NaN where a reward abstained, ``lengths``
    (P, M) in tokens, ``finished`` (P, M) bool, true if a stop id ended the completion. A completion's reward is
    ``sum_i w_i r_i`` over the rewards that did not abstain, NaN if all with a weight did. Standard deviations have
    Bessel's correction. ``frac_reward_zero_std`` is the share of the groups that have two rewards or more (TRL counts
    the others as groups with different rewards). A metric is NaN if all rewards abstained.

    Raises UserError if shapes or names do not match.
    """
    shapes = {name: tuple(t.shape) for name, t in {**rewards, "lengths": lengths, "finished": finished}.items()}
    if not rewards or lengths.dim() != 2 or not lengths.numel() or len(set(shapes.values())) > 1:
        raise UserError(f"rewards, lengths and finished must all be (P, M) with at least one completion, got {shapes}")
    if set(rewards) != set(weights):
        raise UserError(f"every reward needs a weight: rewards {sorted(rewards)}, weights {sorted(weights)}")
    metrics: dict[str, Tensor] = {}
    for name, values in rewards.items():
        metrics[f"rewards/{name}/mean"] = values.double().nanmean()
        metrics[f"rewards/{name}/std"] = _nanstd(values.double().flatten())
    counted = [name for name in rewards if weights[name] != 0] or list(rewards)
    stacked = torch.stack([weights[name] * rewards[name].double() for name in counted])
    total = stacked.nansum(0).masked_fill(stacked.isnan().all(0), math.nan)
    group_std = _nanstd(total) if total.shape[1] > 1 else 0 * total[:, 0]
    metrics["reward"] = total.nanmean()
    metrics["reward_std"] = _nanstd(total.flatten())
    # An absolute tolerance, as in TRL: equal rewards must count as equal although their mean is rounded.
    metrics["frac_reward_zero_std"] = (group_std[~group_std.isnan()].abs() <= 1e-8).double().mean()
    metrics |= _length_metrics(lengths.double(), finished.bool())
    return {name: value.item() for name, value in metrics.items()}


def _length_metrics(lengths: Tensor, finished: Tensor) -> dict[str, Tensor]:
    ended = lengths[finished] if finished.any() else lengths.new_zeros(1)  # 0 if no completion ended, as in TRL
    return {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": (~finished).double().mean(),
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
    }


def _nanstd(values: Tensor) -> Tensor:
    """Standard deviation over the last dimension, ignoring NaN, with Bessel's correction; NaN below two values."""
    count = (~values.isnan()).sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1)).sqrt().masked_fill(count < 2, math.nan)
