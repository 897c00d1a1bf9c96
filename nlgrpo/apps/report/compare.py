"""``nlgrpo compare``: one picture of several runs, a table of their best-of-N rewards, and tests between them.

Runs whose configurations differ in the seed only are one setting: its values are means over seeds, with intervals over
seeds and prompts (`estimators.two_way_interval`). Trained settings are tested against each other, paired by prompt, and
by seed if they share several.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.apps.evaluate.named_models import NamedModel, read_named_models
from nlgrpo.apps.report import configurations, figures, recorded_tables, run_loader, success_figures
from nlgrpo.apps.report.run_loader import NS, REFERENCE
from nlgrpo.engine.rollouts import evaluation_samples
from nlgrpo.engine.rollouts.evaluation_samples import (
    EvaluationSamples,
    read_evaluation,
    sizes_of,
    where_same_rewards,
)
from nlgrpo.errors import UserError
from nlgrpo.estimators import paired_test, two_way_interval
from nlgrpo.objectives.registry import is_pairwise
from nlgrpo.rewards.specs import parse_spec
from nlgrpo.runtime import atomic_files
from nlgrpo.training.evaluation_summary import Estimate, Row, binary_rewards, format_interval, weighted_best_of_n
from nlgrpo.training.tracking import terminal

TESTED = 4  # most trained settings that are tested against the first one


def compare(runs: Sequence[Path | str], out: Path) -> Path:
    """Draw several runs in one figure and print tables of their rewards. Returns the path of the PNG, PDF or SVG file.

    Left: length histograms of the reference (of the first run) and of each trained model (IAMA, Fig. 3a), or prompts by
    their successes if the only reward is 0 or 1. Right: the weighted sum of best-of-N rewards over N, with intervals.
    ``runs``: folders of runs, each with ``LABEL=`` before it for another name, and of sweeps, which stand for their
    runs. If ``out`` is a folder, the file is ``compare.png``.

    Raises UserError if a folder is not a run or its evaluation is not finished, if rewards or weights differ, and if
    there is no prompt at which the same rewards score a completion of every model.
    """
    out = Path(out)
    if out.is_dir() or not out.suffix:
        out = out / "compare.png"
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"cannot draw into {out}: the name must end in .png, .pdf or .svg")
    if not runs:
        raise UserError("no runs to compare; give one or more folders written by `nlgrpo train`")
    settings = _settings(runs)
    samples = [sampled for setting in settings for sampled in setting.by_seed.values()]
    n = min(sampled.lengths.shape[1] for sampled in samples)
    ns = [best_of for best_of in NS if best_of <= n]
    where = where_same_rewards(samples)
    rows = {setting.label: _rows(setting, ns, where) for setting in settings}
    models = {setting.label: setting.pooled for setting in settings}
    solved = _solved(models)
    if solved is not None:
        title = f"pass@N of {solved}"
        draw = partial(success_figures.comparison, models, rows, ns)
    else:
        title = "weighted sum of best-of-N rewards"
        targets = {target for setting in settings for target in configurations.length_targets(setting.config)}
        draw = partial(figures.comparison, models, rows, ns, sorted(targets))
    drawn = figures.render(draw, form=out.suffix[1:])
    with atomic_files.into(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.atomic_write_bytes(out, drawn)
    console = terminal.output(width=terminal.TABLE_WIDTH)
    console.print(_levels(rows, ns, f"{title} ({sizes_of(samples)}, 95% intervals)"))
    if 2 < len(settings) <= TESTED + 1:
        console.print(_differences(settings[1:], ns, where))
    return out


# --- settings: runs that differ in the seed only ----------------------------------------------------------------------


@dataclass
class Setting:
    """Samples of the runs of one configuration by seed. ``label``: name in figures and tables."""

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    by_seed: dict[Any, EvaluationSamples] = field(default_factory=dict)

    @property
    def pooled(self) -> EvaluationSamples:
        return evaluation_samples.pooled(self.of_seeds(self.by_seed))

    def of_seeds(self, seeds: Iterable[Any]) -> list[EvaluationSamples]:
        """Return the samples of some seeds, in the order of the seeds as text."""
        return [self.by_seed[seed] for seed in sorted(seeds, key=str)]

    def values(self, ns: Sequence[int], seeds: Iterable[Any]) -> Tensor:
        """Return the weighted sum of best-of-N of some seeds, (S, len(ns), P); NaN where it is not defined."""
        return torch.stack([weighted_best_of_n(sampled, ns) for sampled in self.of_seeds(seeds)])


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


def format_p_value(p: float) -> str:
    """``0.012`` or ``< 0.001``; empty for NaN."""
    if math.isnan(p):
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def differences(first: Setting, others: Sequence[Setting], ns: Sequence[int], where: Tensor) -> Iterator[Difference]:
    """Test the first setting against each other one, for each N, over the prompts ``where`` they can be compared.

    Paired by prompt. Settings that share several seeds are paired by seed too, and only those seeds are compared. For
    others, the values are means over the seeds of each, and the interval is over prompts alone.
    """
    for other in others:
        common = first.by_seed.keys() & other.by_seed.keys()
        paired = len(common) > 1
        ours = first.values(ns, common if paired else first.by_seed).masked_fill(~where, math.nan)
        theirs = other.values(ns, common if paired else other.by_seed).masked_fill(~where, math.nan)
        if not paired:
            ours = ours.mean(0, keepdim=True)
            theirs = theirs.mean(0, keepdim=True)
        for i, n in enumerate(ns):
            there = ~(ours[:, i] - theirs[:, i]).isnan().any(0)
            if there.sum() < 2:
                continue
            if paired:
                found = two_way_interval((ours - theirs)[:, i, there])
                yield Difference(other.label, n, *found, f"prompts, {len(common)} seeds")
            else:
                found = paired_test(ours[0, i, there], theirs[0, i, there])
                yield Difference(other.label, n, *found, "prompts")


# --- runs as settings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A run with its configuration and its evaluations before and after training."""

    model: NamedModel
    config: Mapping[str, Any]
    before: EvaluationSamples
    after: EvaluationSamples

    @property
    def seed(self) -> Any:
        return configurations.seed_of(self.config)


