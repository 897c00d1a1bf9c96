"""What the pictures show: lengths and curves of a run, several runs laid over each other; drawn with matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nlgrpo.sampled import Sampled

DPI = 150
# Okabe and Ito's palette: told apart by colour-blind readers, and on white as on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A08000")
MARKERS = "osD^vPh"
GREY = "#8a929c"


def lengths(sampled: Mapping[str, Sampled], targets: Sequence[float], *, narrow: bool = False) -> Figure:
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


def curves(logged: Sequence[Mapping[str, Any]], *, narrow: bool = False) -> Figure:
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


def comparison(
    models: Mapping[str, Sampled], values: Mapping[str, Sequence[Any]], ns: Sequence[int], targets: Sequence[float]
) -> Figure:
    """Left, length histograms of all models; right, ``values``, their best-of-N rewards against N, with intervals.

    More than three trained models have a strip each, over the reference.
    """
    strips = max(1, len(models) - 1) if len(models) > 4 else 1
    figure = Figure(figsize=(11, max(4.2, 0.95 * strips + 0.6)), layout="constrained")
    grid = figure.add_gridspec(strips, 2, width_ratios=[1.35, 1], wspace=0.06)
    _lengths_of_models(figure, [grid[i, 0] for i in range(strips)], models, targets)
    right = figure.add_subplot(grid[:, 1])
    for i, label in enumerate(models):
        mean, low, high = (x.numpy() for x in values[label])
        right.fill_between(ns, low, high, color=_colour(i), alpha=0.2, linewidth=0)
        right.plot(
            ns, mean, color=_colour(i), marker=MARKERS[(i - 1) % len(MARKERS)] if i else "x", markersize=5, label=label
        )
    right.set_xscale("log", base=2)
    right.set_xticks(ns, [str(best_of) for best_of in ns])
    right.minorticks_off()
    right.set_xlabel("N (samples to choose from)")
    right.set_ylabel("best-of-N reward, weighted sum")
    right.set_title("What they are worth under best-of-N")
    right.legend()
    return figure


def _lengths_of_models(
    figure: Figure, places: Sequence[Any], models: Mapping[str, Sampled], targets: Sequence[float]
) -> None:
    max_length = max(s.max_length for s in models.values())
    edges, labels = _edges(max_length), list(models)
    panels = [figure.add_subplot(place) for place in places]
    for i, (label, sampled) in enumerate(models.items()):
        for axes in panels if i == 0 else [panels[(i - 1) % len(panels)]]:
            _histogram(axes, sampled, edges, _colour(i), label, alpha=0.15 if i else 0.3)
    for i, axes in enumerate(panels):
        _length_axes(axes, max_length, targets, legend=len(panels) == 1)
        if len(panels) > 1:
            axes.set_ylabel("")
            axes.text(0.99, 0.9, labels[i + 1], transform=axes.transAxes, ha="right", va="top", color=_colour(i + 1))
            if axes is not panels[-1]:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
    panels[0].set_title(
        "How long the completions are" + " (% per token of length; grey: reference)" * (len(panels) > 1)
    )


def _colour(model: int) -> str:
    """Of the reference, 0, and of the trained models."""
    return COLOURS[(model - 1) % len(COLOURS)] if model else GREY


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
    counted = sampled.lengths.flatten().clamp(1, sampled.max_length).numpy()  # an empty one goes to the first bin
    percent = 100 * np.histogram(counted, bins=edges, density=True)[0]
    axes.stairs(percent, edges, fill=True, color=colour, alpha=alpha, linewidth=0)
    axes.stairs(percent, edges, color=colour, linewidth=1.6, label=label)


def _length_axes(axes: Axes, max_length: int, targets: Sequence[float], *, legend: bool = True) -> None:
    for i, target in enumerate(targets):
        label = None if i else "length targets"
        axes.axvline(target, color=mpl.rcParams["text.color"], linestyle="--", linewidth=1, label=label)
    axes.set_xlim(0, max_length + 0.5)
    axes.set_xlabel("completion length (tokens)")
    axes.set_ylabel("completions (% per token of length)")
    if legend:
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


def render(draw: Callable[[], Figure], *, form: str = "png", dark: bool = False) -> bytes:
    """The figure that ``draw`` makes, as a file of this ``form`` ("png", "pdf", "svg"), for a light or a dark page."""
    buffer = io.BytesIO()
    with mpl.rc_context(_theme(dark)):
        draw().savefig(buffer, format=form, dpi=DPI)
    return buffer.getvalue()
