"""The HTML report of runs, evaluations and sweeps with its figures, and the figure of `nlgrpo compare`.

A report is built from the files of a folder alone, so it can be written at any time, also for a run that was killed.
Missing or damaged files are listed in the report's notes (`run_loader`).
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo import __version__
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation, sizes_of, where_same_rewards
from nlgrpo.evaluation import config_diff, evaluation_figures, figures, html_page, run_loader, success_figures
from nlgrpo.evaluation.html_page import Cell
from nlgrpo.evaluation.results import (
    WEIGHTED_SUM,
    Entry,
    Estimate,
    Row,
    changes,
    format_change,
    format_interval,
    summarize,
    weighted_best_of_n,
)
from nlgrpo.evaluation.run_loader import NS, REFERENCE, TRAINING_KL, ReportData
from nlgrpo.rewards.specs import parse_spec
from nlgrpo.runtime import atomic_files
from nlgrpo.training.tracking import run_files

TARGET = re.compile(r"\blength\([^)]*?\btarget\s*=\s*([0-9.]+)")
FILE = run_files.REPORT_FILE
PROMPTS = 8


def write_report(folders: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the HTML report of one or more folders, and its figures. Returns the path of the report.

    Each folder is a run or the output of `nlgrpo evaluate` or `nlgrpo sweep`. ``out`` is by default ``report.html`` in
    the folder, or in the current one for several folders. The figures are saved next to it: ``lengths.png``,
    ``curves.png``, ``rewards.png``, ``successes.png``, ``walks.png``, ``best_of_n.png``, ``win_rates.png`` and
    ``fronts.png``. If ``out`` has another
    name, that name is their prefix. Missing or damaged files are left out and listed in the report.

    Raises ValueError for a folder of another kind, and if ``out`` does not end in .html.
    """
    given = [Path(folders)] if isinstance(folders, str | Path) else list(dict.fromkeys(map(Path, folders)))
    if not given:
        raise ValueError("no folder given; give one or more folders written by `nlgrpo train`, `evaluate` or `sweep`")
    out = Path(out) if out is not None else (given[0] if len(given) == 1 else Path()) / FILE
    out = out / FILE if out.is_dir() else out
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"cannot write {out}: the name must end in .html")
    found = run_loader.read(given)
    with atomic_files.into(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    name = ", ".join(folder.resolve().name for folder in given[:4]) + f" and {len(given) - 4} more" * (len(given) > 4)
    atomic_files.atomic_write_bytes(out, _Report(found, out).html(name).encode(errors="replace"))
    return out


class _Report:
    """Builds the sections of the page from the loaded data."""

    def __init__(self, found: ReportData, out: Path) -> None:
        self.found, self.out = found, out
        self.one = (
            found.models[0] if len(found.models) == 1 and found.models[0].settings == found.models[0].label else None
        )
        self.names = self._names()
        self.looks = self._looks()
        configs = {m.label: found.settings[m.settings].config for m in found.models if m.settings == m.label}
        self.differing, self.places = config_diff.columns(configs), config_diff.places(configs)

    def _names(self) -> dict[str, str]:
        """Legend names by label, for labels with another name in legends."""
        model = self.one
        if model is None or model.sampled is None:
            return {}
        return {model.label: f"trained: {figures.objective_label(model.sampled)}"}

    def _looks(self) -> dict[str, figures.Style]:
        """Style of each label: the same in all figures; evaluations of one model share its colour."""
        references = dict.fromkeys([*self.found.references, *(e.model for e in self.found.reference_entries)])
        looks = {label: figures.Style(dash=figures.DASHES[i % 4]) for i, label in enumerate(references)}
        places: dict[str, list[str]] = {}
        for model in self.found.models:
            same = places.setdefault(model.name, [])
            looks[model.label] = figures.series_style(list(places).index(model.name), len(same))
            same.append(model.label)
        return looks

    def html(self, title: str) -> str:
        pictures = self.pictures()
        sections = {
            "Result": _result(self.one.label, self.found) if self.one else "",
            "Models": "" if self.one else self.models(),
            **pictures,
            "All results": self.numbers(),
            "Samples": self.samples(),
            "Settings": self.settings(),
        }
        parts = [html_page.notes(self.found.notes), *(html_page.section(name, part) for name, part in sections.items())]
        return html_page.page(title, self.facts(), parts, [name for name, part in sections.items() if part])

    def facts(self) -> list[str]:
        models, facts = self.found.models, []
        if len(models) != 1:
            facts.append(f"{len(models)} models")
        if any(model.logged for model in models) or self.one:
            facts.append(f"{sum(len(model.logged) for model in models)} logged steps")
        return facts + [f"evaluated on {sizes_of(self.found.sampled.values())}"] * bool(self.found.sampled)

    # --- pictures ---

    def pictures(self) -> dict[str, str]:
        """HTML of the figures that have data, by title."""
        found, looks, places = self.found, self._renamed(self.looks), self._renamed(self.places)
        renamed = [replace(entry, model=self.names.get(entry.model, entry.model)) for entry in found.entries]
        table = evaluation_figures.Table(renamed)
        sampled = self._renamed(found.sampled)
        runs = self._renamed({model.label: model.logged for model in found.models if model.logged})
        targets = length_targets([settings.config for settings in found.settings.values()])
        pairs = evaluation_figures.fronts_of(table, [WEIGHTED_SUM])
        best = partial(evaluation_figures.best_of_n, table, looks)
        won = partial(evaluation_figures.win_rates, table, looks, places)
        fronts = partial(evaluation_figures.fronts, table, pairs, looks, places)
        solved = partial(success_figures.successes, sampled)
        seen = success_figures.maze_prompts(sampled)
        walks = partial(success_figures.walks, sampled, seen)
        hollow = "Hollow points: another model is higher in both rewards. " + INTERVALS
        drawn: dict[str, tuple[str, bool, Callable[..., Figure], str]] = {
            "Completion lengths": ("lengths", bool(sampled), partial(figures.lengths, sampled, looks, targets), ""),
            "Training curves": ("curves", bool(runs), partial(figures.curves, runs, looks), SMOOTHED),
            "Rewards": ("rewards", bool(sampled), partial(figures.rewards, sampled, looks), ""),
            "Solved prompts": ("successes", bool(success_figures.binary_rewards(sampled)), solved, ""),
            "Walks": ("walks", bool(seen), walks, WALKS),
            "Best-of-N rewards": ("best_of_n", bool(table.quantities()), best, INTERVALS),
            "Win rate over KL": ("win_rates", evaluation_figures.has_win_rates(table), won, self._about_kl()),
            "Reward trade-offs": ("fronts", bool(pairs), fronts, hollow),
        }
        return {
            title: self._picture(name, title, draw) + (html_page.soft(about) if about else "")
            for title, (name, there, draw, about) in drawn.items()
            if there
        }

    def _renamed(self, by_label: Mapping[str, Any]) -> dict[str, Any]:
        return {self.names.get(label, label): value for label, value in by_label.items()}

    def _picture(self, name: str, title: str, draw: Callable[..., Figure]) -> str:
        prefix = "" if self.out.name == FILE else f"{self.out.stem}-"
        drawn = figures.picture(draw)
        atomic_files.atomic_write_bytes(self.out.with_name(f"{prefix}{name}.png"), drawn.png)
        return html_page.picture(drawn, title)

    def _about_kl(self) -> str:
        taken = {entry.quantity for entry in self.found.entries if entry.quantity.startswith("kl/")}
        logged = "KL of runs: mean KL per token times length, over the last 10% of the steps. " * (TRAINING_KL in taken)
        return f"{logged}Win rates: against the model's reference under the same procedure. {INTERVALS}"

    # --- tables ---

    def models(self) -> str:
        """Table of the models: style, state, logged steps, and the first 12 configuration keys that differ."""
        keys = list(self.differing)[:12]
        rows = [
            [self._named(label), html_page.text("reference"), html_page.text(""), *[html_page.text("")] * len(keys)]
            for label in self.looks
            if label not in {model.label for model in self.found.models}
        ]
        for model in self.found.models:
            steps = html_page.number(len(model.logged) or math.nan, str(len(model.logged) or "-"))
            values = [html_page.text(self.differing[key].get(model.label, "")) for key in keys]
            rows.append([self._named(model.label), html_page.text(model.state), steps, *values])
        about = "Colours, lines and markers are those of the figures" * (len(rows) > figures.NAMED)
        about += "; they repeat after 28 models" * (len(self.found.models) > 28)
        table = html_page.table(["model", "state", "steps", *keys], rows, kind="sorts")
        return table + (html_page.soft(f"{about}.") if about else "")

    def _named(self, label: str) -> Cell:
        name = html_page.text(label)
        return Cell(html_page.swatch(self.looks[label]) + name.content, label)

    def numbers(self) -> str:
        """Table of all entries, sortable by a click on a heading."""
        heads = ["model", "quantity", "procedure", "value", "95% interval", "win rate", "change", "p"]
        rows = [self._row(entry) for entry in self.found.entries]
        about = (
            "Means over prompts with 95% intervals (bootstrap over prompts), with the prompts and samples behind them "
            "if these are not all. Win rates and changes are relative to the reference on the prompts that both have. "
            "p: p-value of no change (permutation test)."
        )
        return html_page.table(heads, rows, filters=heads[:3], kind="sorts") + html_page.soft(about) if rows else ""

    def _row(self, entry: Entry) -> list[Cell]:
        e, p = entry.estimate, entry.p_value
        return [
            self._named(entry.model),
            html_page.text(entry.quantity),
            html_page.text(entry.procedure),
            html_page.number(e.value, _number(e.value), ", ".join(e.coverage.lines)),
            html_page.number(e.low, "" if math.isnan(e.low) else f"[{e.low:.4f}, {e.high:.4f}]"),
            _estimate(entry.win_rate, e, "{:.1f}", 100, "%"),
            _estimate(entry.change, e, "{:+.4f}"),
            html_page.number(p, "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"),
        ]

    # --- samples and settings ---

    def samples(self) -> str:
        """Saved completions of references and models side by side, with lengths and rewards."""
        shown = {label: s for label, s in self.found.sampled.items() if s.prompts and s.completions}
        each = 4 if len(shown) < 4 else 2 if len(shown) < 9 else 1
        content = ""
        prompts = list(dict.fromkeys(prompt for s in shown.values() for prompt in s.prompts[: len(s.completions)]))
        for i, prompt in enumerate(prompts[:PROMPTS]):
            columns = "".join(
                self._column(label, s, s.prompts.index(prompt), each)
                for label, s in shown.items()
                if prompt in s.prompts[: len(s.completions)]
            )
            content += html_page.details(prompt, f'<div class="pair">{columns}</div>', opened=i == 0)
        return content

    def _column(self, label: str, sampled: EvaluationSamples, prompt: int, each: int) -> str:
        when = {REFERENCE: "before training"}.get(label, "after training")
        name = html_page.soft(when) if self.one else f"<p>{self._named(label).content}</p>"
        return f"<div>{name}{''.join(_sample(sampled, prompt, j) for j in range(each))}</div>"

    def settings(self) -> str:
        """All configurations with their library versions, and the versions that created this page."""
        content = ""
        for label, settings in self.found.settings.items():
            versions = ", ".join(f"{name} {version}" for name, version in settings.versions.items())
            if settings.config:
                text = json.dumps(settings.config, indent=2, ensure_ascii=False, default=str)
                content += html_page.details(f"{label}{f' ({versions})' * bool(versions)}", html_page.code(text))
        versions_here = {"nlgrpo": __version__, "torch": torch.__version__, "matplotlib": mpl.__version__}
        versions_here["Python"] = platform.python_version()
        return content + html_page.soft(
            "This page was created with " + ", ".join(f"{name} {version}" for name, version in versions_here.items())
        )


WALKS = "All saved answers to two mazes, those nearest to solved in a third of the samples before training."
SMOOTHED = "Dark lines: moving average over 5% of the steps."
INTERVALS = "95% intervals: bootstrap over prompts."


def length_targets(config: Any) -> list[float]:
    """Targets of all ``length(target=..)`` rewards in a configuration, sorted."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list):
        return sorted({target for item in config for target in length_targets(item)})
    return [float(t) for t in TARGET.findall(config)] if isinstance(config, str) else []


def _result(label: str, found: ReportData) -> str:
    """Table of one run: mean and best-of-4 (or of fewer samples) of each reward, before and after training."""
    model = found.models[0]
    sampled = {"before": found.references.get(model.reference), "after": model.sampled}
    known = {when: s for when, s in sampled.items() if s is not None}
    if not known:
        return ""
    ns = sorted({1, min(4, *(s.lengths.shape[1] for s in known.values()))})
    some = next(iter(known.values()))
    rows = []
    both = changes(known["before"], known["after"], ns) if len(known) == 2 else []
    for i, columns in enumerate([(x.before, x.after) for x in both] or [(x,) for x in summarize(some, ns)]):
        name = columns[0].reward
        row = [Cell(html_page.stacked(name, some.objectives.get(name, ""))), html_page.text(columns[0].procedure)]
        for x in columns:
            shown, *under = format_interval(x, gap="|").split("|")
            row.append(html_page.number(x.value, shown, " ".join(under)))
        row += [html_page.number(x.value, format_change(x)) for x in both[i : i + 1]]
        rows.append(row)
    heads = ["reward", "procedure", *known, *["change"] * bool(both)]
    return html_page.table(heads, rows, kind="wraps") + html_page.soft(
        "In brackets: 95% intervals (bootstrap over prompts)."
    )


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _estimate(estimate: Estimate | None, beside: Estimate, form: str, scale: float = 1, unit: str = "") -> Cell:
    """Cell with a number, its interval, and what it is over unless ``beside`` says so; empty if there is none."""
    if estimate is None or math.isnan(estimate.value):
        return html_page.number(math.nan, "")
    value, low, high = (form.format(scale * x) for x in (estimate.value, estimate.low, estimate.high))
    under = [] if math.isnan(estimate.low) else [f"[{low}, {high}]"]
    if estimate.coverage != beside.coverage:
        under.append(", ".join(estimate.coverage.lines))
    return html_page.number(estimate.value, value + unit, " ".join(under))


def _sample(sampled: EvaluationSamples, prompt: int, j: int) -> str:
    if j >= len(sampled.completions[prompt]):
        return ""
    scores = [f"{sampled.lengths[prompt, j]} tokens"]
    for name, values in sampled.rewards.items():
        value = values[prompt, j].item()
        scores.append(f"{name} {'-' if math.isnan(value) else f'{value:.3f}'}")
    return html_page.sample(sampled.completions[prompt][j], " · ".join(scores))


# --- several runs -------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Draw several runs in one figure and print a table of their rewards. Returns the path of the PNG, PDF or SVG file.

    Left: length histograms of the reference (of the first run) and of each trained model (IAMA, Fig. 3a). Right: the
    weighted sum of best-of-N rewards over N, with 95% intervals. If ``out`` is a folder, the file is ``compare.png``.

    Raises ValueError if a folder is not a run or its evaluation is not finished, if rewards or weights differ, and if
    there is no prompt at which the same rewards score a completion of every model.
    """
    out = Path(out) / "compare.png" if Path(out).is_dir() or not Path(out).suffix else Path(out)
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"cannot draw into {out}: the name must end in .png, .pdf or .svg")
    if not runs:
        raise ValueError("no runs to compare; give one or more folders written by `nlgrpo train`")
    folders = list({Path(run).resolve(): Path(run) for run in runs}.values())
    evaluated = {run: _evaluated(run) for run in folders}
    configs = {run: run_loader.read_config(run, []) for run in folders}
    models = _comparable(evaluated, configs)
    targets = sorted({t for config in configs.values() for t in length_targets(config)})
    n = min(s.lengths.shape[1] for s in models.values())
    ns = [best_of for best_of in NS if best_of <= n]
    values = {label: _curve(label, s, ns, where_same_rewards(models.values())) for label, s in models.items()}
    drawn = figures.render(partial(figures.comparison, models, values, ns, targets), form=out.suffix[1:])
    with atomic_files.into(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.atomic_write_bytes(out, drawn)
    Console().print(_compare_table(values, ns, sizes_of(models.values())))
    return out


def _curve(label: str, sampled: EvaluationSamples, ns: Sequence[int], where: Tensor) -> list[Row]:
    """Weighted sum of best-of-N for each N, over the prompts ``where`` it can be compared."""
    behind = sampled.scored(), sampled.prompts_of_rewards()
    found = [Estimate.of(x.masked_fill(~where, math.nan), *behind) for x in weighted_best_of_n(sampled, ns)]
    if found[0].coverage.prompts == 0:
        each = ", ".join(f"{name} on {int(there.sum())}" for name, there in sampled.applies().items())
        raise ValueError(
            f"{label}: no prompt has a weighted sum that can be compared. Of {len(sampled.lengths)} prompts, the "
            f"rewards score {each}, and all models need the same ones at a prompt"
        )
    return [Row(label, "", x.value, x.low, x.high, x.coverage) for x in found]


def _evaluated(run: Path) -> dict[str, EvaluationSamples]:
    if run_loader.kind_of(run) != "run":
        raise ValueError(f"{run} is not a run; use `nlgrpo report` for evaluations and sweeps")
    if _table(run_loader.read_config(run, []), "evaluation").get("prompts") == 0:
        raise ValueError(
            f"{run} was trained with evaluation.prompts = 0; run `nlgrpo evaluate {run} --evaluation.prompts 64` to "
            "evaluate its model"
        )
    sampled = read_evaluation(run)
    if set(sampled) < {"before", "after"}:
        missing = " or ".join(when for when in ("before", "after") if when not in sampled)
        raise ValueError(f"{run} has no evaluation {missing} training; run the command that started it again to resume")
    return sampled


def _comparable(
    evaluated: Mapping[Path, Mapping[str, EvaluationSamples]], configs: Mapping[Path, Mapping[str, Any]]
) -> dict[str, EvaluationSamples]:
    """Samples by legend label, the reference first. Labels of runs with the same objective include the folder."""
    first_run, first = next(iter(evaluated.items()))
    models, taken = {REFERENCE: first["before"]}, set[str]()
    labels = [figures.objective_label(sampled["after"]) for sampled in evaluated.values()]
    for (run, sampled), label in zip(evaluated.items(), labels, strict=True):
        after = sampled["after"]
        if after.weights != first["after"].weights:
            raise ValueError(
                f"the reward weights of {run} are {after.weights}, those of {first_run} {first['after'].weights}; "
                "only runs with the same rewards and weights can be compared"
            )
        ours, theirs = (_table(configs[folder], "rewards") for folder in (run, first_run))
        for name in ours.keys() & theirs.keys():
            if _meaning(_table(ours, name)) != _meaning(_table(theirs, name)):
                raise ValueError(
                    f"reward {name!r} of {run} is {_table(ours, name)}, that of {first_run} {_table(theirs, name)}; "
                    "only runs with the same rewards can be compared"
                )
        models[label if labels.count(label) == 1 else f"{label} · {run_loader.unique_label(run, taken)}"] = after
    return models


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


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Section of a configuration that was read from a file; empty if it is missing or not a table."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _compare_table(values: Mapping[str, Sequence[Row]], ns: Sequence[int], evaluated: str) -> Table:
    """Table with a column per model, or for more than three trained models a row per model, to fit 80 columns."""
    title = f"weighted sum of best-of-N rewards ({evaluated}, 95% intervals)"
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
