"""Rewards held against those of the reference's own samples, and what an objective sees of them.

    r(x, y) -> u, its rank among K samples of the reference for x -> Phi(u)         InfAlign-CTRL, by a `Transform`
    r(x, y) -> F, the share below it in a total order -> log pi_bon(y) - log pi_ref(y)    vBoN, by `VariationalBoN`

With the KL to the reference, each is a reward as any other to what follows. Legend: P prompts of this rank, M samples
of the policy, K samples of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from nlgrpo.calibration import variational
from nlgrpo.calibration.alignment import calibrate
from nlgrpo.calibration.transforms import Transform, parse_transform
from nlgrpo.calibration.variational import VariationalBoN, log_strict_cdf, string_keys, vbon_reward
from nlgrpo.config.schema import Config
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine.generation import Rollout
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.collect import Provenance, scorers
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.engine.rollouts.store import digest_of_prompt
from nlgrpo.model.decoder import Decoder
from nlgrpo.objectives.registry import Objective
from nlgrpo.rewards.reward_functions import Reward, RewardError
from nlgrpo.runtime import user_code
from nlgrpo.runtime.distributed import Ranks

Smoother = Literal["add-half", "exponential"]


@dataclass(frozen=True)
class CalibratedReward:
    """A reward held against the reference, (P, M) float64 each, NaN where it abstained."""

    values: Tensor
    """What its objective sees."""
    ranks: Tensor
    """u; its mean is the win rate of single samples against the reference."""

    def map(self, function: Callable[[Tensor], Tensor]) -> CalibratedReward:
        return CalibratedReward(function(self.values), function(self.ranks))

    def without(self, groups: Tensor) -> CalibratedReward:
        """NaN in the ``groups`` (P,) bool."""
        return self.map(lambda x: x.masked_fill(groups.to(x.device)[:, None], torch.nan))


@dataclass(frozen=True)
class References:
    """The reference's samples of one prompt: rewards {name: (K,)}, and keys (K,) that order equal ones."""

    rewards: Mapping[str, Tensor]
    keys: Callable[[], Tensor]

    @cached_property
    def order(self) -> Tensor:
        return self.keys()


