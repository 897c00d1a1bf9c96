"""Pictures of a run: ``report.html`` with length histogram and curves, and several runs laid over each other.

Everything is made from the files that a run leaves in its folder, so a report can be made again at any time, also of a
run that was killed: what is missing is said in the report and the rest is shown.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo import evaluation, metrics
from nlgrpo.evaluation import (
    Row,
    Sampled,
    bootstrap,
    format_change,
    format_interval,
    read_evaluation,
    summarize,
    weighted_best_of_n,
)

CONFIGS = ("config.json", "config.toml")
DPI = 150
# Okabe and Ito's palette: told apart by colour-blind readers, and on white as on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
GREY = "#8a929c"
TARGET = re.compile(r"\blength\([^)]*?\btarget\s*=\s*([0-9.]+)")
NS = (1, 2, 4, 8, 16)


# --- one run ------------------------------------------------------------------------------------------------------


def write_report(run: Path) -> Path:
    """Make ``report.html`` (self-contained), ``lengths.png`` and ``curves.png`` in a run folder; returns the page.

    Reads ``config.json`` or ``config.toml``, ``metrics.jsonl`` and ``evaluation.json``; a part whose file is missing or
    damaged is left out and named in the page. Raises ValueError for a folder that has none of them.
    """
    run = Path(run)
    _check_run(run)
    missing: list[str] = []
    config = _read_config(run, missing)
    logged = metrics.read_jsonl(run / metrics.FILE)
    if not logged:
        missing.append(f"{metrics.FILE} has no steps yet, so there are no curves.")
    sampled = _read_sampled(run, missing)
    pictures = []
    if sampled:
        targets = length_targets(config)
        pictures.append(_picture(run / "lengths.png", "Completion lengths", partial(lengths_figure, sampled, targets)))
    if logged:
        pictures.append(_picture(run / "curves.png", "Training curves", partial(curves_figure, logged)))
    parts = [_missing(missing), _results(sampled), *pictures, _samples(sampled), _settings(config)]
    metrics.atomic_write(run / "report.html", _page(run.resolve().name, len(logged), sampled, parts))
    return run / "report.html"


def _check_run(run: Path) -> None:
    files = (*CONFIGS, metrics.FILE, evaluation.FILE)
    if not any((run / name).is_file() for name in files):
        what = "has none of " + ", ".join(files) if run.is_dir() else "is not a folder"
        raise ValueError(f"{run} {what}; give the folder that `nlgrpo train` wrote, such as runs/default")


def _read_config(run: Path, missing: list[str]) -> dict[str, Any]:
    for name, load in zip(CONFIGS, (json.loads, tomllib.loads), strict=True):
        if (run / name).is_file():
            try:
                return load((run / name).read_text("utf-8"))
            except ValueError as error:
                missing.append(f"{name} cannot be read ({error}).")
                return {}
    missing.append(f"{' or '.join(CONFIGS)} is missing, so the settings are not shown.")
    return {}


def _read_sampled(run: Path, missing: list[str]) -> dict[str, Sampled]:
    try:
        sampled = read_evaluation(run)
    except ValueError as error:
        missing.append(f"{error}.")
        return {}
    missing += [
        f"The model {when} training is not evaluated yet." for when in ("before", "after") if when not in sampled
    ]
    return sampled


def length_targets(config: Any) -> list[float]:
    """Targets of every ``length(target=..)`` reward that is named anywhere in a config, ascending."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list):
        return sorted({target for item in config for target in length_targets(item)})
    return [float(t) for t in TARGET.findall(config)] if isinstance(config, str) else []


# --- figures ------------------------------------------------------------------------------------------------------


