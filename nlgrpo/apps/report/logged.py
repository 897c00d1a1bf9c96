"""The metrics that runs logged, as columns, and which of them a report draws in one panel. S: logged steps."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nlgrpo.training.tracking import run_files

LARGEST = 1e300  # of a number in a file; larger ones are no metrics
LAST_STEP = 2**53  # a script can count no further
LOW = "/low"  # after the name of a metric of an evaluation: the ends of its interval
HIGH = "/high"


@dataclass(frozen=True)
class Logged:
    """Metrics of one run, or their means over runs that differ in the seed."""

    steps: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The logged steps (S,), in order."""
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values (S,) by name, NaN where a step has none. Each metric has a value at some step."""
    nulls: Mapping[str, int] = field(default_factory=dict)
    """Number of steps in which a metric was not finite: `metrics.jsonl` has null then."""

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def read(cls, path: Path) -> Logged:
        """Read a `metrics.jsonl`. Values that are no finite numbers count as missing."""
        return cls.of(run_files.read_jsonl(path))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Logged:
        """Make columns of the rows of a `metrics.jsonl`. Of a step that was logged twice, the last row counts."""
        by_step = {row["step"]: row for row in rows if 0 <= row["step"] <= LAST_STEP}
        steps = sorted(by_step)
        metrics: dict[str, np.ndarray] = {}
        nulls = Counter[str]()
        for place, step in enumerate(steps):
            for name, value in by_step[step].items():
                nulls[name] += value is None
                if name == "step" or not is_number(value):
                    continue
                if name not in metrics:
                    metrics[name] = np.full(len(steps), math.nan)
                metrics[name][place] = value
        return cls(np.array(steps, dtype=np.int64), metrics, +nulls)

    @classmethod
    def of_evaluations(cls, rows: Sequence[Mapping[str, Any]]) -> Logged:
        """Make columns of the rows of an `evaluations.jsonl`: NAME, and the ends of its interval, NAME/low and /high.

        Rows and numbers that are none count as missing.
        """
        flat = []
        for row in rows:
            found = {"step": row["step"]}
            values = row.get("values")
            for name, numbers in values.items() if isinstance(values, Mapping) else ():
                if isinstance(numbers, Sequence) and len(numbers) == 3:
                    found |= dict(zip((name, name + LOW, name + HIGH), numbers, strict=True))
            flat.append(found)
        return cls.of(flat)

    def without_intervals(self) -> Logged:
        """Return the values of evaluations alone: means over runs have other intervals."""
        return replace(self, metrics={k: v for k, v in self.metrics.items() if not _is_end(k, self.metrics)})

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that have a value of the metric, and their values; both empty if it was not logged."""
        values = self.metrics.get(name)
        if values is None:
            return self.steps[:0], np.empty(0)
        known = ~np.isnan(values)
        return self.steps[known], values[known]

    def last(self, name: str, share: float = 0.1) -> float:
        """Return the mean of a metric over the last ``share`` of the steps; NaN if none of them has it."""
        values = self.metrics.get(name)
        if values is None:
            return math.nan
        values = values[-max(1, int(share * len(self))) :]
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else math.nan


def mean_over_runs(runs: Sequence[Logged]) -> Logged:
    """Return the means of the metrics, at the steps and of the metrics that all runs with steps have."""
    runs = [run for run in runs if len(run)]
    if not runs:
        return Logged()
    steps = runs[0].steps
    for run in runs[1:]:
        steps = np.intersect1d(steps, run.steps)
    names = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    metrics = {}
    for name in names:
        values = [run.metrics[name][np.searchsorted(run.steps, steps)] for run in runs]
        mean = np.mean(values, axis=0)  # NaN where a run has no value
        if not np.isnan(mean).all():
            metrics[name] = mean
    nulls = Counter[str]()
    for run in runs:
        nulls.update(run.nulls)
    return Logged(steps, metrics, nulls)


def is_number(value: Any) -> bool:
    """Whether a value of a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


# --- curves with fewer points -----------------------------------------------------------------------------------------


def moving_average(values: np.ndarray) -> np.ndarray:
    """Average over 5% of the values, over fewer at the ends. Less than 40 values are returned as they are."""
    width = len(values) // 20
    if width < 2:
        return values
    window = np.ones(width)
    return np.convolve(values, window, mode="same") / np.convolve(np.ones_like(values), window, mode="same")


def extremes(values: np.ndarray, most: int) -> np.ndarray:
    """Return indices of at most ``most`` values: the minimum and the maximum of each segment, which keeps spikes."""
    if len(values) <= most:
        return np.arange(len(values))
    borders = np.linspace(0, len(values), most // 2 + 1).round().astype(int)
    kept = set[int]()
    for start, end in pairwise(borders):
        segment = values[start:end]
        kept |= {int(start + segment.argmin()), int(start + segment.argmax())}
    return np.array(sorted(kept))


def evenly(count: int, most: int) -> np.ndarray:
    """Return at most ``most`` of ``count`` indices, with equal distances, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