def _settings(given: Sequence[Path | str]) -> list[Setting]:
    """Return the settings of runs in their order, the reference first: the models before training of the first one."""
    runs = _runs(given)
    _check_rewards(runs)
    keys = [(f"{run.model.given} {configurations.without_seed(run.config)}", run.seed) for run in runs]
    groups = [[runs[number] for number in group] for group in configurations.grouped(keys)]
    found = [Setting(REFERENCE, {}, {run.seed: run.before for run in groups[0]})]
    labels = [_label(group) for group in groups]
    taken: set[str] = set()
    for group, label in zip(groups, labels, strict=True):
        if labels.count(label) > 1:
            label = f"{label} · {run_loader.unique_label(group[0].model.path, taken)}"
        found.append(Setting(label, group[0].config, {run.seed: run.after for run in group}))
    return found


def _label(group: Sequence[_Run]) -> str:
    label = group[0].model.given or run_loader.objective_label(group[0].after)
    return f"{label}, {len(group)} seeds" if len(group) > 1 else label


def _runs(given: Sequence[Path | str]) -> list[_Run]:
    """Read runs, each once. Raises UserError for what is no run with an evaluation before and after training."""
    found: dict[Path, _Run] = {}
    for model in read_named_models([str(name) for name in given]):
        folder = model.path
        if folder.resolve() in found:
            continue
        if run_loader.kind_of(folder) != "run":
            raise UserError(f"{folder} is not a run; use `nlgrpo report` for evaluations, sweeps and searches")
        config = configurations.read(folder, [])
        command = recorded_tables.command_of(config)
        if command != "train":
            raise UserError(f"{folder} is a run of `nlgrpo {command}`, which has no completions; use `nlgrpo report`")
        if configurations.section(config, "evaluation").get("prompts") == 0:
            raise UserError(
                f"{folder} was trained with evaluation.prompts = 0; run `nlgrpo evaluate {folder} --evaluation.prompts "
                "64` to evaluate its model"
            )
        sampled = read_evaluation(folder)
        missing = [when for when in ("before", "after") if when not in sampled]
        if missing:
            raise UserError(
                f"{folder} has no evaluation {' or '.join(missing)} training; run the command that started it again to "
                "resume"
            )
        found[folder.resolve()] = _Run(model, config, sampled["before"], sampled["after"])
    return list(found.values())


