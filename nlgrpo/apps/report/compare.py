"""``nlgrpo compare``: one picture of several runs, a table of their best-of-N rewards, and tests between them.

Runs whose configurations differ in the seed only are one setting: its values are means over seeds, with intervals over
seeds and prompts. Trained settings are tested against each other, paired by prompt, and by seed if there are several.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.apps.evaluate.named_models import NamedModel, read_named_models
from nlgrpo.apps.report import figures, run_loader, seeds, success_figures
from nlgrpo.apps.report.run_loader import NS, REFERENCE
from nlgrpo.apps.report.seeds import Setting
from nlgrpo.engine.rollouts.evaluation_samples import (
    EvaluationSamples,
    read_evaluation,
    sizes_of,
    where_same_rewards,
)
from nlgrpo.errors import UserError
from nlgrpo.objectives.registry import is_pairwise
from nlgrpo.rewards.specs import parse_spec
from nlgrpo.runtime import atomic_files
from nlgrpo.training.evaluation_summary import Estimate, Row, binary_rewards, format_interval, weighted_best_of_n
from nlgrpo.training.tracking import terminal


def compare(runs: Sequence[Path | str], out: Path) -> Path:
    """Draw several runs in one figure and print tables of their rewards. Returns the path of the PNG, PDF or SVG file.

    Left: length histograms of the reference (of the first run) and of each trained model (IAMA, Fig. 3a), or prompts by
    their successes if the only reward is 0 or 1. Right: the weighted sum of best-of-N rewards over N, with intervals.
    ``runs``: folders of runs, each with ``LABEL=`` before it for another name, and of sweeps, which stand for their
    runs. If ``out`` is a folder, the file is ``compare.png``.

    Raises UserError if a folder is not a run or its evaluation is not finished, if rewards or weights differ, and if
    there is no prompt at which the same rewards score a completion of every model.
    """
    out = Path(out) / "compare.png" if Path(out).is_dir() or not Path(out).suffix else Path(out)
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"cannot draw into {out}: the name must end in .png, .pdf or .svg")
    if not runs:
        raise UserError("no runs to compare; give one or more folders written by `nlgrpo train`")
    settings = _settings(runs)
    samples = [sampled for setting in settings for sampled in setting.by_seed.values()]
    targets = sorted({t for setting in settings for t in run_loader.length_targets(setting.config)})
    n = min(sampled.lengths.shape[1] for sampled in samples)
    ns = [best_of for best_of in NS if best_of <= n]
    where = where_same_rewards(samples)
    rows = {setting.label: _rows(setting, ns, where) for setting in settings}
    models = {setting.label: setting.pooled for setting in settings}
    draw = partial(figures.comparison, models, rows, ns, targets)
    what = "weighted sum of best-of-N rewards"
    if (solved := _solved(models)) is not None:
        what = f"pass@N of {solved}"
        draw = partial(success_figures.comparison, models, rows, ns)
    drawn = figures.render(draw, form=out.suffix[1:])
    with atomic_files.into(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.atomic_write_bytes(out, drawn)
    console = terminal.output(width=terminal.TABLE_WIDTH)
    console.print(_levels(rows, ns, what, sizes_of(samples)))
    if 2 < len(settings) <= seeds.TESTED + 1:
        console.print(_differences(settings[1:], ns, where))
    return out


# --- runs as settings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A run with its configuration and its evaluations before and after training."""

    model: NamedModel
    config: Mapping[str, Any]
    before: EvaluationSamples
    after: EvaluationSamples


def _settings(given: Sequence[Path | str]) -> list[Setting]:
    """Return the settings of runs in their order, the reference first: the models before training of the first one."""
    runs = _runs(given)
    _check_rewards(runs)
    keys = [(f"{run.model.given} {seeds.without_seed(run.config)}", seeds.seed_of(run.config)) for run in runs]
    groups = [[runs[number] for number in group] for group in seeds.grouped(keys)]
    found = [Setting(REFERENCE, {}, {seeds.seed_of(run.config): run.before for run in groups[0]})]
    labels = [_label(group) for group in groups]
    taken: set[str] = set()
    for group, label in zip(groups, labels, strict=True):
        if labels.count(label) > 1:
            label = f"{label} · {run_loader.unique_label(group[0].model.path, taken)}"
        found.append(Setting(label, group[0].config, {seeds.seed_of(run.config): run.after for run in group}))
    return found


def _label(group: Sequence[_Run]) -> str:
    label = group[0].model.given or figures.objective_label(group[0].after)
    return f"{label}, {len(group)} seeds" if len(group) > 1 else label


