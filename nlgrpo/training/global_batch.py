"""The groups of a step on all ranks: values of the objectives, linearised rewards, and metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from nlgrpo.config.schema import RewardConfig
from nlgrpo.data.conversations import plain_text
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts.sampler import errors_of_user_objective, values_of_completions
from nlgrpo.errors import UserError
from nlgrpo.objectives.advantages import Baseline, advantages, effective_sample_size
from nlgrpo.objectives.aggregation import Aggregate, moving_average
from nlgrpo.objectives.registry import (
    Objective,
    linearize_present,
    present,
    value_present,
)
from nlgrpo.rewards.reward_functions import Scores
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.tracking.terminal import Sample

if TYPE_CHECKING:
    from nlgrpo.training.reference_rewards import CalibratedReward

RUN_METRICS = ("step", "kl", "logps", "critic", "win_rate")  # reserved metric names that not every run or step logs
EQUAL = 1e-8  # absolute tolerance, as in TRL: equal rewards must count as equal although sums are rounded


@dataclass(frozen=True)
class JointObjective:
    """g(R_1, .., R_m): the objectives R_i of all rewards, and how they are aggregated."""

    objectives: Mapping[str, Objective]
    weights: Mapping[str, float]
    aggregate: Aggregate
    at: Literal["batch", "prompt"]
    """Aggregate the means over all prompts, or the values at each prompt."""
    memory: float
    """Decay of the moving averages at which the gradient is taken; 0: the values themselves."""

    def aggregated(self, values: Tensor, averages: list[float]) -> tuple[Tensor, Tensor]:
        """Return g(R_1, .., R_m) and its gradient, given the objectives' ``values`` (m, P).

        At each prompt, shapes are (P,) and (m, P); of the batch, () and (m,). ``averages``: the moving averages, which
        this call updates in place.
        """
        if self.at == "batch":
            values = values.nanmean(-1)
        point = values
        if self.memory > 0:
            point = moving_average(averages, values, self.memory)
            averages[:] = point.tolist()
        return self.aggregate.value(values), self.aggregate.gradient(point)


@dataclass(frozen=True)
class GlobalBatch:
    """Rewards and lengths of the global batch, the same on every rank; ``own`` selects the prompts of this rank.

    P x M numbers are cheap to gather. Every rank computes statistics of the batch from all of them, so no metric is an
    average of averages.
    """

    # (P, M) float64, or (P, M, M) for kernels; NaN where the reward abstained, and in dropped groups
    rewards: dict[str, Tensor]
    answers: dict[str, Tensor]  # numbers of the final answers (P, M), for objectives that need them
    calibrated: dict[str, CalibratedReward]  # rewards that have a transform
    lengths: Tensor  # (P, M)
    finished: Tensor  # (P, M)
    dropped: Tensor  # (P,)
    own: slice
    tokens: int  # prompt and completion tokens, a prompt once per completion
    packed_tokens: int  # the same, but a prompt once per group, as the update computes them
    logged: dict[str, float]  # metrics that rewards logged, means over their calls on all ranks
    extra: dict[str, list[Any]]  # columns that rewards logged for this rank's completions
    weights: Tensor | None = None  # importance weights (P, M) of completions that another policy sampled
    given: dict[str, Tensor] = field(default_factory=dict)  # `rewards` before groups were dropped
    nans: Mapping[str, int] = field(default_factory=dict)  # completions for which a reward returned NaN

    @classmethod
    def gather(
        cls,
        ranks: Ranks,
        scores: Scores,
        rollout: Rollout,
        calibrated: Mapping[str, CalibratedReward] | None = None,
        weights: Tensor | None = None,
    ) -> GlobalBatch:
        """Gather the prompts of all ranks, the same number per rank; collective.

        ``weights`` (P, M): importance weights of this rank's completions, if another policy sampled them.
        """
        device = ranks.device
        count = len(rollout.lengths)
        prompts = sum(map(len, rollout.prompt_ids))
        completions = rollout.lengths.sum() + rollout.inserted_tokens
        counts = [completions + prompts * rollout.lengths.shape[1], completions + prompts]
        tokens, packed_tokens = ranks.sum(torch.stack(counts)).tolist()

        def gather(values: Tensor) -> Tensor:
            return ranks.gather(values.to(device))

        given = {name: gather(values) for name, values in scores.values.items()}
        dropped = ranks.gather(scores.skipped.to(device, torch.uint8)).bool()
        parts = ranks.gather_objects((scores.metrics, scores.nans))
        nans = Counter[str]()
        for _, own in parts:
            nans.update(own)
        return cls(
            given=given,
            rewards={name: _without(r, dropped) for name, r in given.items()},
            answers={name: gather(numbers) for name, numbers in scores.answers.items()},
            calibrated={name: c.without(scores.skipped).map(gather) for name, c in (calibrated or {}).items()},
            lengths=ranks.gather(rollout.lengths),
            finished=ranks.gather(rollout.finished.to(torch.uint8)).bool(),
            dropped=dropped,
            own=slice(ranks.rank * count, (ranks.rank + 1) * count),
            tokens=tokens,
            packed_tokens=packed_tokens,
            logged=_mean_over([metrics for metrics, _ in parts]),
            extra=scores.extra,
            weights=None if weights is None else ranks.gather(weights),
            nans=nans,
        )

    def objective_inputs(self) -> dict[str, Tensor]:
        """The input of each objective: the calibrated reward if there is one, else the raw reward; with its answers."""
        inputs = dict(self.rewards)
        for name, calibrated in self.calibrated.items():
            inputs[name] = calibrated.values
        for name, answers in self.answers.items():
            rewards = self.rewards[name]
            inputs[name] = torch.stack([rewards, answers.to(rewards)], -1)
        return inputs

    def values(self, objectives: Mapping[str, Objective]) -> Tensor:
        """Values R_i of the objectives at each prompt, (m, P); NaN where the reward abstained."""
        values = []
        for name, rewards in self.objective_inputs().items():
            with errors_of_user_objective(name, objectives[name]):
                values.append(value_present(objectives[name], rewards, self.weights))
        return torch.stack(values)

    def linearize(self, objectives: Mapping[str, Objective], baseline: Baseline = "mean") -> Tensor:
        """First variations of the R_i at each group minus a baseline, (m, P, M); 0 where the reward abstained."""
        terms = []
        for name, rewards in self.objective_inputs().items():
            with errors_of_user_objective(name, objectives[name]):
                terms.append(linearize_present(objectives[name], rewards, baseline, self.weights))
        return torch.stack(terms)

    def has_reward(self, objectives: Mapping[str, Objective], gradient: Tensor) -> Tensor:
        """Mask (P, M): a reward of the update scored the completion. False in dropped groups.

        ``gradient``: dg/dR_i of the aggregate, (m,) or (m, P). A reward with gradient 0 takes no part in the update.
        """
        inputs = self.objective_inputs()
        scored = torch.stack([present(objectives[name], r) for name, r in inputs.items()])
        return (scored & (gradient.to(scored.device) != 0).reshape(len(scored), -1, 1)).any(0)

    def scores(self, objectives: Mapping[str, Objective]) -> dict[str, Tensor]:
        """Rewards to show, {name: (P, M)}; for a kernel, each completion's contribution to its group's diversity."""
        return values_of_completions(self.rewards, objectives)

    def advantages(
        self, linear: Tensor, scale: Literal["none", "group", "batch"], scored: Tensor | None = None
    ) -> Tensor:
        """Scale linearised rewards (P, M), baselines already subtracted, to advantages (P, M).

        ``scored`` (P, M), from `has_reward`: only these completions count in the std of a group or of the batch; None
        for all. Dropped groups get 0.
        """
        out = torch.zeros_like(linear)
        kept = ~self.dropped
        present = None if scored is None else scored[kept]
        out[kept] = advantages(linear[kept], scale=scale, baseline="none", present=present)
        return out

    def metrics(
        self,
        value: Tensor,
        values: Tensor,
        scores: Mapping[str, Tensor],
        weights: Mapping[str, float],
        linear: Tensor,
        advantages: Tensor,
        scored: Tensor,
    ) -> dict[str, float]:
        """Metrics of rewards and lengths (under TRL's names), objectives, and advantages.

        ``scores``: output of the method `scores`. ``value``: value of the aggregate, a scalar or one per prompt (P,).
        ``linear`` and ``advantages`` (P, M): linearised rewards without and with scale and KL. ``scored``: from
        `has_reward`; groups without any such completion count in no metric of advantages.
        """
        means = values.nanmean(-1)
        out = {f"objective/{name}": float(value) for name, value in zip(self.rewards, means, strict=True)}
        out["objective/aggregate"] = float(value.nanmean())
        out |= {f"win_rate/{name}": float(c.ranks.nanmean()) for name, c in self.calibrated.items()}
        some = scored.any(-1)
        out["advantage/ess"] = float(effective_sample_size(advantages[some]))
        out["advantage/frac_zero_std"] = float(_equal(linear[some], scored[some]).double().mean())
        out["rewards/dropped_groups"] = float(self.dropped.sum())
        kept = ~self.dropped
        for name, r in scores.items():
            abstained = r[kept].isnan()
            if abstained.any():
                out[f"rewards/{name}/abstained"] = float(abstained.double().mean())
            unranked = self._unranked(name)[kept]
            if unranked.any():
                out[f"rewards/{name}/unranked"] = float(unranked.double().mean())
        for name, count in self.nans.items():
            out[f"rewards/{name}/nan"] = count / self.lengths.numel()
        return out | rollout_metrics(scores, weights, self.lengths, self.finished)

    def _unranked(self, name: str) -> Tensor:
        """Mask (P, M): the reward scored the completion, and too few samples of the reference to rank it among them."""
        rewards = self.rewards[name]
        if name not in self.calibrated:
            return rewards.new_zeros(rewards.shape[:2], dtype=torch.bool)
        return self.calibrated[name].values.isnan() & ~rewards.isnan()

    def without_reward(self, objectives: Mapping[str, Objective], rewards: Mapping[str, RewardConfig]) -> str:
        """Say for each reward how many completions it scored, and why not the others."""
        parts = []
        for name, reward in rewards.items():
            missing = self._missing(name, objectives[name], reward)
            if missing:
                parts.append(missing)
        if self.dropped.any():
            dropped = int(self.dropped.sum())
            parts.append(f"{dropped} of {len(self.dropped)} groups dropped because a reward failed")
        return "; ".join(parts)

    def _missing(self, name: str, objective: Objective, reward: RewardConfig) -> str:
        """What `without_reward` says of one reward; "" for one that takes no part in the update and did not fail."""
        given = self.given[name]
        if objective.pairwise:
            given = given.diagonal(dim1=-2, dim2=-1)
        scored = ~given.isnan()
        failed = self.dropped & ~scored.any(-1) & (reward.on_error == "skip")  # any other failure ends the run
        if reward.weight == 0 and not failed.any():
            return ""
        counts = []
        needs = ""
        if failed.any():
            counts.append(f"failed in {int(failed.sum())} of {len(failed)} groups")
        abstained = int((~scored[~failed]).sum())
        if abstained:
            counts.append(f"abstained for {abstained} of {scored.numel()} completions")
        if scored.any():
            counts.append(f"scored {int(scored.sum())} of {scored.numel()}")
            if objective.fewest > 1:
                needs = f" ({objective} needs {objective.fewest} in a group)"
        unranked = int(self._unranked(name).sum())
        if unranked:
            counts.append(f"has too few samples of the reference to rank {unranked} of them")
        return f"reward {name!r} {' and '.join(counts)}{needs}"

    def with_logged(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics that rewards logged to ``stats``; a name that the run itself uses becomes ``logged/NAME``."""
        used = {*RUN_METRICS, *(name.partition("/")[0] for name in stats)}
        out = dict(stats)
        for name, value in self.logged.items():
            clashes = name.partition("/")[0] in used
            out[f"logged/{name}" if clashes else name] = value
        return out

    def samples(
        self,
        batch: Batch,
        texts: Sequence[str],
        scores: Mapping[str, Tensor],
        linear: Tensor,
        advantages: Tensor,
    ) -> list[Sample]:
        """Completions of this rank's first prompt, with rewards, linearised rewards and advantages."""
        first = self.own.start
        return [
            Sample(
                prompt=plain_text(batch.prompts[0]),
                completion=texts[j],
                rewards={name: float(r[first, j]) for name, r in scores.items()},
                linearized={name: float(x[first, j]) for name, x in zip(scores, linear, strict=True)},
                advantage=float(advantages[first, j]),
                extra={name: _plain(column[j]) for name, column in self.extra.items()},
                tokens=int(self.lengths[first, j]),
            )
            for j in range(self.lengths.shape[1])
        ]


def _without(rewards: Tensor, dropped: Tensor) -> Tensor:
    """Return the rewards (P, M), or kernels (P, M, M), with NaN in the ``dropped`` groups (P,)."""
    return rewards.masked_fill(dropped.view(-1, *[1] * (rewards.ndim - 1)), torch.nan)


def _equal(linear: Tensor, scored: Tensor) -> Tensor:
    """Whether the scored completions of each group have equal linearised rewards, (P,): they teach nothing.

    A single one does so if its linearised reward is 0: without a baseline it is not.
    """
    least = linear.where(scored, torch.inf).amin(-1)
    most = linear.where(scored, -torch.inf).amax(-1)
    alone = scored.sum(-1) == 1
    return torch.where(alone, most.abs(), most - least) <= EQUAL


def _plain(value: object) -> object:
    """Convert a logged value to a type that JSON supports."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _mean_over(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Mean of each name's values over all parts."""
    by_name: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.items():
            by_name.setdefault(name, []).extend(values)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


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
    lengths = lengths.double()
    finished = finished.bool()
    ended = lengths[finished] if finished.any() else lengths.new_zeros(1)  # 0 if no completion ended, as in TRL
    metrics |= {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": (~finished).double().mean(),
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
    }
    return {name: value.item() for name, value in metrics.items()}


def _nanstd(values: Tensor) -> Tensor:
    """Standard deviation over the last dimension, ignoring NaN, with Bessel's correction; NaN below two values."""
    count = (~values.isnan()).sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1)).sqrt().masked_fill(count < 2, math.nan)