# --- panels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """Metrics that share an axis. The group of ``pattern`` is the label of a metric."""

    title: str
    ylabel: str
    pattern: re.Pattern[str]
    important: bool = True
    """Whether the page shows the panel at once, and not among the other metrics."""

    def label(self, metric: str) -> str | None:
        """Return the label of a metric in this panel; None if it has another unit."""
        found = self.pattern.fullmatch(metric)
        return None if found is None else found[found.lastindex or 0]


def _quantity(title: str, ylabel: str, pattern: str, *, important: bool = True) -> Quantity:
    return Quantity(title, ylabel, re.compile(pattern), important)


QUANTITIES = (
    _quantity("Mean reward", "reward", r"rewards/(.+)/mean"),
    _quantity("Objective (batch estimate)", "objective value", r"objective/(.+)"),
    _quantity("KL to the reference", "nats per token", r"(kl)"),
    _quantity("Completion log-probs", "nats", r"logps/(.+)"),
    _quantity("Implicit reward", "reward", r"rewards/(chosen|rejected)"),
    _quantity("Implicit reward margin", "margin", r"rewards/(margins)"),
    _quantity("Preference accuracy", "accuracy", r"rewards/(accuracies)"),
    _quantity("Held-out examples", "value", r"held_out/(.+)"),
    _quantity("Completion length", "tokens", r"completions/(mean_length|mean_terminated_length|max_length)"),
    _quantity("Completions without an end", "share of completions", r"completions/(clipped_ratio)"),
    _quantity("Entropy", "nats per token", r"(entropy)"),
    _quantity("Gradient norm", "norm before clipping", r"(grad_norm)"),
    _quantity("Clipped tokens", "share of tokens", r"clip_ratio/(.+)_mean"),
    _quantity("Groups without a gradient", "share of groups", r"advantage/(frac_zero_std)"),
    _quantity("Loss", "loss", r"(loss)"),
    _quantity("Time per step", "seconds", r"time/(.+)|(step_time)"),
    _quantity("Throughput", "tokens per second", r"perf/(tokens_per_s)"),
    _quantity("Learning rate", "learning rate", r"(learning_rate)", important=False),
    _quantity("KL weight", "beta", r"(beta)"),
    _quantity("Standard deviation of rewards", "reward", r"rewards/(.+)/std", important=False),
)
CONSTANT = ("beta", "learning_rate")  # shown only if they change
OBJECTIVE = "objective/"
AGGREGATE = "objective/aggregate"


