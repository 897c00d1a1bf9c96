"""The curves of logged metrics that the page draws itself, so that they can be zoomed, as plain data for its script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nlgrpo.apps.report.figures import Style, style_of
from nlgrpo.apps.report.logged import Panel, Series, evenly, extremes, moving_average

POINTS = 1000  # most points of a curve
POINTS_IN_ALL = 12_000  # most points of all curves in a panel, to keep a page of many runs small
DIGITS = 6


def charts(panels: Sequence[Panel], looks: Mapping[str, Style], rewards: Sequence[str]) -> dict[str, Any]:
    """Return the charts of a page: titles, steps ``x`` and curves, with None where a curve has no value at a step.

    ``looks``: the style of each run, if there are several; the charts then have one legend.
    One or two curves in a panel have their values and a moving average, more have the average only. A curve of more
    than `POINTS` steps keeps the largest and the smallest value of each segment.
    """
    legend = [{"label": label, "colour": style.colour} for label, style in looks.items()]
    return {"legend": legend, "panels": [_chart(panel, looks, rewards) for panel in panels]}


def _chart(panel: Panel, looks: Mapping[str, Style], rewards: Sequence[str]) -> dict[str, Any]:
    runs = {series.run for series in panel.series}
    with_values = len(runs) <= 2
    most = min(POINTS, max(60, POINTS_IN_ALL // len(panel.series)))
    curves = [_curve(series, most, with_values=with_values) for series in panel.series]
    steps = np.unique(np.concatenate([kept for kept, _, _ in curves]))
    shown: list[dict[str, Any]] = []
    for place, (series, (kept, values, average)) in enumerate(zip(panel.series, curves, strict=True)):
        style = style_of(series, place, looks, rewards)
        shown.append(
            {
                "label": series.label,
                "colour": style.colour,
                "dash": [2 * length for length in style.dash],
                "values": _at(steps, kept, values),
                "average": None if average is None else _at(steps, kept, average),
            }
        )
        ends = series.interval()
        if ends is not None and with_values and average is None and len(ends[0]) == len(kept):
            shown[-1] |= {"low": _at(steps, kept, ends[0]), "high": _at(steps, kept, ends[1])}
    return {
        "title": panel.title,
        "ylabel": panel.ylabel,
        "important": panel.important,
        "x": steps.tolist(),
        "series": shown,
    }


def _curve(series: Series, most: int, *, with_values: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the steps of a curve, its values there, and their moving average if both are shown."""
    steps, values = series.points()
    average = moving_average(values)
    if not with_values or average is values:
        some = evenly(len(steps), most)
        return steps[some], average[some], None
    some = extremes(values, most)
    return steps[some], values[some], average[some]


def _at(steps: np.ndarray, kept: np.ndarray, values: np.ndarray) -> list[float | None]:
    """Return the value at each of ``steps``, None where there is none."""
    by_step = dict(zip(kept.tolist(), values.tolist(), strict=True))
    shown: list[float | None] = []
    for step in steps.tolist():
        value = by_step.get(step)
        shown.append(None if value is None or math.isnan(value) else float(f"{value:.{DIGITS}g}"))
    return shown
