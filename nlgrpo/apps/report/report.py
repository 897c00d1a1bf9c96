"""The HTML report of runs, evaluations and sweeps with its figures.

A report is built from the files of a folder alone, so it can be written at any time, also for a run that was killed.
Missing or damaged files are listed in the report's notes (`run_loader`).
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from nlgrpo import __version__
from nlgrpo.apps.evaluate.named_models import split_label
from nlgrpo.apps.evaluate.results import Entry
from nlgrpo.apps.report import config_diff, evaluation_figures, figures, html_page, run_loader, seeds, success_figures
from nlgrpo.apps.report.html_page import Cell
from nlgrpo.apps.report.run_loader import REFERENCE, TRAINING_KL, ReportData
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, sizes_of, where_same_rewards
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files
from nlgrpo.training import evaluation_summary
from nlgrpo.training.evaluation_summary import (
    WEIGHTED_SUM,
    Estimate,
    binary_rewards,
    changes,
    format_change,
    format_interval,
    summarize,
)
from nlgrpo.training.tracking import run_files

FILE = run_files.REPORT_FILE
PROMPTS = 8


def write_report(folders: Path | str | Sequence[Path | str], out: Path | None = None) -> Path:
    """Write the HTML report of one or more folders, and its figures. Returns the path of the report.

    Each folder is a run or the output of `nlgrpo evaluate` or `nlgrpo sweep`, with ``LABEL=`` before it for another
    name. Runs that differ in the seed only are one model, with intervals over seeds and prompts. ``out`` is by default
    ``report.html`` in the folder, or in the current one for several folders. The figures are saved next to it:
    ``lengths.png``, ``curves.png``, ``rewards.png``, ``successes.png``, ``walks.png``, ``best_of_n.png``,
    ``win_rates.png`` and ``fronts.png``. If ``out`` has another name, that name is their prefix. Missing or damaged
    files are left out and listed in the report.

    Raises UserError for a folder of another kind, and if ``out`` does not end in .html.
    """
    given = [folders] if isinstance(folders, str | Path) else list(dict.fromkeys(folders))
    paths = [split_label(str(folder))[1] for folder in given]
    if not given:
        raise UserError("no folder given; give one or more folders written by `nlgrpo train`, `evaluate` or `sweep`")
    out = Path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / FILE
    out = out / FILE if out.is_dir() else out
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"cannot write {out}: the name must end in .html")
    found = run_loader.read_runs(given)
    with atomic_files.into(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    name = ", ".join(folder.resolve().name for folder in paths[:4]) + f" and {len(paths) - 4} more" * (len(paths) > 4)
    atomic_files.atomic_write_bytes(out, _Report(found, out).html(name).encode(errors="replace"))
    return out


class _Report:
    """Builds the sections of the page from the loaded data."""

    def __init__(self, found: ReportData, out: Path) -> None:
        self.found = found
        self.out = out
        self.one = (
            found.models[0] if len(found.models) == 1 and found.models[0].settings == found.models[0].label else None
        )
        self.names = self._names()
        self.looks = self._looks()
        configs = {m.label: found.settings[m.settings].config for m in found.models if m.settings == m.label}
        self.differing = config_diff.columns(configs)
        self.places = config_diff.places(configs)

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
            "Differences": self.differences(),
            **pictures,
            "All results": self.numbers(),
            "Samples": self.samples(),
            "Settings": self.settings(),
        }
        parts = [html_page.notes(self.found.notes), *(html_page.section(name, part) for name, part in sections.items())]
        return html_page.page(title, self.facts(), parts, [name for name, part in sections.items() if part])

    @property
    def over(self) -> str:
        """What the intervals are over."""
        several = any(model.by_seed for model in self.found.models)
        return "bootstrap over prompts" + "; over prompts and seeds where there are several" * several

    def facts(self) -> list[str]:
        models = self.found.models
        facts = []
        if len(models) != 1:
            facts.append(f"{len(models)} models")
        if any(model.logged for model in models) or self.one:
            facts.append(f"{sum(len(model.logged) for model in models)} logged steps")
        return facts + [f"evaluated on {sizes_of(self.found.sampled.values())}"] * bool(self.found.sampled)

    # --- pictures ---

    def pictures(self) -> dict[str, str]:
        """HTML of the figures that have data, by title."""
        found = self.found
        looks = self._renamed(self.looks)
        places = self._renamed(self.places)
        renamed = [replace(entry, model=self.names.get(entry.model, entry.model)) for entry in found.entries]
        table = evaluation_figures.Table(renamed)
        sampled = self._renamed(found.sampled)
        runs = self._renamed({model.label: model.logged for model in found.models if model.logged})
        targets = run_loader.length_targets([settings.config for settings in found.settings.values()])
        pairs = evaluation_figures.fronts_of(table, [WEIGHTED_SUM])
        best = partial(evaluation_figures.best_of_n, table, looks)
        won = partial(evaluation_figures.win_rates, table, looks, places)
        fronts = partial(evaluation_figures.fronts, table, pairs, looks, places)
        binary = binary_rewards(sampled)
        scores = {name for one in sampled.values() for name in one.rewards} - set(binary)
        solved = partial(success_figures.successes, sampled)
        seen = success_figures.maze_prompts(sampled)
        walks = partial(success_figures.walks, sampled, seen)
        hollow = "Hollow points: another model is higher in both rewards. " + INTERVALS
        drawn: dict[str, tuple[str, bool, Callable[..., Figure], str]] = {
            "Solved prompts": ("successes", bool(binary), solved, ""),
            "Walks": ("walks", bool(seen), walks, WALKS),
            "Completion lengths": ("lengths", bool(sampled), partial(figures.lengths, sampled, looks, targets), ""),
            "Training curves": ("curves", bool(runs), partial(figures.curves, runs, looks), SMOOTHED),
            "Rewards": ("rewards", bool(scores), partial(figures.rewards, sampled, looks), ""),
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

    def differences(self) -> str:
        """Table of tests between the trained models: best-of-N of the first one less that of each other one."""
        trained = [
            seeds.Setting(model.label, {}, model.by_seed or {None: model.sampled})
            for model in self.found.models
            if model.sampled is not None
        ]
        samples = [sampled for setting in trained for sampled in setting.by_seed.values()]
        if not 1 < len(trained) <= seeds.TESTED + 1 or not run_loader.comparable(samples):
            return ""
        if any(sampled.weights != samples[0].weights for sampled in samples):
            return ""
        most = min(sampled.lengths.shape[1] for sampled in samples)
        ns = [n for n in run_loader.NS if n <= most]
        first, *others = trained
        found = seeds.differences(first, others, ns, where_same_rewards(samples))
        rows = [
            [
                html_page.number(one.n, str(one.n)),
                html_page.text(one.other),
                html_page.number(one.value, one.shown),
                html_page.number(one.p_value, one.shown_p),
                html_page.text(one.over),
            ]
            for one in found
        ]
        what = "the weighted sum of best-of-N rewards" if len(samples[0].rewards) > 1 else "best-of-N"
        about = (
            f"{first.label} less each other model: {what}, with 95% intervals over what the last column says, and the "
            "p-value of no difference. Paired by prompt, and by seed where there are several."
        )
        heads = ["N", "less", "difference", "p", "over"]
        return html_page.table(heads, rows, kind="sorts") + html_page.soft(about) if rows else ""

    def _named(self, label: str) -> Cell:
        name = html_page.text(label)
        return Cell(html_page.swatch(self.looks[label]) + name.content, label)

    def numbers(self) -> str:
        """Table of all entries, sortable by a click on a heading."""
        heads = ["model", "quantity", "procedure", "value", "95% interval", "win rate", "change", "p"]
        rows = [self._row(entry) for entry in self.found.entries]
        about = (
            f"Means over prompts with 95% intervals ({self.over}), with the prompts and samples behind them if these "
            "are not all. Win rates and changes are relative to the reference on the prompts that both have. "
            "p: p-value of no change (permutation test)."
        )
        return html_page.table(heads, rows, filters=heads[:3], kind="sorts") + html_page.soft(about) if rows else ""

    def _row(self, entry: Entry) -> list[Cell]:
        e = entry.estimate
        p = entry.p_value
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
INTERVALS = "95% intervals over prompts, and over seeds where there are several."


def _result(label: str, found: ReportData) -> str:
    """Table of one run: each reward before and after training, of one sample and under best-of-N for evaluation.ns."""
    model = found.models[0]
    config = found.settings[model.settings].config
    sampled = {"before": found.references.get(model.reference), "after": model.sampled}
    known = {when: s for when, s in sampled.items() if s is not None}
    if not known:
        return ""
    some = next(iter(known.values()))
    most = min(s.lengths.shape[1] for s in known.values())
    ns = sorted({1, *(n for n in _ns(config) if n <= most)})
    binary = binary_rewards(known)
    recorded = evaluation_summary.recorded_for(config)
    rows = []
    both = changes(known["before"], known["after"], ns) if len(known) == 2 else []
    for i, columns in enumerate([(x.before, x.after) for x in both] or [(x,) for x in summarize(some, ns)]):
        name = columns[0].reward
        row = [Cell(html_page.stacked(name, some.objectives.get(name, "")))]
        row.append(html_page.text(columns[0].heading(binary=name in binary)))
        for x in columns:
            shown, *under = format_interval(x, gap="|").split("|")
            row.append(html_page.number(x.value, shown, " ".join(under)))
        row += [html_page.number(x.value, format_change(x)) for x in both[i : i + 1]]
        if recorded is not None:
            value, low, high = recorded.values.get(columns[0].n, (math.nan,) * 3)
            shown = "-" if math.isnan(value) else f"{value:.4f}"
            row.append(html_page.number(value, shown, "" if math.isnan(value) else f"[{low:.4f}, {high:.4f}]"))
        rows.append(row)
    heads = ["reward", "procedure", *known, *["change"] * bool(both)]
    about = "In brackets: 95% intervals over prompts, and over seeds if there are several."
    if recorded is not None:
        heads.append(recorded.label)
        about += f" {recorded.label}: {recorded.about}."
    return html_page.table(heads, rows, kind="wraps") + html_page.soft(about)


def _ns(config: Mapping[str, Any]) -> list[int]:
    """Values of evaluation.ns of a configuration that was read from a file."""
    given = evaluation_summary.value_of(config, "evaluation.ns")
    return [n for n in given if isinstance(n, int) and n > 0] if isinstance(given, list | tuple) else [1, 4]


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