def _runs(given: Sequence[Path | str]) -> list[_Run]:
    """Read runs, each once. Raises UserError for what is no run with an evaluation before and after training."""
    found: dict[Path, _Run] = {}
    for model in read_named_models([str(name) for name in given]):
        folder = model.path
        if folder.resolve() in found:
            continue
        if run_loader.kind_of(folder) != "run":
            raise UserError(f"{folder} is not a run; use `nlgrpo report` for evaluations and sweeps")
        config = run_loader.read_config(folder, [])
        if seeds.section(config, "evaluation").get("prompts") == 0:
            raise UserError(
                f"{folder} was trained with evaluation.prompts = 0; run `nlgrpo evaluate {folder} --evaluation.prompts "
                "64` to evaluate its model"
            )
        sampled = read_evaluation(folder)
        if set(sampled) < {"before", "after"}:
            missing = " or ".join(when for when in ("before", "after") if when not in sampled)
            raise UserError(
                f"{folder} has no evaluation {missing} training; run the command that started it again to resume"
            )
        found[folder.resolve()] = _Run(model, config, sampled["before"], sampled["after"])
    return list(found.values())


def _check_rewards(runs: Sequence[_Run]) -> None:
    """Raise UserError unless all runs have the same rewards and weights."""
    first = runs[0]
    for run in runs:
        if run.after.weights != first.after.weights:
            raise UserError(
                f"the reward weights of {run.model.path} are {run.after.weights}, those of {first.model.path} "
                f"{first.after.weights}; only runs with the same rewards and weights can be compared"
            )
        ours = seeds.section(run.config, "rewards")
        theirs = seeds.section(first.config, "rewards")
        for name in ours.keys() & theirs.keys():
            if _meaning(seeds.section(ours, name)) != _meaning(seeds.section(theirs, name)):
                raise UserError(
                    f"reward {name!r} of {run.model.path} is {seeds.section(ours, name)}, that of {first.model.path} "
                    f"{seeds.section(theirs, name)}; only runs with the same rewards can be compared"
                )


def _meaning(reward: Mapping[str, Any]) -> tuple[Any, ...]:
    """Parsed specification of a reward: target, arguments and scale, with resolved paths."""
    try:
        target, arguments = parse_spec(reward.get("function", ""))
    except ValueError:
        target = str(reward.get("function"))
        arguments = {}
    place, colon, name = target.rpartition(":") if target.rpartition(":")[0].endswith(".py") else (target, "", "")
    return _place(place) + colon + name, {k: _place(v) for k, v in arguments.items()}, reward.get("scale", 1.0)


def _place(value: Any) -> Any:
    """Resolve a value that is the path of an existing file or folder; return any other value unchanged."""
    path = os.path.expanduser(value) if isinstance(value, str) else ""
    return os.path.realpath(path) if path and os.path.exists(path) else value


def _solved(models: Mapping[str, EvaluationSamples]) -> str | None:
    """Name of the reward if it is the only one and the weighted sum of best-of-N is its pass@N; else None."""
    names = {name for sampled in models.values() for name in sampled.rewards}
    if len(names) > 1 or not binary_rewards(models):
        return None
    (name,) = names
    plain = all(s.weights[name] == 1 and not is_pairwise(s.objectives[name]) for s in models.values())
    return name if plain else None


# --- tables -----------------------------------------------------------------------------------------------------------


def _rows(setting: Setting, ns: Sequence[int], where: Tensor) -> list[Row]:
    """Weighted sum of best-of-N for each N, over the prompts ``where`` it can be compared, and over seeds."""
    one = setting.pooled
    behind = one.scored(), one.prompts_of_rewards()
    found = []
    for n, values in zip(ns, weighted_best_of_n(one, ns), strict=True):
        counted = values.view(one.seeds, -1).masked_fill(~where, math.nan).flatten()
        estimate = Estimate.of(counted, *behind, seeds=one.seeds)
        found.append(Row(setting.label, "", estimate.value, estimate.low, estimate.high, estimate.coverage, n))
    if found[0].coverage.prompts == 0:
        each = ", ".join(f"{name} on {int(applies.sum())}" for name, applies in one.applies().items())
        raise UserError(
            f"{setting.label}: no prompt has a weighted sum that can be compared. Of {one.sizes['prompts']} prompts, "
            f"the rewards score {each}, and all models need the same ones at a prompt"
        )
    return found


def _levels(values: Mapping[str, Sequence[Row]], ns: Sequence[int], what: str, evaluated: str) -> Table:
    """Table with a column per model, or for more than three trained models a row per model, to fit 80 columns."""
    table = Table(title=f"{what} ({evaluated}, 95% intervals)", title_justify="left", box=SIMPLE_HEAD)
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
    for found in seeds.differences(first, others, ns, where):
        table.add_row(str(found.n), Text(found.other), found.shown, found.shown_p, found.over)
    return table