def lengths_figure(sampled: Mapping[str, Sampled], targets: Sequence[float], *, narrow: bool = False) -> Figure:
    """Length histograms of the reference and of the trained model, with the targets of length rewards."""
    figure = Figure(figsize=(4.2, 3.6) if narrow else (7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    some = next(iter(sampled.values()))
    edges = _edges(some.max_length)
    if "before" in sampled:
        _histogram(axes, sampled["before"], edges, GREY, "reference", alpha=0.35)
    if "after" in sampled:
        _histogram(
            axes, sampled["after"], edges, COLOURS[0], f"trained: {objective_label(sampled['after'])}", alpha=0.3
        )
    _length_axes(axes, some.max_length, targets)
    axes.set_title("How long the completions are")
    return figure


def curves_figure(logged: Sequence[Mapping[str, Any]], *, narrow: bool = False) -> Figure:
    """Reward means, objective values, KL and completion length over the steps of a run."""
    figure = Figure(figsize=(4.2, 10.0) if narrow else (9.6, 6.0), layout="constrained")
    panels = figure.subplots(4 if narrow else 2, 1 if narrow else 2, sharex=True, squeeze=False)
    names = sorted({name for entry in logged for name in entry})
    rewards = {n: n.removeprefix("rewards/").removesuffix("/mean") for n in names if re.match(r"rewards/.+/mean$", n)}
    objectives = {n: n.removeprefix("objective/") for n in names if n.startswith("objective/")}
    colours = dict(zip(rewards.values(), COLOURS * len(rewards), strict=False))  # a reward has one colour in all panels
    wanted = (
        ("Mean reward", "reward", rewards),
        ("Objective (estimate of the batch)", "objective value", objectives),
        ("Distance from the reference", "KL (nats per token)", {"kl": "KL"}),
        ("Completion length", "mean length (tokens)", {"completions/mean_length": "mean length"}),
    )
    for axes, (title, ylabel, series) in zip(panels.flat, wanted, strict=True):
        axes.set_title(title)
        axes.set_ylabel(ylabel)
        drawn = [_curve(axes, logged, name, label, colours.get(label, GREY)) for name, label in series.items()]
        if not any(drawn):
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=GREY)
        elif len(series) > 1:
            axes.legend()
    for axes in panels[-1]:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _curve(axes: Axes, logged: Sequence[Mapping[str, Any]], name: str, label: str, colour: str) -> bool:
    """Draw one metric, faint as logged and strong as a moving average; false where it was never logged."""
    points = [(entry["step"], entry[name]) for entry in logged if isinstance(entry.get(name), int | float)]
    if not points:
        return False
    steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    width = max(1, len(points) // 20)
    if width == 1:
        axes.plot(steps, values, color=colour, label=label, marker="o" if len(points) < 8 else None, markersize=4)
        return True
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    # Divided by how many points each window holds, so that the ends are averages too.
    smooth, count = (np.convolve(x, np.ones(width), mode="same") for x in (values, np.ones_like(values)))
    axes.plot(steps, smooth / count, color=colour, label=label)
    return True


def _edges(max_length: int) -> np.ndarray:
    """Edges of about 40 bins of 1 to ``max_length`` tokens, halfway between whole lengths; the last may be narrower."""
    width = max(1, math.ceil(max_length / 40))
    return np.append(np.arange(0.5, max_length, width), max_length + 0.5)


def _histogram(axes: Axes, sampled: Sampled, edges: np.ndarray, colour: str, label: str, *, alpha: float) -> None:
    lengths = (
        sampled.lengths.flatten().clamp(1, sampled.max_length).numpy()
    )  # an empty completion goes to the first bin
    percent = 100 * np.histogram(lengths, bins=edges, density=True)[0]
    axes.stairs(percent, edges, fill=True, color=colour, alpha=alpha, linewidth=0)
    axes.stairs(percent, edges, color=colour, linewidth=1.6, label=label)


def _length_axes(axes: Axes, max_length: int, targets: Sequence[float]) -> None:
    for i, target in enumerate(targets):
        label = None if i else "length targets"
        axes.axvline(target, color=mpl.rcParams["text.color"], linestyle="--", linewidth=1, label=label)
    axes.set_xlim(0, max_length + 0.5)
    axes.set_xlabel("completion length (tokens)")
    axes.set_ylabel("completions (% per token of length)")
    axes.legend()


def objective_label(sampled: Sampled) -> str:
    """How a legend names a run: its objective, ``"bon:4"``, ``"mean (GRPO)"``, or each reward's own."""
    objectives = sampled.objectives
    if len(set(objectives.values())) > 1:
        return ", ".join(f"{name} {objective}" for name, objective in objectives.items())
    objective = next(iter(objectives.values()))
    return "mean (GRPO)" if objective == "mean" else objective


def _theme(dark: bool) -> Any:
    ink, paper, line = ("#e6edf3", "#161b22", "#30363d") if dark else ("#1f2328", "#ffffff", "#d8dee4")
    texts = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    return dict.fromkeys(texts, ink) | {
        "figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper,
        "axes.edgecolor": line, "xtick.color": line, "ytick.color": line, "grid.color": line,
        "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.7,
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "legend.fontsize": 9, "legend.framealpha": 0.9, "legend.edgecolor": "none",
        "font.size": 10, "lines.linewidth": 1.8,
    }  # fmt: skip


def _png(draw: Callable[[], Figure], *, dark: bool = False) -> bytes:
    buffer = io.BytesIO()
    with mpl.rc_context(_theme(dark)):
        draw().savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


# --- the page -----------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #fff; --line: #d8dee4; --card: #f6f8fa;
  --note: #9a6700 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #161b22; --line: #30363d; --card: #1f252d; --note: #d29922 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
.soft { color: var(--soft); margin: .2rem 0 }
.note { border-left: 4px solid var(--note); padding: .2rem .8rem; margin: 1rem 0 }
.note p { margin: .3rem 0 } .scroll { overflow-x: auto } img { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 } td.n, th.n { text-align: right }
.sample { background: var(--card); border-radius: 8px; padding: .6rem .8rem; margin: .6rem 0; overflow-wrap: anywhere }
.sample p { margin: .2rem 0; white-space: pre-wrap } summary { cursor: pointer; padding: .2rem 0 }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1rem }
.under { color: var(--soft) }
@media (max-width: 600px) { .under { display: block }
  th, td { padding: .3rem .2rem; font-size: .78rem; white-space: normal } }
pre { background: var(--card); border-radius: 8px; padding: .8rem; overflow-x: auto; font-size: .85rem }
"""


def _page(name: str, steps: int, sampled: Mapping[str, Sampled], parts: Sequence[str]) -> str:
    facts = [f"{steps} steps logged"]
    for last in list(sampled.values())[-1:]:
        facts.append("evaluated on {} prompts x {} samples".format(*last.lengths.shape))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{html.escape(name)} · nlgrpo</title><style>{STYLE}</style></head><body>
<h1>{html.escape(name)}</h1><p class="soft">{"; ".join(facts)}</p>
{"".join(parts)}
</body></html>
"""


def _missing(missing: Sequence[str]) -> str:
    return f'<div class="note">{"".join(f"<p>{html.escape(line)}</p>" for line in missing)}</div>' if missing else ""


def _results(sampled: Mapping[str, Sampled]) -> str:
    """Table of every reward's mean and best-of-4 (fewer where there are fewer samples), with 95% intervals."""
    if not sampled:
        return ""
    n = min(s.lengths.shape[1] for s in sampled.values())
    summaries = {when: summarize(s, sorted({1, min(4, n)})) for when, s in sampled.items()}
    some = next(iter(sampled.values()))
    rows = []
    for columns in zip(*summaries.values(), strict=True):
        name = columns[0].reward
        cells = [f"<td>{_stacked(name, some.objectives.get(name, ''))}", f"<td>{columns[0].procedure}"]
        cells += [f'<td class="n">{_stacked(*format_interval(row, gap="|").split("|"))}' for row in columns]
        if len(columns) == 2:
            cells.append(f'<td class="n">{format_change(*columns)}')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = [*summaries, *(["change"] if len(summaries) == 2 else [])]
    head = "<th>reward<th>procedure" + "".join(f'<th class="n">{text}' for text in heads)
    return (
        f'<h2>Result</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        '<p class="soft">In brackets: 95% intervals, bootstrap over prompts.</p>'
    )


def _stacked(first: str, second: str = "") -> str:
    """Two texts side by side, one under the other on a narrow screen."""
    return f'{html.escape(first)} <span class="under">{html.escape(second)}</span>'


def _picture(path: Path, title: str, draw: Callable[..., Figure]) -> str:
    """Save the light, wide picture at ``path`` and embed it with its variants for dark mode and for a narrow screen."""
    light = _png(draw)
    path.write_bytes(light)
    sources = "".join(
        f'<source media="{query}" srcset="{_data_url(_png(partial(draw, narrow=narrow), dark=dark))}">'
        for query, narrow, dark in (
            ("(max-width: 600px) and (prefers-color-scheme: dark)", True, True),
            ("(max-width: 600px)", True, False),
            ("(prefers-color-scheme: dark)", False, True),
        )
    )
    return f'<h2>{title}</h2><picture>{sources}<img alt="{title}" src="{_data_url(light)}"></picture>'


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _samples(sampled: Mapping[str, Sampled]) -> str:
    """The completions that were kept, reference and trained model side by side, with lengths and rewards."""
    shown = {when: s for when, s in sampled.items() if s.prompts and s.completions}
    if not shown:
        return ""
    page = "<h2>Samples</h2>"
    for i, prompt in enumerate(next(iter(shown.values())).prompts):
        columns = "".join(_column(when, s, i) for when, s in shown.items() if i < len(s.completions))
        page += f"<details{'' if i else ' open'}><summary>{html.escape(prompt)}</summary>"
        page += f'<div class="pair">{columns}</div></details>'
    return page


def _column(when: str, sampled: Sampled, prompt: int) -> str:
    page = f'<div><p class="soft">{html.escape(when)} training</p>'
    for j, completion in enumerate(sampled.completions[prompt][:4]):
        scores = [f"{sampled.lengths[prompt, j]} tokens"]
        scores += [f"{name} {values[prompt, j]:.3f}" for name, values in sampled.rewards.items()]
        page += f'<div class="sample"><p>{html.escape(completion)}</p>'
        page += f'<p class="soft">{html.escape(" · ".join(scores))}</p></div>'
    return page + "</div>"


def _settings(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    return f"<h2>Settings</h2><details><summary>config</summary><pre>{html.escape(text)}</pre></details>"


# --- several runs -------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Lay runs over each other in one picture and print their values; returns the file written (PNG, PDF or SVG).

    Left, length histograms of the reference (of the first run) and of each trained model (IAMA, Fig. 3a); right, the
    weighted sum of best-of-N rewards against N with 95% intervals. ``out`` may be a folder, for ``compare.png`` in it.

    Raises ValueError for a folder that is no run or has no finished evaluation, and where rewards or weights differ.
    """
    out = Path(out) / "compare.png" if Path(out).is_dir() or not Path(out).suffix else Path(out)
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"cannot draw into {out}: the name must end in .png, .pdf or .svg")
    if not runs:
        raise ValueError("no run to compare; give one or more folders that `nlgrpo train` wrote")
    evaluated = {Path(run): _evaluated(Path(run)) for run in runs}
    models = _comparable(evaluated)
    targets = sorted({t for run in evaluated for t in length_targets(_read_config(run, []))})
    n = min(s.lengths.shape[1] for s in models.values())
    ns = [best_of for best_of in NS if best_of <= n]
    values = {label: bootstrap(weighted_best_of_n(s, ns)) for label, s in models.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_theme(dark=False)):
        _compare_figure(models, values, ns, targets).savefig(out, dpi=DPI)
    Console().print(_compare_table(values, ns))
    return out


def _evaluated(run: Path) -> dict[str, Sampled]:
    _check_run(run)
    sampled = read_evaluation(run)
    if set(sampled) < {"before", "after"}:
        raise ValueError(
            f"{run} is evaluated only {', '.join(sampled) or 'never'}; finish it with `nlgrpo train --resume`"
        )
    return sampled


def _comparable(evaluated: Mapping[Path, Mapping[str, Sampled]]) -> dict[str, Sampled]:
    """Models by the label of the legend, the reference first; runs of the same objective are told apart by folder."""
    first_run, first = next(iter(evaluated.items()))
    models = {"reference": first["before"]}
    labels = [objective_label(sampled["after"]) for sampled in evaluated.values()]
    for (run, sampled), label in zip(evaluated.items(), labels, strict=True):
        after = sampled["after"]
        if after.weights != first["after"].weights:
            raise ValueError(
                f"{run} has rewards {after.weights}, {first_run} has {first['after'].weights}; "
                "only runs with the same rewards and weights can be compared"
            )
        models[label if labels.count(label) == 1 else f"{label} · {run.resolve().name}"] = after
    return models


def _compare_figure(
    models: Mapping[str, Sampled], values: Mapping[str, Sequence[Any]], ns: Sequence[int], targets: Sequence[float]
) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1], gridspec_kw={"wspace": 0.06})
    max_length = max(s.max_length for s in models.values())
    for i, (label, sampled) in enumerate(models.items()):
        colour, marker = (COLOURS[(i - 1) % 6], MARKERS[(i - 1) % 6]) if i else (GREY, "x")
        _histogram(left, sampled, _edges(max_length), colour, label, alpha=0.15 if i else 0.3)
        mean, low, high = (x.numpy() for x in values[label])
        right.fill_between(ns, low, high, color=colour, alpha=0.2, linewidth=0)
        right.plot(ns, mean, color=colour, marker=marker, markersize=5, label=label)
    _length_axes(left, max_length, targets)
    left.set_title("How long the completions are")
    right.set_xscale("log", base=2)
    right.set_xticks(ns, [str(best_of) for best_of in ns])
    right.minorticks_off()
    right.set_xlabel("N (samples to choose from)")
    right.set_ylabel("best-of-N reward, weighted sum")
    right.set_title("What they are worth under best-of-N")
    right.legend()
    return figure


def _compare_table(values: Mapping[str, Sequence[Any]], ns: Sequence[int]) -> Table:
    table = Table(title="weighted sum of best-of-N rewards, 95% intervals", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("N", justify="right")
    for label in values:
        table.add_column(Text(label))
    for i, best_of in enumerate(ns):
        rows = [Row(label, "", *(x[i].item() for x in columns)) for label, columns in values.items()]
        table.add_row(str(best_of), *(Text(format_interval(row, "\n")) for row in rows))
    return table
