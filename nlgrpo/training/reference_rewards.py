"""Rewards calibrated on samples of the reference; objectives take them in place of the raw rewards.

    r(x, y) -> u, its rank among K samples of the reference for x -> Phi(u)         InfAlign-CTRL, by a `Transform`
    r(x, y) -> its rank among all prompts' samples, or sigmoid(r - median of x) -> Phi         the same, calibration.by
    r(x, y) -> F, the share below it in a total order -> log pi_bon(y) - log pi_ref(y)    vBoN, by `VariationalBoN`

The result is used like any other reward, with the KL penalty to the reference. Notation: P prompts of this rank,
M samples of the policy, K samples of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from nlgrpo.calibration import variational
from nlgrpo.calibration.alignment import calibrate, calibrate_by_median, calibrate_pooled
from nlgrpo.calibration.transforms import Log, Transform, parse_transform
from nlgrpo.calibration.variational import VariationalBoN, log_strict_cdf, string_keys, vbon_reward
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine.backends import NativeEngine
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.collect import Provenance, scorers
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import digest_of_prompt
from nlgrpo.errors import UserError
from nlgrpo.model.decoder import Decoder
from nlgrpo.objectives.registry import Objective
from nlgrpo.rewards.reward_functions import RewardError
from nlgrpo.runtime import user_code
from nlgrpo.runtime.distributed import Ranks

Smoother = Literal["add-half", "exponential"]
Calibration = Literal["prompt", "pooled", "median"]
FEWEST = 2  # samples of the reference among which a reward is ranked


@dataclass(frozen=True)
class CalibratedReward:
    """A calibrated reward: two tensors (P, M) float64, NaN where the reward abstained, and at prompts with fewer than
    `FEWEST` samples of the reference that have it."""

    values: Tensor
    """The transformed reward, Phi(u) or vBoN's; input of the objective."""
    ranks: Tensor
    """Ranks u in the prompt; their mean is the win rate of single samples against the reference."""

    def map(self, function: Callable[[Tensor], Tensor]) -> CalibratedReward:
        return CalibratedReward(function(self.values), function(self.ranks))

    def without(self, groups: Tensor) -> CalibratedReward:
        """Return a copy with NaN in the given ``groups``, (P,) bool."""
        return self.map(lambda x: x.masked_fill(groups.to(x.device)[:, None], torch.nan))


@dataclass(frozen=True)
class References:
    """Samples of the reference for one prompt: rewards {name: (K,)}, NaN where absent, and tie-breaking keys (K,)."""

    rewards: Mapping[str, Tensor]
    keys: Callable[[], Tensor]

    @cached_property
    def order(self) -> Tensor:
        return self.keys()


