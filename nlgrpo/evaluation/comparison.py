"""``nlgrpo compare``: one picture of several runs, a table of their best-of-N rewards, and tests between them.

Runs whose configurations differ in the seed only are one setting: its values are means over seeds, with intervals over
seeds and prompts. Trained settings are tested against each other, paired by prompt, and by seed if there are several.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.engine.rollouts.evaluation_samples import (
    EvaluationSamples,
    read_evaluation,
    sizes_of,
    where_same_rewards,
)
from nlgrpo.evaluation import figures, run_loader, success_figures
from nlgrpo.evaluation.estimators import paired_test, two_way_interval
from nlgrpo.evaluation.named_models import NamedModel, read
from nlgrpo.evaluation.results import Estimate, Row, binary_rewards, format_interval, weighted_best_of_n
from nlgrpo.evaluation.run_loader import NS, REFERENCE
from nlgrpo.objectives.registry import is_pairwise
from nlgrpo.rewards.specs import parse_spec
from nlgrpo.runtime import atomic_files
from nlgrpo.training.tracking import terminal

TESTED = 4  # most trained settings that are tested against each other


@dataclass
class Setting:
    """Samples of the runs of one configuration by seed. ``label``: name in the picture and the tables."""

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    by_seed: dict[Any, EvaluationSamples] = field(default_factory=dict)

    @property
    def pooled(self) -> EvaluationSamples:
        """Lengths and rewards of all seeds, as of one model with more prompts."""
        each = list(self.by_seed.values())
        if len(each) == 1:
            return each[0]
        return replace(
            each[0],
            rewards={name: torch.cat([sampled.rewards[name] for sampled in each]) for name in each[0].rewards},
            lengths=torch.cat([sampled.lengths for sampled in each]),
            prompts=[],
            completions=[],
            kl={},
            distinct={},
            answers={},
        )

    def values(self, ns: Sequence[int]) -> Tensor:
        """Weighted sum of best-of-N, (S, len(ns), P); NaN where it is not defined."""
        return torch.stack([weighted_best_of_n(sampled, ns) for _, sampled in sorted(self.by_seed.items())])


def compare(runs: Sequence[Path | str], out: Path) -> Path:
    """Draw several runs in one figure and print tables of their rewards. Returns the path of the PNG, PDF or SVG file.

    Left: length histograms of the reference (of the first run) and of each trained model (IAMA, Fig. 3a), or prompts by
    their successes if the only reward is 0 or 1. Right: the weighted sum of best-of-N rewards over N, with intervals.
    ``runs``: folders of runs, each with ``LABEL=`` before it for another name, and of sweeps, which stand for their
    runs. If ``out`` is a folder, the file is ``compare.png``.

    Raises ValueError if a folder is not a run or its evaluation is not finished, if rewards or weights differ, and if
    there is no prompt at which the same rewards score a completion of every model.
    """
    out = Path(out) / "compare.png" if Path(out).is_dir() or not Path(out).suffix else Path(out)
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"cannot draw into {out}: the name must end in .png, .pdf or .svg")
    if not runs:
        raise ValueError("no runs to compare; give one or more folders written by `nlgrpo train`")
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
    if 2 < len(settings) <= TESTED + 1:
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

    @property
    def seed(self) -> Any:
        """The seed of the run; None if its configuration has none."""
        return section(self.config, "train").get("seed")

    @property
    def setting(self) -> str:
        """The configuration without the seed and the folder."""
        train = {key: value for key, value in section(self.config, "train").items() if key not in ("seed", "out")}
        return json.dumps({**self.config, "train": train, "label": self.model.given}, sort_keys=True, default=str)


def _settings(given: Sequence[Path | str]) -> list[Setting]:
    """Return the settings of runs in their order, the reference first: the models before training of the first one."""
    runs = _runs(given)
    _check_rewards(runs)
    grouped: list[list[_Run]] = []
    for run in runs:
        group = next((group for group in grouped if _another_seed(run, group)), None)
        if group is None:
            grouped.append([run])
        else:
            group.append(run)
    first, *_ = grouped
    found = [Setting(REFERENCE, {}, {run.seed: run.before for run in first})]
    labels = [_label(group) for group in grouped]
    taken: set[str] = set()
    for group, label in zip(grouped, labels, strict=True):
        if labels.count(label) > 1:
            label = f"{label} · {run_loader.unique_label(group[0].model.path, taken)}"
        found.append(Setting(label, group[0].config, {run.seed: run.after for run in group}))
    return found


def _another_seed(run: _Run, group: Sequence[_Run]) -> bool:
    """Whether a run has the setting of a group and a seed that the group does not have yet."""
    return run.seed is not None and run.setting == group[0].setting and all(run.seed != other.seed for other in group)


def _label(group: Sequence[_Run]) -> str:
    label = group[0].model.given or figures.objective_label(group[0].after)
    return f"{label}, {len(group)} seeds" if len(group) > 1 else label


def _runs(given: Sequence[Path | str]) -> list[_Run]:
    """Read runs, each once. Raises ValueError for what is no run with an evaluation before and after training."""
    found: dict[Path, _Run] = {}
    for model in read([str(name) for name in given]):
        folder = model.path
        if folder.resolve() in found:
            continue
        if run_loader.kind_of(folder) != "run":
            raise ValueError(f"{folder} is not a run; use `nlgrpo report` for evaluations and sweeps")
        config = run_loader.read_config(folder, [])
        if section(config, "evaluation").get("prompts") == 0:
            raise ValueError(
                f"{folder} was trained with evaluation.prompts = 0; run `nlgrpo evaluate {folder} --evaluation.prompts "
                "64` to evaluate its model"
            )
        sampled = read_evaluation(folder)
        if set(sampled) < {"before", "after"}:
            missing = " or ".join(when for when in ("before", "after") if when not in sampled)
            raise ValueError(
                f"{folder} has no evaluation {missing} training; run the command that started it again to resume"
            )
        found[folder.resolve()] = _Run(model, config, sampled["before"], sampled["after"])
    return list(found.values())


def _check_rewards(runs: Sequence[_Run]) -> None:
    """Raise ValueError unless all runs have the same rewards and weights."""
    first = runs[0]
    for run in runs:
        if run.after.weights != first.after.weights:
            raise ValueError(
                f"the reward weights of {run.model.path} are {run.after.weights}, those of {first.model.path} "
                f"{first.after.weights}; only runs with the same rewards and weights can be compared"
            )
        ours, theirs = section(run.config, "rewards"), section(first.config, "rewards")
        for name in ours.keys() & theirs.keys():
            if _meaning(section(ours, name)) != _meaning(section(theirs, name)):
                raise ValueError(
                    f"reward {name!r} of {run.model.path} is {section(ours, name)}, that of {first.model.path} "
                    f"{section(theirs, name)}; only runs with the same rewards can be compared"
                )


def _meaning(reward: Mapping[str, Any]) -> tuple[Any, ...]:
    """Parsed specification of a reward: target, arguments and scale, with resolved paths."""
    try:
        target, arguments = parse_spec(reward.get("function", ""))
    except ValueError:
        target, arguments = str(reward.get("function")), {}
    place, colon, name = target.rpartition(":") if target.rpartition(":")[0].endswith(".py") else (target, "", "")
    return _place(place) + colon + name, {k: _place(v) for k, v in arguments.items()}, reward.get("scale", 1.0)


def _place(value: Any) -> Any:
    """Resolve a value that is the path of an existing file or folder; return any other value unchanged."""
    path = os.path.expanduser(value) if isinstance(value, str) else ""
    return os.path.realpath(path) if path and os.path.exists(path) else value


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Section of a configuration that was read from a file; empty if it is missing or not a table."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


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
    one = next(iter(setting.by_seed.values()))
    behind = one.scored(), one.prompts_of_rewards()
    values = setting.values(ns).masked_fill(~where, math.nan)
    found = []
    for of_n in values.unbind(1):
        there = ~of_n.isnan().any(0)
        estimate = Estimate.of(of_n[0].masked_fill(~there, math.nan), *behind)
        if len(of_n) > 1 and there.sum() > 1:
            value, low, high, _ = two_way_interval(of_n[:, there])
            estimate = replace(estimate, value=value, low=low, high=high)
        found.append(Row(setting.label, "", estimate.value, estimate.low, estimate.high, estimate.coverage))
    if found[0].coverage.prompts == 0:
        each = ", ".join(f"{name} on {int(applies.sum())}" for name, applies in one.applies().items())
        raise ValueError(
            f"{setting.label}: no prompt has a weighted sum that can be compared. Of {len(one.lengths)} prompts, the "
            f"rewards score {each}, and all models need the same ones at a prompt"
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
    for other in others:
        seeds = sorted(first.by_seed.keys() & other.by_seed.keys(), key=str)
        paired = len(seeds) > 1
        sides = [first, other] if not paired else [_only(setting, seeds) for setting in (first, other)]
        ours, theirs = (side.values(ns).masked_fill(~where, math.nan) for side in sides)
        if not paired:
            ours, theirs = ours.mean(0, keepdim=True), theirs.mean(0, keepdim=True)
        for i, best_of in enumerate(ns):
            difference = ours[:, i] - theirs[:, i]
            there = ~difference.isnan().any(0)
            if there.sum() < 2:
                continue
            if paired:
                mean, low, high, p_value = two_way_interval(difference[:, there])
            else:
                mean, low, high, p_value = paired_test(ours[0, i, there], theirs[0, i, there])
            over = f"prompts, {len(seeds)} seeds" if paired else "prompts"
            shown = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
            table.add_row(str(best_of), Text(other.label), shown, _p_value(p_value), over)
    return table


def _only(setting: Setting, seeds: Sequence[Any]) -> Setting:
    return replace(setting, by_seed={seed: setting.by_seed[seed] for seed in seeds})


def _p_value(p_value: float) -> str:
    return "" if math.isnan(p_value) else "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
