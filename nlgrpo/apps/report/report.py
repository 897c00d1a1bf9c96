"""The HTML report of runs, evaluations, sweeps and searches with its figures.

A report is built from the files of a folder alone, so it can be written at any time, also for a run that was killed.
Missing or damaged files are listed in the report's notes (`run_loader`).
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from nlgrpo import __version__
from nlgrpo.apps.evaluate.named_models import split_label
from nlgrpo.apps.report import (
    charts,
    completions,
    configurations,
    evaluation_figures,
    figures,
    logged,
    page,
    recorded_tables,
    run_loader,
    run_warnings,
    success_figures,
)
from nlgrpo.apps.report.compare import TESTED, Setting, differences, format_p_value
from nlgrpo.apps.report.page import Cell, Section, Table
from nlgrpo.apps.report.run_loader import TRAINING_KL, Model, ReportData
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, sizes_of, where_same_rewards
from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files
from nlgrpo.training import evaluation_summary
from nlgrpo.training.evaluation_entries import Entry
from nlgrpo.training.evaluation_summary import (
    WEIGHTED_SUM,
    Estimate,
    binary_rewards,
    changes,
    format_change,
    format_interval,
    number_lines,
    summarize,
)
from nlgrpo.training.tracking import run_files

FILE = run_files.REPORT_FILE
KEYS = 12  # most configuration keys in the table of the models
WARNINGS = 12  # most warnings at the top of the page
PANELS = 12  # most panels of the picture of the training curves

WALKS = "All saved answers to two mazes, those nearest to solved in a third of the samples before training."
CURVES = (
    "Drag over a chart to look at some of the steps; a double click shows all. Dark lines: moving average over 5% of "
    "the steps."
)
COMPLETIONS = (
    "Marked: what best-of-N or worst-of-N of the reward's objective returns, of the first N completions of a prompt."
)
INTERVALS = "95% intervals over prompts, and over seeds where there are several."


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
    if not given:
        raise UserError("no folder given; give one or more folders written by `nlgrpo train` or another command")
    paths = [split_label(str(folder))[1] for folder in given]
    if out is None:
        out = (paths[0] if len(paths) == 1 else Path()) / FILE
    out = Path(out)
    if out.is_dir():
        out = out / FILE
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"cannot write {out}: the name must end in .html")
    found = run_loader.read_runs(given)
    with atomic_files.into(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    title = ", ".join(folder.resolve().name for folder in paths[:4])
    if len(paths) > 4:
        title += f" and {len(paths) - 4} more"
    report = _Report(found, out)
    html = page.render(
        "report.html",
        title=title,
        facts=report.facts(),
        warnings=report.warnings(),
        notes=found.notes,
        sections=list(report.sections()),
    )
    atomic_files.atomic_write_bytes(out, html.encode(errors="replace"))
    return out


class _Report:
    """Makes the sections of the page from the loaded data."""

    def __init__(self, found: ReportData, out: Path) -> None:
        self.found = found
        self.out = out
        # the model of a report on one run; None for several runs, and for an evaluation
        self.one: Model | None = None
        if len(found.models) == 1 and found.models[0].settings == found.models[0].label:
            self.one = found.models[0]
        # names in legends of the labels that have another one there
        self.names: dict[str, str] = {}
        if self.one is not None and self.one.sampled is not None:
            self.names[self.one.label] = f"trained: {run_loader.objective_label(self.one.sampled)}"
        self.looks = self._looks()
        configs = {m.label: found.settings[m.settings].config for m in found.models if m.settings == m.label}
        self.differing = configurations.differing(configs)
        self.places = configurations.places(configs)

    def _looks(self) -> dict[str, figures.Style]:
        """Style of each label: the same in all figures; evaluations of one model share its colour."""
        references = dict.fromkeys(self.found.references)
        references |= dict.fromkeys(entry.model for entry in self.found.reference_entries)
        looks = {label: figures.Style(dash=figures.DASHES[i % 4]) for i, label in enumerate(references)}
        evaluations: dict[str, int] = {}  # of each model so far
        for model in self.found.models:
            again = evaluations.setdefault(model.name, 0)
            looks[model.label] = figures.series_style(list(evaluations).index(model.name), again)
            evaluations[model.name] += 1
        return looks

    def facts(self) -> list[str]:
        """What the report is about, in a few words."""
        models = self.found.models
        facts = []
        if len(models) > 1:
            facts.append(f"{len(models)} models")
        if self.one is not None or any(len(model.logged) for model in models):
            facts.append(f"{sum(len(model.logged) for model in models)} logged steps")
        if self.found.sampled:
            facts.append(f"evaluated on {sizes_of(self.found.sampled.values())}")
        return facts

    def warnings(self) -> list[str]:
        """What a reader should know first, with the name of the run if there are several."""
        found = []
        for model in self.found.models:
            config = self.found.settings[model.settings].config
            kl = next((e.estimate.value for e in model.entries if e.quantity == TRAINING_KL), math.nan)
            for text in run_warnings.warnings_of(model.logged, config, kl):
                found.append(text if self.one is not None else f"{model.label}: {text}")
        if len(found) > WARNINGS:
            found[WARNINGS:] = [f"{len(found) - WARNINGS} more warnings are left out."]
        return found

    def sections(self) -> Iterator[Section]:
        """Yield the sections that have content: results first, then training, then single completions."""
        for label, folder in self.found.recorded:
            several = len(self.found.recorded) > 1
            yield from recorded_tables.sections(folder, self.found.notes, f"{label}:" if several else "")
        if self.one is not None:
            yield from _result(self.one, self.found)
        elif self.found.models or self.found.references:
            yield self.models()
        yield from self.differences()
        yield from self.results()
        yield from self.completions()
        yield from self.training()
        yield from self.distributions()
        yield from self.numbers()
        yield self.settings()

    # --- pictures ---

    def results(self) -> Iterator[Section]:
        """Yield the figures of evaluations."""
        looks = self._renamed(self.looks)
        places = self._renamed(self.places)
        table = evaluation_figures.Table(
            replace(entry, model=self.names.get(entry.model, entry.model)) for entry in self.found.entries
        )
        sampled = self._renamed(self.found.sampled)
        binary = binary_rewards(sampled)
        if table.quantities():
            draw = partial(evaluation_figures.best_of_n, table, looks, binary=binary)
            title = "Best-of-N rewards" if set(table.quantities()) - set(binary) else "pass@N"
            yield self._picture(title, "best_of_n", draw, INTERVALS)
        if binary:
            yield self._picture("Solved prompts", "successes", partial(success_figures.successes, sampled))
        if evaluation_figures.has_win_rates(table):
            draw = partial(evaluation_figures.win_rates, table, looks, places)
            yield self._picture("Win rate over KL", "win_rates", draw, self._about_kl())
        pairs = evaluation_figures.fronts_of(table, [WEIGHTED_SUM])
        if pairs:
            draw = partial(evaluation_figures.fronts, table, pairs, looks, places)
            about = f"Hollow points: another model is higher in both rewards. {INTERVALS}"
            yield self._picture("Reward trade-offs", "fronts", draw, about)

    def training(self) -> Iterator[Section]:
        """Yield the curves of logged metrics; the important ones are also saved as a picture."""
        runs = {model.label: model.logged for model in self.found.models if len(model.logged)}
        if not runs:
            return
        configs = {model.label: self.found.settings[model.settings].config for model in self.found.models}
        objectives = {label: configurations.objectives(configs[label]) for label in runs}
        looks = {}
        if len(runs) > 1:
            looks = {label: self.looks[label] for label in runs}
            panels = logged.panels_of_runs(runs, objectives)
        else:
            [(label, of_run)] = runs.items()
            panels = logged.panels_of_run(label, of_run, objectives[label])
        evaluated = {model.label: model.evaluated for model in self.found.models if model.label in runs}
        rewards = list(dict.fromkeys(name for of_run in objectives.values() for name in of_run))
        panels = [*logged.evaluation_panels(evaluated, rewards, binary_rewards(self.found.sampled)), *panels]
        important = [panel for panel in panels if panel.important][:PANELS]
        if important:
            self._save("curves", figures.render_png(partial(figures.curves, important, looks, rewards)))
        yield Section("Training curves", "charts.html", charts.charts(panels, looks, rewards), CURVES)

    def distributions(self) -> Iterator[Section]:
        """Yield the histograms of evaluations, and the walks through mazes."""
        looks = self._renamed(self.looks)
        sampled = self._renamed(self.found.sampled)
        if not sampled:
            return
        mazes = success_figures.maze_prompts(sampled)
        if mazes:
            yield self._picture("Walks", "walks", partial(success_figures.walks, sampled, mazes), WALKS)
        targets = configurations.length_targets([settings.config for settings in self.found.settings.values()])
        yield self._picture("Completion lengths", "lengths", partial(figures.lengths, sampled, looks, targets))
        names = {name for one in sampled.values() for name in one.rewards}
        if names - set(binary_rewards(sampled)):
            yield self._picture("Rewards", "rewards", partial(figures.rewards, sampled, looks))

    def _renamed(self, by_label: Mapping[str, Any]) -> dict[str, Any]:
        return {self.names.get(label, label): value for label, value in by_label.items()}

    def _picture(self, title: str, name: str, draw: Callable[..., Figure], about: str = "") -> Section:
        """Draw a figure, and save it as PNG."""
        drawn = figures.picture(draw)
        self._save(name, drawn.png)
        return Section(title, "picture.html", drawn, about)

    def _save(self, name: str, png: bytes) -> None:
        prefix = "" if self.out.name == FILE else f"{self.out.stem}-"
        atomic_files.atomic_write_bytes(self.out.with_name(f"{prefix}{name}.png"), png)

    def _about_kl(self) -> str:
        about = f"Win rates: against the model's reference under the same procedure. {INTERVALS}"
        if any(entry.quantity == TRAINING_KL for entry in self.found.entries):
            about = f"KL of runs: mean KL per token times length, over the last 10% of the steps. {about}"
        return about

    # --- tables ---

    def models(self) -> Section:
        """Table of the models: rank, state, logged steps, main values, and the first configuration keys that differ."""
        keys = list(self.differing)[:KEYS]
        trained = {model.label: model for model in self.found.models}
        quantity, ns = self._ranked_by()
        table = evaluation_figures.Table(self.found.entries)
        values = {label: [table.at(label, quantity, n) for n in ns] for label in self.looks}
        ranking = []
        for label in trained:
            entry = values[label][-1] if ns else None
            if entry is not None and not math.isnan(entry.estimate.value):
                ranking.append((entry.estimate.value, label))
        ranking.sort(key=lambda item: -item[0])
        ranks = {label: str(1 + place) for place, (_, label) in enumerate(ranking)} if len(ranking) > 1 else {}

        rows = []
        for label in self._in_order(ranks):
            model = trained.get(label)
            cells = [Cell(ranks.get(label, ""), sort=ranks.get(label, ""), number=True)] if ranks else []
            cells.append(self._named(label))
            cells += [_value(entry) for entry in values[label]]
            if model is None:
                cells += [Cell("reference"), page.number(math.nan, ""), *(Cell("") for _ in keys)]
            else:
                steps = len(model.logged)
                cells += [Cell(model.state), page.number(steps or math.nan, str(steps) if steps else "-")]
                cells += [Cell(self.differing[key].get(label, "")) for key in keys]
            rows.append(cells)

        binary = quantity in binary_rewards(self.found.sampled)
        heads = ["rank"] if ranks else []
        heads += ["model", *(_heading(quantity, n, binary=binary) for n in ns), "state", "steps", *keys]
        about = []
        if ranks:
            about.append(f"Ranked by {heads[1 + len(ns)]}.")
        if len(rows) > figures.NAMED:
            text = "Colours, lines and markers are those of the figures"
            about.append(text + ("; they repeat after 28 models." if len(trained) > 28 else "."))
        return Section("Models", "table.html", Table(heads, rows, "sorts"), " ".join(about))

    def _in_order(self, ranks: Mapping[str, str]) -> list[str]:
        """Labels of all models: the references first, then by rank, then those without one."""
        trained = {model.label for model in self.found.models}
        return sorted(self.looks, key=lambda label: (label in trained, int(ranks.get(label, len(trained) + 1))))

    def _ranked_by(self) -> tuple[str, list[int]]:
        """The reward that ranks the models, or the weighted sum of several, and its Ns: 1 and the largest trained one.

        The second N is the largest N of a trained best-of-N that all models were evaluated at, or the nearest to 4.
        """
        table = evaluation_figures.Table(self.found.entries)
        quantities = table.quantities()
        if not quantities:
            return "", []
        quantity = WEIGHTED_SUM if WEIGHTED_SUM in quantities else quantities[0]
        common: set[int] | None = None
        for model in table.models:
            ns = {n for kind, n in table.rows.get((model, quantity), {}) if kind == "bon"}
            if ns:
                common = ns if common is None else common & ns
        if not common:
            return quantity, []
        trained = set()
        for settings in self.found.settings.values():
            for objective in configurations.objectives(settings.config).values():
                kind, n = evaluation_figures.kind_and_n(objective)
                if kind == "bon" and n in common:
                    trained.add(n)
        last = max(trained) if trained else min(common, key=lambda n: abs(n - 4))
        return quantity, sorted({1, last} & common)

    def differences(self) -> Iterator[Section]:
        """Table of tests between the trained models: best-of-N of the first one less that of each other one."""
        trained = [
            Setting(model.label, {}, model.by_seed or {None: model.sampled})
            for model in self.found.models
            if model.sampled is not None
        ]
        if not 1 < len(trained) <= TESTED + 1:
            return
        samples = [sampled for setting in trained for sampled in setting.by_seed.values()]
        if not run_loader.comparable(samples) or any(sampled.weights != samples[0].weights for sampled in samples):
            return
        most = min(sampled.lengths.shape[1] for sampled in samples)
        ns = [n for n in run_loader.NS if n <= most]
        first, *others = trained
        rows = []
        for found in differences(first, others, ns, where_same_rewards(samples)):
            row = [
                page.number(found.n, str(found.n)),
                Cell(found.other),
                page.number(found.value, found.shown),
                page.number(found.p_value, format_p_value(found.p_value)),
                Cell(found.over),
            ]
            rows.append(row)
        if not rows:
            return
        what = "the weighted sum of best-of-N rewards" if len(samples[0].rewards) > 1 else "best-of-N"
        about = (
            f"{first.label} less each other model: {what}, with 95% intervals over what the last column says, and the "
            "p-value of no difference. Paired by prompt, and by seed where there are several."
        )
        table = Table(["N", "less", "difference", "p", "over"], rows, "sorts")
        yield Section("Differences", "table.html", table, about)

    def _named(self, label: str) -> Cell:
        """Cell with a model's name, and its style in the figures."""
        return Cell(label, sort=label, style=self.looks[label])

    def numbers(self) -> Iterator[Section]:
        """Table of all entries."""
        rows = [self._row(entry) for entry in self.found.entries]
        if not rows:
            return
        over = "bootstrap over prompts"
        if any(model.by_seed for model in self.found.models):
            over += "; over prompts and seeds where there are several"
        about = (
            f"Means over prompts with 95% intervals ({over}), with the prompts and samples behind them if these "
            "are not all. Win rates and changes are relative to the reference on the prompts that both have. "
            "p: p-value of no change (permutation test)."
        )
        heads = ["model", "quantity", "procedure", "value", "95% interval", "win rate", "change", "p"]
        yield Section("All results", "table.html", Table(heads, rows, "sorts", filters=heads[:3]), about)

    def _row(self, entry: Entry) -> list[Cell]:
        e = entry.estimate
        value = "" if math.isnan(e.value) else f"{e.value:.4f}"
        interval = "" if math.isnan(e.low) else f"[{e.low:.4f}, {e.high:.4f}]"
        return [
            self._named(entry.model),
            Cell(entry.quantity),
            Cell(entry.procedure),
            page.number(e.value, value, ", ".join(e.coverage.lines)),
            page.number(e.low, interval),
            _estimate(entry.win_rate, e, "{:.1f}", 100, "%"),
            _estimate(entry.change, e, "{:+.4f}"),
            page.number(entry.p_value, format_p_value(entry.p_value)),
        ]

    # --- completions and settings ---

    def completions(self) -> Iterator[Section]:
        """Yield the browser of the completions of evaluations and of training."""
        names: dict[str, str] = {}
        if self.one is not None:
            names = {self.one.reference: "before training", self.one.label: "after training"}
        sampled = {names.get(label, label): one for label, one in self.found.sampled.items()}
        sources = [completions.of_evaluation("evaluation (first prompts)", sampled)]
        for model in self.found.models:
            objectives = configurations.objectives(self.found.settings[model.settings].config)
            for folder in model.folders:
                name = "training" if self.one is not None else f"training of {model.label}"
                if len(model.folders) > 1:
                    name += f", {folder.name}"
                sources.append(completions.of_training(folder, name, model.label, objectives))
        known = [source for source in sources if source is not None and source.groups]
        if known:
            colours = {names.get(label, label): style.colour for label, style in self.looks.items()}
            about = COMPLETIONS if any(source.marked for source in known) else ""
            yield Section("Completions", "completions.html", completions.browser(known, colours), about)

    def settings(self) -> Section:
        """All configurations with their library versions, and the versions that created this page."""
        content = {}
        for label, settings in self.found.settings.items():
            if settings.config:
                heading = f"{label} ({_versions(settings.versions)})" if settings.versions else label
                content[heading] = json.dumps(settings.config, indent=2, ensure_ascii=False, default=str)
        here = {"nlgrpo": __version__, "torch": torch.__version__, "matplotlib": mpl.__version__}
        here["Python"] = platform.python_version()
        return Section("Settings", "settings.html", content, f"This page was created with {_versions(here)}")