@dataclass(frozen=True)
class Series:
    """One curve: a metric of a run."""

    label: str  # of the metric in the panel of one run, of the run in that of several
    metric: str
    run: str
    logged: Logged

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        return self.logged.points(self.metric)

    def interval(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Ends of the 95% intervals at these points, NaN where there is none; None for a metric of training."""
        ends = [self.logged.metrics.get(self.metric + end) for end in (LOW, HIGH)]
        if ends[0] is None or ends[1] is None:
            return None
        known = ~np.isnan(self.logged.metrics[self.metric])
        return ends[0][known], ends[1][known]


@dataclass(frozen=True)
class Panel:
    """Curves in one coordinate system."""

    title: str
    ylabel: str
    series: Sequence[Series]
    important: bool = True


def panels_of_run(label: str, logged: Logged, objectives: Mapping[str, str]) -> list[Panel]:
    """Return the panels of one run, the important ones first. ``objectives``: by reward, such as ``"bon:4"``."""
    panels = []
    for quantity, metrics in _by_quantity(logged.metrics):
        shown = [name for name in metrics if name not in CONSTANT or _changes(logged, name)]
        if len(objectives) == 1 and len(shown) > 1:  # the sum over one reward
            shown = [name for name in shown if name != AGGREGATE]
        series = []
        for metric in shown:
            name = quantity.label(metric) or metric
            if metric.startswith(OBJECTIVE) and name in objectives:
                name += f": {objectives[name]}"
            series.append(Series(name, metric, label, logged))
        if series:
            panels.append(Panel(quantity.title, quantity.ylabel, series, quantity.important))
    return sorted(panels, key=lambda panel: not panel.important)


def panels_of_runs(runs: Mapping[str, Logged], objectives: Mapping[str, Mapping[str, str]]) -> list[Panel]:
    """Return the panels of several runs, the important ones first: one per metric, with a curve of each run.

    ``objectives``: those of each run, by reward. Values of different objectives are in different panels.
    """
    every = dict.fromkeys(name for logged in runs.values() for name in logged.metrics)
    panels = []
    for quantity, metrics in _by_quantity(every):
        for metric in metrics:
            having = {run: logged for run, logged in runs.items() if metric in logged.metrics}
            if metric in CONSTANT and not any(_changes(logged, metric) for logged in having.values()):
                continue
            label = quantity.label(metric) or metric
            title = quantity.title
            if len(metrics) > 1 and metric != AGGREGATE:
                title += f": {label}"
            important = quantity.important
            if metric.startswith(OBJECTIVE):
                important = metric == AGGREGATE or AGGREGATE not in every
            by_objective: dict[str, list[Series]] = {}
            for run, logged in having.items():
                objective = _objective_of(metric, objectives.get(run, {}))
                by_objective.setdefault(objective, []).append(Series(run, metric, run, logged))
            for objective, series in by_objective.items():
                panels.append(Panel(f"{title} {objective}".strip(), quantity.ylabel, series, important))
    return sorted(panels, key=lambda panel: not panel.important)


def evaluation_panels(runs: Mapping[str, Logged], rewards: Sequence[str], binary: Collection[str]) -> list[Panel]:
    """Return the panels of evaluations during training, of one run or several; [] if there were none.

    One run has a panel for each set and quantity, with a curve of each procedure; several have one for each metric.
    ``rewards``: their names; those in ``binary`` are 0 or 1, so that best-of-N is called pass@N.
    """

    def label_of(name: str) -> str:
        label = _evaluated(name)[2]
        if not any(f"rewards/{reward}/" in name or f"win_rate/{reward}/" in name for reward in binary):
            return label
        return "pass@1" if label == "mean" else re.sub("^best-of-", "pass@", label)

    during = {run: logged for run, logged in runs.items() if len(logged) > 2}  # not only before and after training
    panels = []
    every = dict.fromkeys(name for logged in during.values() for name in logged.metrics)
    names = [name for name in every if not _is_end(name, every)]
    if len(rewards) == 1:  # sums over one reward
        names = [name for name in names if not (name.endswith(AGGREGATE) or _evaluated(name)[0].endswith(SUM))]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        title, ylabel, _ = _evaluated(name)
        label = label_of(name)
        key = (title, ylabel, "") if len(during) == 1 else (f"{title}: {label}", ylabel, name)
        groups.setdefault(key, []).append(name)
    for (title, ylabel, _), metrics in groups.items():
        series = [
            Series(run if len(during) > 1 else label_of(name), name, run, logged)
            for name in metrics
            for run, logged in during.items()
            if name in logged.metrics
        ]
        important = any(part in metrics[0] for part in ("objective/", "rewards/"))
        panels.append(Panel(title, ylabel, series, important))
    return panels


def _is_end(name: str, names: Collection[str]) -> bool:
    """Whether a metric is the end of the interval of another one."""
    return any(name.endswith(end) and name.removesuffix(end) in names for end in (LOW, HIGH))


EVALUATION = "Evaluation"
SUM = "weighted sum"
PARTS = (  # of the names of `training.evaluation_values`
    (re.compile(r"(?:(.+)/)?objective/([^/]+)"), "objective", "objective value"),
    (re.compile(r"(?:(.+)/)?rewards/(.+)/([^/]+)"), "{}", "reward"),
    (re.compile(r"(?:(.+)/)?win_rate/(.+)/([^/]+)"), "win rate of {} over the initial policy", "win rate"),
    (re.compile(r"(?:(.+)/)?reward(?:_(.+))?"), SUM, "reward"),
    (re.compile(r"(?:(.+)/)?completions/(mean_length)"), "completion length", "tokens"),
)


def _evaluated(name: str) -> tuple[str, str, str]:
    """Title of the panel of a metric, the label of its axis, and of the curve."""
    for pattern, about, ylabel in PARTS:
        found = pattern.fullmatch(name)
        if found is not None:
            of_set, *rest = found.groups()
            title = f"{EVALUATION} ({of_set})" if of_set else EVALUATION
            return f"{title}: {about.format(rest[0])}", ylabel, rest[-1] or "mean"
    return f"{EVALUATION}: {name}", "value", name


def objective_text(objectives: Mapping[str, str]) -> str:
    """Return the objectives of all rewards in a few words: "bon:4", or "short bon:4, long mean" if they differ."""
    different = list(dict.fromkeys(objectives.values()))
    if len(different) < 2:
        return "".join(different)
    return ", ".join(f"{name} {objective}" for name, objective in objectives.items())


def _objective_of(metric: str, objectives: Mapping[str, str]) -> str:
    if not metric.startswith(OBJECTIVE):
        return ""
    if metric == AGGREGATE:
        return objective_text(objectives)
    return objectives.get(metric.removeprefix(OBJECTIVE), "")


def _by_quantity(metrics: Iterable[str]) -> list[tuple[Quantity, list[str]]]:
    """Group metrics by quantity, in the order of `QUANTITIES`; each other metric is a quantity of its own."""
    left = list(metrics)
    found = []
    for quantity in QUANTITIES:
        of_it = [name for name in left if quantity.label(name) is not None]
        left = [name for name in left if name not in of_it]
        if of_it:
            found.append((quantity, of_it))
    for name in sorted(left):
        found.append((Quantity(name, "value", re.compile(re.escape(name)), important=False), [name]))
    return found


def _changes(logged: Logged, metric: str) -> bool:
    return len(set(logged.points(metric)[1].tolist())) > 1
