"""Divergence of a run: metrics that leave the band of their last values, and steps without any reward."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nlgrpo.config.schema import MINIMUM_WINDOW, Config, DivergenceConfig
from nlgrpo.errors import UserError
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.training.tracking.run_files import METRICS_FILE, read_jsonl

CONSTANT = "advantage/frac_zero_std"
CONSTANT_STEPS = 10  # steps in which no group has different linearised rewards
OBJECTIVES = "objective/"  # the value of each reward, by its name
VALUE = OBJECTIVES + "aggregate"


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
        low = center - half if self.low else -math.inf
        high = center + half if self.high else math.inf
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
        band = BANDS[name]
        value = math.nan if value is None else value
        values = self.values.setdefault(name, deque(maxlen=self.config.window))
        low = -math.inf
        high = math.inf
        if len(values) >= MINIMUM_WINDOW:
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


@dataclass
class DivergenceWatch:
    """Looks at the metrics of each step, on all ranks alike, and warns or ends the run (divergence.action)."""

    config: Config
    ranks: Ranks
    detector: Detector = field(init=False)

    def begin(self, step: int) -> None:
        """Follow the metrics that were logged before ``step``; collective."""
        config = self.config
        self.detector = Detector(config.divergence, groups=config.rollout.samples > 1)
        rows = read_jsonl(config.run / METRICS_FILE)[-20 * config.divergence.window :] if self.ranks.first else []
        for row in self.ranks.gather_objects([row for row in rows if row["step"] < step])[0]:
            self.detector.look(row["step"], row)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if the run diverges at ``step``, or raise Diverged on all ranks."""
        action = self.config.divergence.action
        if action == "none":
            return
        fault = self.detector.look(step, metrics)
        if action != "warn" and self.ranks.any(fault is not None):
            raise fault or Diverged("another rank has diverged", step)
        if fault is not None and self.ranks.first:
            print(f"warning: {fault} (divergence.action)", file=sys.stderr, flush=True)

    def check_rewards(self, step: int, empty_steps: int, why: Callable[[], str]) -> None:
        """Warn if no completion of ``step`` had a reward, at the first of several such steps.

        ``empty_steps``: their number in a row. ``why()`` says which rewards abstained or failed. Raises UserError on
        all ranks after train.max_empty_steps of them.
        """
        limit = self.config.train.max_empty_steps
        ends = 0 < limit <= empty_steps
        if empty_steps != 1 and not ends:
            return
        reason = why()
        plural = "s" if empty_steps > 1 else ""
        advice = "None and an error with on_error = 'skip' count nowhere, so nothing is learned: correct the reward"
        if ends:
            raise UserError(
                f"no completion has had a reward for {empty_steps} step{plural} in a row, until step "
                f"{step + 1}. In the last one: {reason}. {advice}, or increase train.max_empty_steps = {limit} (0: "
                "never ends)"
            )
        if self.ranks.first:
            after = f"; train.max_empty_steps = {limit} such steps in a row end the run" if limit > 0 else ""
            print(
                f"warning: no completion of step {step + 1} has a reward: {reason}. {advice}{after}",
                file=sys.stderr,
                flush=True,
            )
