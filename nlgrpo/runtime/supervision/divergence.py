"""Divergence of a training run: metrics that leave the band of their last values."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nlgrpo.errors import UserError

MINIMUM = 20  # values that a band needs
CONSTANT = "advantage/frac_zero_std"
CONSTANT_STEPS = 10  # steps in which no group has different linearised rewards
OBJECTIVES = "objective/"  # the value of each reward, by its name
VALUE = OBJECTIVES + "aggregate"


@dataclass
class DivergenceConfig:
    """What happens when a metric leaves its band."""

    action: Literal["none", "warn", "stop", "rollback"] = "warn"
    """What to do when the loss, the KL, the gradient norm, the objective or the length of completions has left its
    band, or all linearised rewards of a prompt are equal, so that nothing is learned: warn, with what to change; stop;
    or roll back to the last checkpoint before it, and continue with other samples. The rewards themselves do not
    decide: those of opposed users cancel in their sum, and their mean may fall while best-of-N rises."""
    window: int = 50
    """Steps whose values make a band: their median, plus or minus `factor` standard deviations (from the median
    absolute deviation)."""
    factor: float = 10.0
    """Half of the width of a band, in standard deviations."""
    patience: int = 3
    """Steps in a row outside of its band after which a metric has left it."""
    max_kl: float | None = None
    """KL per token above which it has left its band, whatever the last values are. None: no limit."""
    rollbacks: int = 3
    """Rollbacks after which a run stops instead."""

    def faults(self) -> list[str]:
        """List the values that are not possible."""
        allowed = {
            "window": (f">= {MINIMUM}", self.window >= MINIMUM),
            "factor": ("> 0", self.factor > 0),
            "patience": (">= 1", self.patience >= 1),
            "max_kl": ("> 0 or none", self.max_kl is None or self.max_kl > 0),
            "rollbacks": (">= 0", self.rollbacks >= 0),
        }
        return [
            f"divergence.{k} = {getattr(self, k)}: allowed is {text}" for k, (text, ok) in allowed.items() if not ok
        ]


class Diverged(UserError):
    """A run has diverged. ``onset``: the first step that was outside."""

    def __init__(self, text: str, onset: int) -> None:
        super().__init__(text)
        self.onset = onset


@dataclass(frozen=True)
class Band:
    """How a metric is judged. ``log``: by ratios; ``least``: half of the width is never smaller."""

    least: float
    advice: str
    log: bool = False
    low: bool = True
    high: bool = True

    def of(self, values: list[float], factor: float) -> tuple[float, float]:
        """Return the band of the last values."""
        points = [math.log(value) for value in values if value > 0] if self.log else values
        if not points:
            return -math.inf, math.inf
        center = statistics.median(points)
        spread = 1.4826 * statistics.median([abs(point - center) for point in points])
        half = max(factor * spread, self.least)
        low, high = center - half if self.low else -math.inf, center + half if self.high else math.inf
        return (math.exp(low), math.exp(min(high, 700.0))) if self.log else (low, high)


BANDS = {
    "loss": Band(1.0, "lower optim.lr, or clip more (optim.max_grad_norm, loss.dual_clip)"),
    "kl": Band(0.1, "raise loss.beta, set loss.target_kl, or lower optim.lr", low=False),
    "grad_norm": Band(math.log(10), "lower optim.lr or optim.max_grad_norm, or set optim.skip_grad_norm", log=True,
                      low=False),
    VALUE: Band(0.1, "lower optim.lr or raise loss.beta; look at samples.jsonl", high=False),
    "completions/mean_length": Band(math.log(3), "look at samples.jsonl: a reward of lengths, or a lost end of text",
                                    log=True),
}  # fmt: skip


@dataclass
class Detector:
    """Follows the metrics of a run. The same metrics give the same answers, so ranks agree, and a resumed run too.

    ``groups``: prompts have several completions.
    """

    config: DivergenceConfig
    groups: bool = True
    values: dict[str, deque[float]] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)  # steps in a row

    def look(self, step: int, metrics: Mapping[str, float | None]) -> Diverged | None:
        """Follow one step; return what is wrong. A band begins again after it was left."""
        found = [self._metric(name, step, metrics[name]) for name in BANDS if _logged(name, metrics)]
        if CONSTANT in metrics and self.groups:
            found.append(self._constant(step, metrics[CONSTANT]))
        faults = [fault for fault in found if fault is not None]
        if not faults:
            return None
        return Diverged("; ".join(map(str, faults)), min(fault.onset for fault in faults))

    def _metric(self, name: str, step: int, value: float | None) -> Diverged | None:
        band, value = BANDS[name], math.nan if value is None else value
        values = self.values.setdefault(name, deque(maxlen=self.config.window))
        low, high = -math.inf, math.inf
        if len(values) >= MINIMUM:
            low, high = band.of(list(values), self.config.factor)
        if name == "kl" and self.config.max_kl is not None:
            high = min(high, self.config.max_kl)
        if low <= value <= high and math.isfinite(value):
            values.append(value)
            self.outside[name] = 0
            return None
        self.outside[name] = self.outside.get(name, 0) + 1
        if self.outside[name] != self.config.patience:  # once
            return None
        values.clear()
        where = f"outside of [{low:.3g}, {high:.3g}]" if math.isfinite(value) else "not finite"
        text = f"{name} is {value:.3g} at step {step + 1}, {where} for {self.config.patience} steps: {band.advice}"
        return Diverged(text, step + 1 - self.config.patience)

    def _constant(self, step: int, share: float | None) -> Diverged | None:
        self.outside[CONSTANT] = self.outside.get(CONSTANT, 0) + 1 if share == 1.0 else 0
        steps = max(CONSTANT_STEPS, self.config.patience)
        if self.outside[CONSTANT] != steps:  # once
            return None
        text = (
            f"all completions of a prompt have had the same linearised reward for {steps} steps, so nothing is "
            "learned: the rewards are at their maximum, broken, cannot tell completions apart, or cancel each other, "
            "or the policy has collapsed, against which a lower optim.lr helps; look at samples.jsonl, which is "
            "written with train.samples_every > 0"
        )
        return Diverged(text, step + 1 - steps)


def _logged(name: str, metrics: Mapping[str, float | None]) -> bool:
    """Whether a step has the metric, and for the value of the objective, whether every reward is part of it.

    The value of a reward that abstains for all completions of a step is NaN, or None in the log. The sum of the others
    cannot be compared with that of all.
    """
    if name not in metrics or name != VALUE:
        return name in metrics
    parts = [value for part, value in metrics.items() if part.startswith(OBJECTIVES)]
    return not any(value is None or math.isnan(value) for value in parts)