@dataclass
class ReferenceRewards:
    """Turns the rewards that have a transform, by rollouts; of prompts that these lack, by samples drawn when needed.

    ``drawing`` has the reference's sampling, its K and noise of its own; None where a prompt without rollouts is an
    error, which is then told before training (`missing`).
    """

    transforms: Mapping[str, Transform | VariationalBoN]
    rollouts: ReferenceRollouts | None
    drawing: Sampler | None
    smoother: Smoother
    ranks: Ranks
    known: dict[str, References] = field(default_factory=dict)

    def missing(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many of the prompts have no rollouts."""
        return sum(self.rollouts is None or self.rollouts.row(ids) is None for ids in prompts)

    def calibrate(
        self,
        rewards: Mapping[str, Tensor],
        batch: Batch,
        rollout: Rollout,
        ref_logprobs: Tensor | None,
        reference: Decoder | None,
    ) -> dict[str, CalibratedReward]:
        """Of rewards {name: (P, M)} of ``rollout``; collective. ``ref_logprobs`` (P M, L) are needed by vBoN only.

        Raises RewardError on all ranks where a reward of the reference's samples failed, or cannot be held against.
        """
        if not self.transforms:
            return {}
        self._draw(batch, reference)
        return self.ranks.agree(partial(self._calibrate_all, rewards, batch, rollout, ref_logprobs), RewardError)

    def _calibrate_all(
        self, rewards: Mapping[str, Tensor], batch: Batch, rollout: Rollout, ref_logprobs: Tensor | None
    ) -> dict[str, CalibratedReward]:
        try:
            here = [self._references(ids) for ids in batch.ids]
            return {
                name: self._calibrate_one(name, rewards[name], here, rollout, ref_logprobs) for name in self.transforms
            }
        except ValueError as error:
            raise RewardError(f"reward held against the reference's samples: {error}") from None

    def _calibrate_one(
        self, name: str, rewards: Tensor, here: Sequence[References], rollout: Rollout, ref_logprobs: Tensor | None
    ) -> CalibratedReward:
        absent = rewards.isnan()
        own = torch.where(absent, 0.0, rewards.double().cpu())
        reference = torch.stack([one.rewards[name] for one in here])
        transform, u = self.transforms[name], calibrate(own, reference)
        if isinstance(transform, VariationalBoN):
            assert ref_logprobs is not None  # the configuration was checked
            log_p = ref_logprobs.double().sum(-1).view(own.shape).cpu()
            keys = string_keys(rollout.completion_ids()).view(own.shape)
            order = torch.stack([one.order for one in here])
            log_f = log_strict_cdf(own, keys, reference, order, self.smoother)
            values = vbon_reward(log_f, log_p, transform.n, bound=transform.bound)
        else:
            values = transform(u)
        return CalibratedReward(values, u).map(lambda x: x.masked_fill(absent, torch.nan))

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
        """Samples of the prompts of which nothing is known; on all ranks, because sampling gathers the model."""
        unknown = [i for i, ids in enumerate(batch.ids) if not self._knows(ids)]
        if not self.ranks.any(bool(unknown)):
            return
        assert self.drawing is not None
        assert reference is not None
        own = _picked(batch, unknown)
        rollout = self.drawing.draw(reference, own)
        self.ranks.agree(lambda: self._keep(own, rollout), RewardError)

    def _keep(self, own: Batch, rollout: Rollout) -> None:
        if not own.ids:
            return
        assert self.drawing is not None
        values = self.drawing.score(own, rollout).values
        for name in self.transforms:
            if values[name].isnan().any():
                raise RewardError(
                    f"reward {name!r} abstained for a sample of the reference, whose prompt has no CDF then"
                )
        keys = string_keys(rollout.completion_ids()).view(rollout.lengths.shape)
        for i, ids in enumerate(own.ids):
            rewards = {name: values[name][i].double().cpu() for name in self.transforms}
            self.known[digest_of_prompt(ids)] = References(rewards, partial(keys.__getitem__, i))

    def _knows(self, ids: Sequence[int]) -> bool:
        return digest_of_prompt(ids) in self.known or (self.rollouts is not None and self.rollouts.row(ids) is not None)


def matching_rollouts(
    cfg: Config,
    rewards: Sequence[Reward],
    objectives: Mapping[str, Objective],
    prompts: PromptSet,
    origin: Callable[[], Provenance],
) -> ReferenceRollouts:
    """Those of calibration.rollouts, with these rewards of every sample.

    Raises ValueError where they are cut short, do not fit the run or its prompts' columns, or where one of the rewards
    abstained.
    """
    rollouts = reference_rollouts.load(cfg.calibration.rollouts)
    rollouts.check(origin(), scorers(cfg.rewards, objectives, rewards))
    rollouts.check_columns(prompts)
    for reward in rewards:
        rollouts.ecdf(reward.name)  # refuses abstentions
    return rollouts


def make(
    cfg: Config,
    sampler: Sampler,
    objectives: Mapping[str, Objective],
    prompts: PromptSet,
    origin: Callable[[], Provenance],
    ranks: Ranks,
) -> ReferenceRewards:
    """Of a run with these prompts; ``sampler`` is its own.

    Raises ValueError for rollouts that are cut short or do not fit the run, and for prompts that have none.
    """
    wanted = {name: reward.transform for name, reward in cfg.rewards.items() if reward.transform}
    if cfg.loss.offline:  # chooses among the rewards themselves
        wanted = {}
    own, rollouts = cfg.calibration, None
    rewards = [reward for reward in sampler.rewards if reward.name in wanted]
    if wanted and own.rollouts:
        rollouts = matching_rollouts(cfg, rewards, objectives, prompts, origin)
    K = own.samples if rollouts is None else rollouts.index.samples
    drawing = None
    if own.missing == "draw":
        drawing = replace(sampler, samples=K, seed=sampler.seed ^ (1 << 61), rewards=rewards)
    parsed = {
        name: variational.parse(text)
        or parse_transform(text, beta=beta_of(cfg, name), references=K, function=user_code.function)
        for name, text in wanted.items()
    }
    found = ReferenceRewards(parsed, rollouts, drawing, own.smoother, ranks)
    absent = found.missing(prompts.ids) if wanted and drawing is None else 0
    if absent:
        raise ValueError(
            f"{absent} of {len(prompts)} prompts have no rollouts in {own.rollouts!r}; `nlgrpo rollout` with this "
            "configuration draws them, or calibration.missing = 'draw' does when a prompt comes"
        )
    return found


def beta_of(cfg: Config, name: str) -> float:
    """The weight of the KL beside a transformed reward of weight 1: w Phi - beta KL is w (Phi - beta/w KL)."""
    weight = abs(cfg.rewards[name].weight)
    return cfg.loss.beta / weight if weight > 0 else cfg.loss.beta


def _keys(rollouts: ReferenceRollouts, row: int) -> Tensor:
    return string_keys(rollouts.ids(row))


def _picked(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some prompts, numbered by their own digests, so that the noise does not depend on when a prompt comes."""
    own = batch.only(rows)
    return replace(own, index=[int(digest_of_prompt(ids)[:8], 16) for ids in own.ids])