@dataclass
class ReferenceRewards:
    """Transforms rewards with rollouts of the reference, or with new samples for prompts without rollouts.

    ``drawing``: the sampler for the reference, with K samples and its own seed. None if prompts without rollouts are an
    error, which is raised before training (`missing`).
    """

    transforms: Mapping[str, Transform | VariationalBoN]
    rollouts: ReferenceRollouts | None
    drawing: Sampler | None
    smoother: Smoother
    ranks: Ranks
    by: Calibration = "prompt"
    by_block: bool = False  # how a sharded reference is gathered for sampling
    known: dict[str, References] = field(default_factory=dict)

    def missing(self, prompts: Sequence[Sequence[int]]) -> int:
        """Number of ``prompts`` without rollouts."""
        return sum(self.rollouts is None or self.rollouts.row(ids) is None for ids in prompts)

    def calibrate(
        self,
        rewards: Mapping[str, Tensor],
        batch: Batch,
        rollout: Rollout,
        ref_logprobs: Tensor | None,
        reference: Decoder | None,
    ) -> dict[str, CalibratedReward]:
        """Calibrate the rewards {name: (P, M)} of ``rollout`` that have a transform; collective.

        Only vBoN needs ``ref_logprobs`` (P M, L). Samples on which a reward abstains count nowhere, neither those of
        the policy nor those of the reference. Raises RewardError on all ranks if a reward failed on samples of the
        reference, or cannot be calibrated.
        """
        self._draw(batch, reference)
        return self.ranks.agree(partial(self._calibrate_all, rewards, batch, rollout, ref_logprobs))

    def _calibrate_all(
        self, rewards: Mapping[str, Tensor], batch: Batch, rollout: Rollout, ref_logprobs: Tensor | None
    ) -> dict[str, CalibratedReward]:
        try:
            references = [self._references(ids) for ids in batch.ids]
            return {
                name: self._calibrate_one(name, rewards[name], references, rollout, ref_logprobs)
                for name in self.transforms
            }
        except ValueError as error:
            raise RewardError(f"cannot calibrate a reward on samples of the reference: {error}") from None

    def _calibrate_one(
        self,
        name: str,
        rewards: Tensor,
        references: Sequence[References],
        rollout: Rollout,
        ref_logprobs: Tensor | None,
    ) -> CalibratedReward:
        """Calibrate on the samples of the reference that have the reward; NaN at prompts with fewer than `FEWEST`."""
        absent = rewards.isnan()
        given = torch.where(absent, 0.0, rewards.double().cpu())
        of_reference = torch.stack([prompt.rewards[name] for prompt in references])
        there = ~of_reference.isnan()
        values = torch.full_like(given, torch.nan)
        ranks = torch.full_like(given, torch.nan)
        for k in there.sum(1).unique().tolist():
            if k < FEWEST:
                continue
            rows = (there.sum(1) == k).nonzero()[:, 0]
            known = of_reference[rows][there[rows]].view(-1, k)
            ranks[rows] = calibrate(given[rows], known)
            if isinstance(self.transforms[name], VariationalBoN):
                order = torch.stack([prompt.order for prompt in references])[rows][there[rows]].view(-1, k)
                values[rows] = self._variational(name, given, rows, known, order, rollout, ref_logprobs)
            else:
                values[rows] = self._transformed(name, given[rows], ranks[rows], known)
        return CalibratedReward(values, ranks).map(lambda x: x.masked_fill(absent, torch.nan))

    def _variational(
        self,
        name: str,
        rewards: Tensor,
        rows: Tensor,
        reference: Tensor,
        reference_keys: Tensor,
        rollout: Rollout,
        ref_logprobs: Tensor | None,
    ) -> Tensor:
        """Reward of vBoN of the prompts ``rows`` of ``rewards`` (P, M)."""
        transform = self.transforms[name]
        assert isinstance(transform, VariationalBoN)
        assert ref_logprobs is not None  # the configuration was checked
        log_p = ref_logprobs.double().sum(-1).view(rewards.shape).cpu()
        keys = string_keys(rollout.completion_ids()).view(rewards.shape)
        log_f = log_strict_cdf(rewards[rows], keys[rows], reference, reference_keys, self.smoother)
        return vbon_reward(log_f, log_p[rows], transform.n, bound=transform.bound)

    def _transformed(self, name: str, rewards: Tensor, ranks: Tensor, reference: Tensor) -> Tensor:
        """Phi of the ranks, or of what `calibration.by` takes in their place."""
        transform = self.transforms[name]
        assert not isinstance(transform, VariationalBoN)
        if isinstance(transform, Log):
            transform = replace(transform, references=reference.shape[1])
        if self.by == "prompt":
            return transform(ranks)
        if self.by == "median":
            return transform(calibrate_by_median(rewards, reference))
        assert self.rollouts is not None  # the configuration was checked
        pool = self.rollouts.rewards[name]
        return transform(calibrate_pooled(rewards, pool[~pool.isnan()]))

    def _references(self, ids: Sequence[int]) -> References:
        digest = digest_of_prompt(ids)
        if digest not in self.known:
            assert self.rollouts is not None
            row = self.rollouts.row(ids)
            assert row is not None
            rewards = {name: self.rollouts.rewards[name][row] for name in self.transforms}
            self.known[digest] = References(rewards, partial(_keys, self.rollouts, row))
        return self.known[digest]

    def _draw(self, batch: Batch, reference: Decoder | None) -> None:
        """Sample completions for prompts without rollouts; collective, because sampling gathers the model."""
        unknown = [i for i, ids in enumerate(batch.ids) if not self._knows(ids)]
        if not self.ranks.any(bool(unknown)):
            return
        assert self.drawing is not None
        assert reference is not None
        prompts = _select(batch, unknown)
        rollout = self.drawing.draw(NativeEngine(reference, self.by_block), prompts)
        self.ranks.agree(lambda: self._store(prompts, rollout))

    def _store(self, prompts: Batch, rollout: Rollout) -> None:
        if not prompts.ids:
            return
        assert self.drawing is not None
        scores = self.drawing.score(prompts, rollout)
        if scores.skipped.any():  # these samples are kept for the whole run, so a failure would stay
            raise RewardError(
                f"a reward failed for samples of the reference at {int(scores.skipped.sum())} of {len(prompts.ids)} "
                f"prompts; one of {', '.join(self.transforms)} is calibrated on them. Correct the reward and resume"
            )
        values = scores.values
        keys = string_keys(rollout.completion_ids()).view(rollout.lengths.shape)
        for i, ids in enumerate(prompts.ids):
            rewards = {name: values[name][i].double().cpu() for name in self.transforms}
            self.known[digest_of_prompt(ids)] = References(rewards, partial(keys.__getitem__, i))

    def _knows(self, ids: Sequence[int]) -> bool:
        return digest_of_prompt(ids) in self.known or (self.rollouts is not None and self.rollouts.row(ids) is not None)