def _value(entry: Entry | None) -> Cell:
    """Cell with a value and its interval; empty if it was not measured."""
    if entry is None:
        return page.number(math.nan, "")
    return _estimate(entry.estimate, entry.estimate, "{:.4f}")


def _heading(quantity: str, n: int, *, binary: bool) -> str:
    if binary:
        return f"{quantity} pass@{n}"
    return f"{quantity} mean" if n == 1 else f"{quantity} bon:{n}"


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _result(model: Model, found: ReportData) -> Iterator[Section]:
    """Table of one run: each reward before and after training, of one sample and under best-of-N for evaluation.ns."""
    config = found.settings[model.settings].config
    known: dict[str, EvaluationSamples] = {}
    if model.reference in found.references:
        known["before"] = found.references[model.reference]
    if model.sampled is not None:
        known["after"] = model.sampled
    if not known:
        return
    most = min(sampled.lengths.shape[1] for sampled in known.values())
    ns = sorted({1, *(n for n in _ns(config) if n <= most)})
    binary = binary_rewards(known)
    recorded = evaluation_summary.recorded_for(config)
    some = next(iter(known.values()))
    compared = changes(known["before"], known["after"], ns) if len(known) == 2 else []
    numbers = [[change.before, change.after] for change in compared] or [[row] for row in summarize(some, ns)]
    rows = []
    for i, of_row in enumerate(numbers):
        first = of_row[0]
        row = [
            Cell(first.reward, some.objectives.get(first.reward, "")),
            Cell(first.heading(binary=first.reward in binary)),
        ]
        for x in of_row:
            shown = number_lines(x.value, x.low, x.high)[0]
            row.append(page.number(x.value, shown, format_interval(x).removeprefix(shown).strip()))
        if compared:
            row.append(page.number(compared[i].value, format_change(compared[i]), compared[i].interval))
        if recorded is not None and first.n in recorded.values:
            value, low, high = recorded.values[first.n]
            row.append(page.number(value, f"{value:.4f}", f"[{low:.4f}, {high:.4f}]"))
        elif recorded is not None:
            row.append(page.number(math.nan, "-"))
        rows.append(row)
    heads = ["reward", "procedure", *known]
    about = "In brackets: 95% intervals over prompts, and over seeds if there are several."
    if compared:
        heads.append("change")
    if recorded is not None:
        heads.append(recorded.label)
        about += f" {recorded.label}: {recorded.about}."
    yield Section("Result", "table.html", Table(heads, rows, "wraps"), about)


def _ns(config: Mapping[str, Any]) -> list[int]:
    """Values of evaluation.ns of a configuration that was read from a file."""
    given = evaluation_summary.value_of(config, "evaluation.ns")
    if not isinstance(given, list | tuple):
        return [1, 4]
    return [n for n in given if isinstance(n, int) and n > 0]


def _estimate(estimate: Estimate | None, beside: Estimate, form: str, scale: float = 1, unit: str = "") -> Cell:
    """Cell with a number, its interval, and what it is over unless ``beside`` says so; empty if there is none."""
    if estimate is None or math.isnan(estimate.value):
        return page.number(math.nan, "")
    under = []
    if not math.isnan(estimate.low):
        under.append(f"[{form.format(scale * estimate.low)}, {form.format(scale * estimate.high)}]")
    if estimate.coverage != beside.coverage:
        under.append(", ".join(estimate.coverage.lines))
    return page.number(estimate.value, form.format(scale * estimate.value) + unit, " ".join(under))
