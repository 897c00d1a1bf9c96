"""A warning if rewards turn out to be 0 or 1 under an estimate that is biased for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from nlgrpo.config.schema import Config
from nlgrpo.objectives import estimator_bias
from nlgrpo.objectives.advantages import Baseline
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import Objective
from nlgrpo.runtime.distributed import Ranks

ENOUGH = 64  # completions, some with a reward of 0 and some of 1
LARGEST_RATIO = 1.25  # of the gains at two success probabilities, or of one and 1, below which nothing is said
LARGEST = 100  # factors above are not written out


@dataclass
class BinaryRewards:
    """Follows the rewards of a run whose plug-in estimates have an exact alternative."""

    objectives: dict[str, OfN]
    """Of the rewards that were 0 or 1 so far."""
    M: int
    baseline: Baseline
    seen: dict[str, list[int]] = field(default_factory=dict)
    """Number of completions with a reward of 0 and of 1."""

    @classmethod
    def of(cls, config: Config, objectives: Mapping[str, Objective]) -> BinaryRewards:
        biased: dict[str, OfN] = {}
        for name, objective in objectives.items():
            reward = config.rewards[name]
            if not isinstance(objective, OfN) or objective.estimator != "plugin" or objective.n == 1:
                continue
            if reward.weight != 0 and not reward.transform:
                biased[name] = objective
        return cls(biased, config.rollout.samples, config.loss.baseline)

    def warn(self, rewards: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Print what is to be said after a step, on the first rank."""
        for text in self.look(rewards):
            if ranks.first:
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def look(self, rewards: Mapping[str, Tensor]) -> list[str]:
        """Return what is to be said after a step with these rewards, {name: (P, M)}; once for each reward."""
        said = []
        for name, objective in list(self.objectives.items()):
            given = rewards[name]
            zeros = int((given == 0).sum())
            ones = int((given == 1).sum())
            if zeros + ones < int((~given.isnan()).sum()):
                del self.objectives[name]
                continue
            counts = self.seen.setdefault(name, [0, 0])
            counts[0] += zeros
            counts[1] += ones
            if min(counts) == 0 or sum(counts) < ENOUGH:
                continue
            del self.objectives[name]
            said += self._warning(name, objective, sum(counts))
        return said

    def _warning(self, name: str, objective: OfN, completions: int) -> list[str]:
        gains = estimator_bias.gain_for_binary(objective, self.M, baseline=self.baseline)
        known = gains[~gains.isnan()].tolist()
        low = min(known, default=1.0)
        high = max(known, default=1.0)
        if max(high, 1.0) <= LARGEST_RATIO * min(low, 1.0):
            return []
        return [
            f"rewards.{name} is 0 or 1 for all {completions} completions so far. Under '{objective}' in groups of "
            f"{self.M} the expected gradient of a prompt is the exact one times {factor(low)} to {factor(high)}, "
            f"depending on how often it is solved; {exact_alternative(objective, self.M)}"
        ]


def factor(gain: float) -> str:
    """``"0.60"``."""
    return f"{gain:.2f}" if abs(gain) < LARGEST else f"over {LARGEST}"


def exact_alternative(objective: OfN, M: int) -> str:
    """Name the objective whose estimate is unbiased, and the size of the group that it needs."""
    if objective.n <= M:
        return f"'{objective}:unbiased' is exact"
    return f"'{objective}:unbiased' is exact from rollout.samples = {objective.n} on"