def make_reference_rewards(
    cfg: Config,
    sampler: Sampler,
    objectives: Mapping[str, Objective],
    prompts: PromptSet,
    origin: Callable[[], Provenance],
    ranks: Ranks,
) -> ReferenceRewards:
    """Build the calibration of a run from its configuration, ``sampler`` and ``prompts``.

    Raises UserError if the rollouts are incomplete or do not fit the run, if a reward scored none of them, or if
    prompts lack rollouts and calibration.missing is "error".
    """
    wanted = {name: reward.transform for name, reward in cfg.rewards.items() if reward.transform}
    options = cfg.calibration
    by_block = cfg.parallel.gather_for_sampling == "block"
    rollouts = None
    rewards = [reward for reward in sampler.rewards if reward.name in wanted]
    if options.rollouts:
        rollouts = reference_rollouts.load_checked(
            options.rollouts, origin, scorers(cfg.rewards, objectives, rewards), prompts
        )
        _check_scored(rollouts, wanted)
    K = options.samples if rollouts is None else rollouts.index.samples
    drawing = None
    if options.missing == "draw":
        drawing = replace(sampler, samples=K, seed=sampler.seed ^ (1 << 61), rewards=rewards)
    transforms: dict[str, Transform | VariationalBoN] = {}
    for name, text in wanted.items():
        transforms[name] = variational.parse_variational(text) or parse_transform(
            text, beta=beta_of(cfg, name), references=K, function=user_code.function
        )
    references = ReferenceRewards(transforms, rollouts, drawing, options.smoother, ranks, options.by, by_block)
    absent = references.missing(prompts.ids) if drawing is None else 0
    if absent:
        raise UserError(
            f"{absent} of {len(prompts)} prompts have no rollouts in {options.rollouts!r}; collect them with "
            "`nlgrpo rollout` and this configuration, or set calibration.missing = 'draw' to sample during training"
        )
    return references


def _check_scored(rollouts: ReferenceRollouts, names: Iterable[str]) -> None:
    """Raise UserError for a reward that has no prompt on which it can be calibrated."""
    for name in names:
        scored = (~rollouts.rewards[name].isnan()).sum(1)
        if (scored < FEWEST).all():
            raise UserError(
                f"{rollouts.folder}: reward {name!r} scored at most {int(scored.max())} samples of a prompt; a "
                f"transform needs {FEWEST} or more. Let it return numbers, and run `nlgrpo rollout` again, or remove "
                f"rewards.{name}.transform"
            )


def beta_of(cfg: Config, name: str) -> float:
    """Beta of the KL relative to a transformed reward of weight 1: w Phi - beta KL = w (Phi - beta/w KL)."""
    weight = abs(cfg.rewards[name].weight)
    return cfg.loss.beta / weight if weight > 0 else cfg.loss.beta


def _keys(rollouts: ReferenceRollouts, row: int) -> Tensor:
    return string_keys(rollouts.ids(row))


def _select(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select prompts and index them by digest, so that their samples do not depend on the step."""
    selected = batch.only(rows)
    return replace(selected, index=[int(digest_of_prompt(ids)[:8], 16) for ids in selected.ids])