def _check_rewards(runs: Sequence[_Run]) -> None:
    """Raise UserError unless all runs have the same rewards and weights."""
    first = runs[0]
    theirs = configurations.section(first.config, "rewards")
    for run in runs:
        if run.after.weights != first.after.weights:
            raise UserError(
                f"the reward weights of {run.model.path} are {run.after.weights}, those of {first.model.path} "
                f"{first.after.weights}; only runs with the same rewards and weights can be compared"
            )
        ours = configurations.section(run.config, "rewards")
        for name in ours.keys() & theirs.keys():
            our = configurations.section(ours, name)
            their = configurations.section(theirs, name)
            if _meaning(our) != _meaning(their):
                raise UserError(
                    f"reward {name!r} of {run.model.path} is {our}, that of {first.model.path} {their}; only runs with "
                    "the same rewards can be compared"
                )


def _meaning(reward: Mapping[str, Any]) -> tuple[Any, ...]:
    """Parsed specification of a reward: target, arguments and scale, with resolved paths."""
    try:
        target, arguments = parse_spec(reward.get("function", ""))
    except ValueError:
        target = str(reward.get("function"))
        arguments = {}
    file, colon, name = target.rpartition(":")
    if file.endswith(".py"):
        target = f"{_resolved(file)}{colon}{name}"
    else:
        target = _resolved(target)
    return target, {key: _resolved(value) for key, value in arguments.items()}, reward.get("scale", 1.0)


def _resolved(value: Any) -> Any:
    """Resolve a value that is the path of an existing file or folder; return any other value unchanged."""
    if not isinstance(value, str) or not value:
        return value
    path = os.path.expanduser(value)
    return os.path.realpath(path) if os.path.exists(path) else value


def _solved(models: Mapping[str, EvaluationSamples]) -> str | None:
    """Name of the reward if it is the only one and the weighted sum of best-of-N is its pass@N; else None."""
    names = {name for sampled in models.values() for name in sampled.rewards}
    if len(names) > 1 or not binary_rewards(models):
        return None
    (name,) = names
    for sampled in models.values():
        if sampled.weights[name] != 1 or is_pairwise(sampled.objectives[name]):
            return None
    return name


# --- tables -----------------------------------------------------------------------------------------------------------


def _rows(setting: Setting, ns: Sequence[int], where: Tensor) -> list[Row]:
    """Weighted sum of best-of-N for each N, over the prompts ``where`` it can be compared, and over seeds."""
    one = setting.pooled
    found = []
    for n, values in zip(ns, weighted_best_of_n(one, ns), strict=True):
        counted = values.view(one.seeds, -1).masked_fill(~where, math.nan).flatten()
        estimate = Estimate.of(counted, one.scored(), one.prompts_of_rewards(), seeds=one.seeds)
        found.append(Row(setting.label, "", estimate.value, estimate.low, estimate.high, estimate.coverage, n))
    if found[0].coverage.prompts == 0:
        each = ", ".join(f"{name} on {int(applies.sum())}" for name, applies in one.applies().items())
        raise UserError(
            f"{setting.label}: no prompt has a weighted sum that can be compared. Of {one.sizes['prompts']} prompts, "
            f"the rewards score {each}, and all models need the same ones at a prompt"
        )
    return found


def _levels(values: Mapping[str, Sequence[Row]], ns: Sequence[int], title: str) -> Table:
    """Table with a column per model, or for more than three trained models a row per model, to fit 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("N", justify="right")
    many = len(values) > 4
    for label in ("model", "value") if many else values:
        table.add_column(Text(label))
    for i, best_of in enumerate(ns):
        rows = [of_model[i] for of_model in values.values()]
        if many:
            for row in rows:
                table.add_row(str(best_of), Text(row.reward), Text(format_interval(row)))
            table.add_section()
        else:
            table.add_row(str(best_of), *(Text(format_interval(row, "\n")) for row in rows))
    return table


def _differences(trained: Sequence[Setting], ns: Sequence[int], where: Tensor) -> Table:
    """Table of the first trained setting less each other one: mean, interval and p-value for each N."""
    first, *others = trained
    table = Table(title=f"{first.label} less the others (95% intervals)", title_justify="left", box=SIMPLE_HEAD)
    for name in ("N", "less", "difference", "p", "over"):
        table.add_column(name, justify="right" if name in ("N", "p") else "left", no_wrap=name != "less")
    for found in differences(first, others, ns, where):
        table.add_row(str(found.n), Text(found.other), found.shown, format_p_value(found.p_value), found.over)
    return table
