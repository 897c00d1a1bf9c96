"""Matplotlib figures of one or several runs: completion lengths, rewards and training curves."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from nlgrpo.apps.report.logged import Panel, Series, evenly, extremes, moving_average
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, left_out

DPI = 150
# Okabe and Ito's palette: distinguishable for colour-blind readers, on white and on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A08000")
MARKERS = "osD^vPh"
DASHES = ((), (5, 2), (1, 1.5), (6, 2, 1, 2))
GREY = "#8a929c"
OVERLAID = 3  # trained models whose histograms overlap the reference's; more models get one row each
NAMED = 8  # with more models than this there is no legend: the page has a table of the models
NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")  # characters that a name may contain, but not an SVG file
POINTS = 400  # most points of a curve
POINTS_IN_ALL = 6000  # most points of all curves in a panel, to keep a page of many runs small


@dataclass(frozen=True)
class Style:
    """Colour, marker and dashes of a model in all pictures."""

    colour: str = GREY
    marker: str = "x"
    dash: tuple[float, ...] = ()

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": (0, self.dash) if self.dash else "-"}


def series_style(place: int, again: int = 0) -> Style:
    """Style of the model with index ``place``. Evaluation ``again`` of the same model keeps its colour."""
    turn = place // len(COLOURS) + again
    colour = COLOURS[place % len(COLOURS)]
    marker = MARKERS[(place + turn) % len(MARKERS)]
    return Style(colour, marker, DASHES[turn % len(DASHES)])


# --- histograms -------------------------------------------------------------------------------------------------------


def lengths(
    sampled: Mapping[str, EvaluationSamples],
    looks: Mapping[str, Style],
    targets: Sequence[float],
    *,
    narrow: bool = False,
) -> Figure:
    """Draw length histograms of references and trained models, with the targets of length rewards."""
    longest = max(one.max_length for one in sampled.values())
    values = {label: one.lengths.flatten().clamp(1, longest).numpy() for label, one in sampled.items()}  # 0 counts as 1
    figure, (axes,) = _histogram_panels(1, len(values), narrow)
    _distribution(axes, values, looks, length_edges(longest), per_token=True)
    length_axes(axes, longest, targets, legend=len(values) <= 2)
    if len(values) > OVERLAID + 1:
        axes.set_ylabel("")
    elif len(values) > 2:
        legend(figure, [axes])
    axes.set_title("Completion length")
    return figure


def rewards(sampled: Mapping[str, EvaluationSamples], looks: Mapping[str, Style], *, narrow: bool = False) -> Figure:
    """Draw a histogram of each reward (at most six) of references and trained models."""
    names = list(dict.fromkeys(name for one in sampled.values() for name in one.rewards))[:6]
    figure, panels = _histogram_panels(len(names), len(sampled), narrow)
    for axes, name in zip(panels, names, strict=True):
        values = {}
        missing = 0
        for label, one in sampled.items():
            if name in one.rewards:
                known = one.rewards[name][~one.rewards[name].isnan()]
                values[label] = np.asarray(known.double())
                missing += one.rewards[name].numel() - known.numel()
        _distribution(axes, values, looks, _reward_edges(np.concatenate(list(values.values()))), per_token=False)
        title = name
        if missing:
            title += f"\n{missing} completions without this reward"
        axes.set_title(title)
        axes.set_xlabel("reward")
        if len(values) <= OVERLAID + 1:
            axes.set_ylabel("completions (%)")
    legend(figure, panels)
    return figure


def _histogram_panels(count: int, models: int, narrow: bool) -> tuple[Figure, list[Axes]]:
    """Create a figure for ``count`` histograms of so many models each."""
    columns = 1 if narrow or count == 1 else 2
    height = 3.9 if models <= OVERLAID + 1 else 1.1 + 0.24 * models
    if narrow:
        width = 4.2
    else:
        width = 9.6 if columns == 2 else 7.2
    return panels_of(count, columns, width, height * math.ceil(count / columns))


def _reward_edges(values: np.ndarray) -> np.ndarray:
    """Bin edges: one bin per value for up to 12 distinct values, such as a 0/1 reward, else 40 equal bins."""
    different = np.unique(values)
    if len(different) < 2:
        middle = different[0] if len(different) else 0.0
        return np.array([middle - 0.5, middle + 0.5])
    if len(different) > 12:
        return np.linspace(different[0], different[-1], 41)
    between = (different[1:] + different[:-1]) / 2
    first = 2 * different[0] - between[0]
    last = 2 * different[-1] - between[-1]
    return np.concatenate(([first], between, [last]))


def _distribution(
    axes: Axes, values: Mapping[str, np.ndarray], looks: Mapping[str, Style], edges: np.ndarray, *, per_token: bool
) -> None:
    """Draw overlapping histograms, or for many models one row each, darker where there are more completions."""
    heights = {}
    for label, x in values.items():
        percent = np.histogram(x, bins=edges)[0] * (100 / max(1, len(x)))
        heights[label] = percent / np.diff(edges) if per_token else percent
    if len(values) > OVERLAID + 1:
        _rows(axes, heights, looks, edges)
        return
    for label, percent in heights.items():
        look = looks[label]
        alpha = 0.35 if look == Style() else 0.25
        axes.stairs(percent, edges, fill=True, color=look.colour, alpha=alpha, linewidth=0)
        axes.stairs(percent, edges, color=look.colour, linewidth=1.6, linestyle=look.line["linestyle"], label=label)


def _rows(axes: Axes, heights: Mapping[str, np.ndarray], looks: Mapping[str, Style], edges: np.ndarray) -> None:
    most = max(float(h.max()) for h in heights.values()) or 1.0
    for i, (label, percent) in enumerate(heights.items()):
        colours = np.array([[to_rgba(looks[label].colour)] * len(percent)])
        colours[..., 3] = np.sqrt(percent / most)  # transparent, to fit a white and a black page
        axes.pcolormesh(edges, [i - 0.45, i + 0.45], colours, rasterized=True)
    axes.set_ylim(len(heights) - 0.4, -0.6)
    axes.set_xlim(edges[0], edges[-1])
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(heights)), [shortened(label) for label in heights], fontsize=8)


def length_edges(max_length: int) -> np.ndarray:
    """Edges of about 40 bins of 1 to ``max_length`` tokens, between the integers; the last may be narrower."""
    width = max(1, math.ceil(max_length / 40))
    return np.append(np.arange(0.5, max_length, width), max_length + 0.5)


def length_axes(axes: Axes, max_length: int, targets: Sequence[float], *, legend: bool = True) -> None:
    """Label the axes of a length histogram, and draw the targets as lines."""
    for i, target in enumerate(targets):
        label = None if i else "length targets"
        axes.axvline(target, color=mpl.rcParams["text.color"], linestyle="--", linewidth=1, label=label)
    axes.set_xlim(0, max_length + 0.5)
    axes.set_xlabel("completion length (tokens)")
    axes.set_ylabel("completions (% per token)")
    if legend:
        axes.legend()


# --- parts of a figure ------------------------------------------------------------------------------------------------


def shortened(label: str, most: int = 24) -> str:
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-most // 2 + 1 :]}"


def figure_of(size: tuple[float, float]) -> Figure:
    """Create an empty figure of ``size`` in inches, with space between its panels."""
    return Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.06))


def panels_of(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Create a figure of ``count`` panels; places of the grid without one are empty."""
    figure = figure_of((width, height))
    panels = list(figure.subplots(math.ceil(count / columns), columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def legend(figure: Figure, panels: Sequence[Axes], order: Sequence[str] = ()) -> None:
    """Draw one legend under all panels; labels in ``order`` come first."""
    named: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    if 1 < len(named) <= NAMED + 3:
        named = {label: named[label] for label in dict.fromkeys([*order, *named]) if label in named}
        labels = [shortened(label, 34) for label in named]
        inches = 0.5 + 0.085 * max(len(label) for label in labels)  # of an entry
        columns = max(1, min(round(figure.get_figwidth() / 2.4), int(figure.get_figwidth() / inches)))
        figure.legend(named.values(), labels, loc="outside lower center", ncols=columns)


# --- curves -----------------------------------------------------------------------------------------------------------


def style_of(series: Series, place: int, looks: Mapping[str, Style], rewards: Sequence[str]) -> Style:
    """Return the style of a curve: of its run if that has one, else of its reward, else of its place in the panel."""
    if series.run in looks:
        return looks[series.run]
    name = series.label.partition(": ")[0]
    number = rewards.index(name) if name in rewards else place
    return Style(COLOURS[number % len(COLOURS)])


def curves(panels: Sequence[Panel], looks: Mapping[str, Style], rewards: Sequence[str] = ()) -> Figure:
    """Draw the logged metrics over the steps, one panel per quantity. ``rewards``: their names, in order."""
    lines = math.ceil(len(panels) / 2)
    figure = figure_of((9.6, 3.0 * lines))
    places = list(figure.subplots(lines, 2, sharex=True, squeeze=False).flat)
    runs = {series.run for panel in panels for series in panel.series}
    most = min(POINTS, max(60, POINTS_IN_ALL // len(runs))) // 2
    for axes, panel in zip(places, panels, strict=False):
        axes.set_title(shortened(panel.title, 48))
        axes.set_ylabel(panel.ylabel)
        for place, series in enumerate(panel.series):
            _curve(axes, series, style_of(series, place, looks, rewards), most=most, faint=len(runs) <= 2)
        if len(panel.series) > 1 and len(runs) == 1:
            axes.legend()
    for axes in places[: len(panels)][-2:]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)  # also for a panel above an empty one
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    if 1 < len(runs) <= NAMED:
        legend(figure, places[: len(panels)], list(looks))
    return figure


def _curve(axes: Axes, series: Series, style: Style, *, most: int, faint: bool) -> None:
    """Draw the moving average at ``most`` points and, if ``faint``, the values behind it."""
    steps, values = series.points()
    average = moving_average(values)
    if average is values:
        marker = "o" if len(values) < 8 else None
        axes.plot(steps, values, **style.line, label=series.label, marker=marker, markersize=4)
        return
    if faint:
        some = extremes(values, POINTS)
        axes.plot(steps[some], values[some], color=style.colour, alpha=0.25, linewidth=0.8)
    some = evenly(len(steps), most)
    axes.plot(steps[some], average[some], **style.line, label=series.label)


# --- the picture of `nlgrpo compare` ----------------------------------------------------------------------------------


def comparison(
    models: Mapping[str, EvaluationSamples],
    values: Mapping[str, Sequence[Any]],
    ns: Sequence[int],
    targets: Sequence[float],
) -> Figure:
    """Draw length histograms (left) and the best-of-N rewards ``values`` over N, with intervals (right).

    With more than three trained models, each has its own panel, with the reference behind it.
    """
    strips = max(1, len(models) - 1) if len(models) > 4 else 1
    figure = Figure(figsize=(11, max(4.2, 0.95 * strips + 0.6)), layout="constrained")
    grid = figure.add_gridspec(strips, 2, width_ratios=[1.35, 1], wspace=0.06)
    _lengths_of_models(figure, [grid[i, 0] for i in range(strips)], models, targets)
    right = figure.add_subplot(grid[:, 1])
    values_over_n(right, values, ns)
    right.set_ylabel("weighted sum of best-of-N rewards")
    right.set_title("Value of best-of-N" + left_out(row.coverage for rows in values.values() for row in rows))
    return figure


def values_over_n(axes: Axes, values: Mapping[str, Sequence[Any]], ns: Sequence[int]) -> None:
    """Draw the rows of each model, the reference first, over N, with intervals."""
    for i, (label, rows) in enumerate(values.items()):
        mean, low, high = np.array([[row.value, row.low, row.high] for row in rows]).T
        axes.fill_between(ns, low, high, color=_colour(i), alpha=0.2, linewidth=0)
        marker = MARKERS[(i - 1) % len(MARKERS)] if i else "x"
        axes.plot(ns, mean, color=_colour(i), marker=marker, markersize=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ns, [str(best_of) for best_of in ns])
    axes.minorticks_off()
    axes.set_xlabel("N (number of samples)")
    axes.legend()


def _lengths_of_models(
    figure: Figure, places: Sequence[Any], models: Mapping[str, EvaluationSamples], targets: Sequence[float]
) -> None:
    max_length = max(sampled.max_length for sampled in models.values())
    edges = length_edges(max_length)
    labels = list(models)
    panels = [figure.add_subplot(place) for place in places]
    for i, (label, sampled) in enumerate(models.items()):
        counted = sampled.lengths.flatten().clamp(1, sampled.max_length).numpy()  # length 0 counts as 1
        percent = 100 * np.histogram(counted, bins=edges, density=True)[0]
        alpha = 0.15 if i else 0.3
        for axes in [panels[(i - 1) % len(panels)]] if i else panels:
            axes.stairs(percent, edges, fill=True, color=_colour(i), alpha=alpha, linewidth=0)
            axes.stairs(percent, edges, color=_colour(i), linewidth=1.6, label=label)
    for i, axes in enumerate(panels):
        length_axes(axes, max_length, targets, legend=len(panels) == 1)
        if len(panels) > 1:
            axes.set_ylabel("")
            axes.text(0.99, 0.9, labels[i + 1], transform=axes.transAxes, ha="right", va="top", color=_colour(i + 1))
            if axes is not panels[-1]:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
    title = "Completion length"
    if len(panels) > 1:
        title += " (% per token; grey: reference)"
    panels[0].set_title(title)


def _colour(model: int) -> str:
    """Return the colour of the reference (0) or of a trained model."""
    return COLOURS[(model - 1) % len(COLOURS)] if model else GREY


# --- files ------------------------------------------------------------------------------------------------------------

# ink, paper, line; those of templates/report.css
LIGHT = ("#1f2328", "#ffffff", "#d8dee4")
DARK = ("#e6edf3", "#161b22", "#30363d")


def _theme(dark: bool) -> Any:
    ink, paper, line = DARK if dark else LIGHT
    texts = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    lines = ("axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    return {
        **dict.fromkeys(texts, ink),
        **dict.fromkeys(papers, paper),
        **dict.fromkeys(lines, line),
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.fontsize": 9,
        "legend.framealpha": 0.9,
        "legend.edgecolor": "none",
        "font.size": 10,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "nlgrpo",
        "text.parse_math": False,  # the name of a run or a reward may contain a dollar sign
    }


@dataclass(frozen=True)
class Picture:
    """One figure as PNG, and as SVG for wide and narrow screens."""

    png: bytes
    wide: str
    narrow: str

    def url(self, *, narrow: bool, dark: bool) -> str:
        """Data URL of the SVG. The dark variant differs only in the theme's colours."""
        svg = self.narrow if narrow else self.wide
        if dark:
            for light_colour, dark_colour in zip(LIGHT, DARK, strict=True):
                svg = svg.replace(light_colour, dark_colour)
        return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def picture(draw: Callable[..., Figure]) -> Picture:
    """Render the figures returned by ``draw()`` and ``draw(narrow=True)``."""
    with mpl.rc_context(_theme(False)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # for names in other scripts; the page shows them as text
        figure = draw()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # reuse the layout for PNG and SVG: half of the time
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=DPI)
        return Picture(png.getvalue(), _svg(figure), _svg(draw(narrow=True)))


def render_png(draw: Callable[..., Figure]) -> bytes:
    """Render the figure returned by ``draw()`` in the theme of the page, as a PNG."""
    with mpl.rc_context(_theme(False)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        png = io.BytesIO()
        draw().savefig(png, format="png", dpi=DPI)
        return png.getvalue()


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return NOT_XML.sub("", text.getvalue())


def render(draw: Callable[[], Figure], *, form: str = "png", dark: bool = False, parse_math: bool = False) -> bytes:
    """Render ``draw()`` as "png", "pdf" or "svg" bytes. ``parse_math``: render ``$...$``, as in ticks of log axes."""
    buffer = io.BytesIO()
    with mpl.rc_context(_theme(dark) | {"text.parse_math": parse_math}):
        draw().savefig(buffer, format=form, dpi=DPI)
    return buffer.getvalue()
