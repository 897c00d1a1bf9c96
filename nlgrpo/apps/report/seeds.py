"""Runs that differ in the seed only, as one setting, and tests between settings.

A setting's numbers are means over seeds and prompts, with intervals over both (`estimators.two_way_interval`). Two
settings are tested prompt by prompt, and seed by seed if they share several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.estimators import paired_test, two_way_interval
from nlgrpo.training.evaluation_summary import weighted_best_of_n

TESTED = 4  # most trained settings that are tested against each other


@dataclass
class Setting:
    """Samples of the runs of one configuration by seed. ``label``: name in figures and tables."""

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    by_seed: dict[Any, EvaluationSamples] = field(default_factory=dict)

    @property
    def pooled(self) -> EvaluationSamples:
        return evaluation_samples.pooled([sampled for _, sampled in self._sorted()])

    def values(self, ns: Sequence[int], seeds: Sequence[Any] | None = None) -> Tensor:
        """Weighted sum of best-of-N of all or some seeds, (S, len(ns), P); NaN where it is not defined."""
        return torch.stack([weighted_best_of_n(s, ns) for seed, s in self._sorted() if seeds is None or seed in seeds])

    def _sorted(self) -> list[tuple[Any, EvaluationSamples]]:
        return sorted(self.by_seed.items(), key=lambda item: str(item[0]))


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Section of a configuration that was read from a file; empty if it is missing or not a table."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def seed_of(config: Mapping[str, Any]) -> Any:
    """The seed of a run; None if its configuration has none."""
    return section(config, "train").get("seed")


def without_seed(config: Mapping[str, Any]) -> str:
    """The configuration without the seed and the folder, as text: equal for runs of one setting."""
    train = {key: value for key, value in section(config, "train").items() if key not in ("seed", "out")}
    return json.dumps({**config, "train": train}, sort_keys=True, default=str)


def grouped(runs: Sequence[tuple[str, Any]]) -> list[list[int]]:
    """Group the indices of runs, given their settings and seeds: one group per setting, in the order of the first run.

    A run without a seed, or with one that the group has already, begins a group of its own.
    """
    groups: list[list[int]] = []
    for number, (setting, seed) in enumerate(runs):
        for group in groups:
            same = runs[group[0]][0] == setting
            if same and seed is not None and all(runs[other][1] not in (seed, None) for other in group):
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


@dataclass(frozen=True)
class Difference:
    """Best-of-``n`` of one setting less that of ``other``: mean, 95% interval, p-value of no difference."""

    other: str
    n: int
    value: float
    low: float
    high: float
    p_value: float
    over: str  # what the interval is over: "prompts" or "prompts, 3 seeds"

    @property
    def shown(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    @property
    def shown_p(self) -> str:
        return "" if math.isnan(self.p_value) else "< 0.001" if self.p_value < 0.001 else f"{self.p_value:.3f}"


def differences(first: Setting, others: Sequence[Setting], ns: Sequence[int], where: Tensor) -> Iterator[Difference]:
    """Test the first setting against each other one, for each N, over the prompts ``where`` they can be compared.

    Paired by prompt. Settings that share several seeds are paired by seed too, and only those seeds are compared. For
    others, the values are means over the seeds of each, and the interval is over prompts alone.
    """
    for other in others:
        common = sorted(first.by_seed.keys() & other.by_seed.keys(), key=str)
        paired = len(common) > 1
        seeds = common if paired else None
        ours, theirs = (setting.values(ns, seeds).masked_fill(~where, math.nan) for setting in (first, other))
        if not paired:
            ours = ours.mean(0, keepdim=True)
            theirs = theirs.mean(0, keepdim=True)
        for i, n in enumerate(ns):
            there = ~(ours[:, i] - theirs[:, i]).isnan().any(0)
            if there.sum() < 2:
                continue
            if paired:
                found = two_way_interval((ours - theirs)[:, i, there])
            else:
                found = paired_test(ours[0, i, there], theirs[0, i, there])
            yield Difference(other.label, n, *found, f"prompts, {len(common)} seeds" if paired else "prompts")
