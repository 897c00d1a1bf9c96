"""Figures of evaluation results, with intervals: rewards over N, win rates over KL, and one reward over another.

All figures are drawn from the entries of the report's table, so that figures and table agree.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nlgrpo.apps.report.configurations import Place
from nlgrpo.apps.report.figures import GREY, NAMED, Style, legend, panels_of, shortened
from nlgrpo.engine.rollouts.evaluation_samples import left_out
from nlgrpo.training.evaluation_entries import Entry
from nlgrpo.training.evaluation_summary import Estimate

KLS = ("kl/k1", "kl/k3", "kl/training")  # estimates of the KL, the best first
KIND = re.compile(r"(bon|wor|maj@):?(\d+)(?::unbiased)?")
KINDS = {"bon": "best-of-N", "wor": "worst-of-N", "maj@": "majority of N"}
PANELS = 12


def kind_and_n(procedure: str) -> tuple[str, int]:
    """``"bon:4"`` -> ("bon", 4); also for "wor" and "maj@". "mean" is ("bon", 1), other procedures are ("", 0)."""
    if procedure == "mean":
        return "bon", 1
    found = KIND.fullmatch(procedure)
    if found is None:
        return "", 0
    return found[1], int(found[2])


Points = list[tuple[int, Estimate]]  # (N, value)


class Table:
    """Entries by model, quantity and procedure."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.rows: dict[tuple[str, str], dict[tuple[str, int], Entry]] = {}
        for entry in entries:
            if not math.isnan(entry.estimate.value):
                self.rows.setdefault((entry.model, entry.quantity), {})[kind_and_n(entry.procedure)] = entry
        self.models = list(dict.fromkeys(model for model, _ in self.rows))

    def quantities(self) -> list[str]:
        """Quantities with best-of-N values for several N; "B by choice of A" comes directly after A."""
        first: dict[str, int] = {}  # place of the first row
        for i, ((_, quantity), row) in enumerate(self.rows.items()):
            if len([kind for kind, _ in row if kind == "bon"]) > 1:
                first.setdefault(quantity, i)

        def order(name: str) -> tuple[int, int]:
            chosen_by = name.rpartition(" by choice of ")[2]
            return first.get(chosen_by, first[name]), first[name]

        return sorted(first, key=order)

    def points(self, quantity: str, kind: str) -> dict[str, Points]:
        """Values by N of a procedure, for each model that has several. The mean is the value at N = 1."""
        found: dict[str, Points] = {}
        for model in self.models:
            by_n = {}
            for (its_kind, n), entry in self.rows.get((model, quantity), {}).items():
                is_mean = its_kind == "bon" and n == 1
                if its_kind == kind or is_mean:
                    by_n[n] = entry.estimate
            if len(by_n) > 1:
                found[model] = sorted(by_n.items())
        return found

    def at(self, model: str, quantity: str, n: int) -> Entry | None:
        """Best-of-n entry, or for diversity, which has no best-of-n, its only entry."""
        row = self.rows.get((model, quantity), {})
        if ("bon", n) in row:
            return row["bon", n]
        return row.get(("bon", 1)) if len(row) == 1 else None

    def win_rate(self, model: str, quantity: str, n: int) -> Estimate | None:
        entry = self.at(model, quantity, n)
        return None if entry is None else entry.win_rate

    def distance(self, model: str) -> Estimate | None:
        """The KL of a model to the reference, by the best estimate that there is."""
        for name in KLS:
            for entry in self.rows.get((model, name), {}).values():
                return entry.estimate
        return None

    def chosen_from(self) -> list[int]:
        """[1, N], with the N nearest to 4 that all models have; [1] if they have none in common."""
        several = []
        for row in self.rows.values():
            ns = {n for kind, n in row if kind == "bon"}
            if len(ns) > 1:
                several.append(ns)
        common = set.intersection(*several) - {1} if several else set()
        if not common:
            return [1]
        return [1, min(common, key=lambda n: abs(n - 4))]


# --- rewards over N ---------------------------------------------------------------------------------------------------


def best_of_n(
    table: Table, looks: Mapping[str, Style], *, binary: Collection[str] = (), narrow: bool = False
) -> Figure:
    """Draw each reward over N, with intervals: best-of-N and, if evaluated, worst-of-N and majority.

    ``binary``: rewards of 0 and 1, for which best-of-N is pass@N.
    """
    wanted = [(name, kind) for name in table.quantities() for kind in KINDS if table.points(name, kind)][:PANELS]
    figure, panels = _grid(len(wanted), narrow)
    for axes, (name, kind) in zip(panels, wanted, strict=True):
        every: Points = []
        for model, points in table.points(name, kind).items():
            every += points
            look = looks[model]
            ns = [n for n, _ in points]
            low = [estimate.low for _, estimate in points]
            high = [estimate.high for _, estimate in points]
            values = [estimate.value for _, estimate in points]
            axes.fill_between(ns, low, high, color=look.colour, alpha=0.13, linewidth=0)
            axes.plot(ns, values, **look.line, marker=look.marker, markersize=5, label=model)
        ticks = sorted({n for n, _ in every})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
        missing = left_out(estimate.coverage for _, estimate in every)
        procedure = "pass@N" if kind == "bon" and name in binary else KINDS[kind]
        axes.set_title(f"{shortened(name, 40)}: {procedure}{missing}")
        axes.set_xlabel("N (number of samples)")
        axes.set_ylabel("value")
    legend(figure, panels if len(table.models) <= NAMED + 1 else [], table.models)
    return figure


def _grid(count: int, narrow: bool, columns: int = 2, height: float = 3.3) -> tuple[Figure, list[Axes]]:
    columns = 1 if narrow else min(columns, max(count, 1))
    lines = math.ceil(count / columns)
    if narrow:
        return panels_of(count, columns, 4.2, (height - 0.2) * lines + 0.5)
    width = 9.6 if columns > 1 else 7.2
    return panels_of(count, columns, width, height * lines + 0.4)


# --- win rates over KL ------------------------------------------------------------------------------------------------


def has_win_rates(table: Table) -> bool:
    """Whether some model has both a win rate and a KL."""
    return bool(_won(table))


def _won(table: Table) -> list[tuple[str, int]]:
    """Pairs (reward, N) for which some model has a win rate and a KL: at most three rewards, N = 1 and one more."""
    known = [model for model in table.models if table.distance(model) is not None]

    def has(name: str, n: int) -> bool:
        return any(table.win_rate(model, name, n) for model in known)

    names = [name for name in table.quantities() if has(name, 1)][:3]
    return [(name, n) for n in table.chosen_from() for name in names if has(name, n)]


def win_rates(table: Table, looks: Mapping[str, Style], places: Mapping[str, Place], *, narrow: bool = False) -> Figure:
    """Draw win rates against the reference over the KL to it, with intervals; lines join models of one family.

    The dotted line in panels of single completions is best-of-N of the reference: a win rate of N / (N + 1) at a KL of
    log N - (N - 1) / N, for rewards without ties.
    """
    wanted = _won(table)
    names = {name for name, _ in wanted}
    figure, panels = _grid(len(wanted), narrow, columns=max(2, len(names)))
    for axes, (name, n) in zip(panels, wanted, strict=True):
        found: dict[str, tuple[Estimate, Estimate]] = {}
        for model in table.models:
            won = table.win_rate(model, name, n)
            distance = table.distance(model)
            if won is not None and distance is not None:
                found[model] = distance, won
        if n == 1:
            _reference_curve(axes, max(distance.value for distance, _ in found.values()))
        _scatter(axes, found, looks, places, percent=True)
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))  # the reference itself is at 0
        axes.axhline(50, color=GREY, linewidth=0.8)
        procedure = "single completions" if n == 1 else f"best-of-{n}"
        missing = left_out(won.coverage for _, won in found.values())
        axes.set_title(f"{name}: {procedure}{missing}")
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_ylabel("win rate (%)")
    legend(figure, panels if len(table.models) <= NAMED + 1 else [], table.models)
    return figure


def _reference_curve(axes: Axes, furthest: float) -> None:
    n = np.geomspace(1, 64, 50)
    distance = np.log(n) - (n - 1) / n
    percent = 100 * n / (n + 1)
    shown = distance <= max(furthest * 1.1, 0.5)
    label = "best-of-N of the reference"
    axes.plot(distance[shown], percent[shown], color=GREY, linestyle=":", linewidth=2, label=label)


def _scatter(
    axes: Axes,
    found: Mapping[str, tuple[Estimate, Estimate]],
    looks: Mapping[str, Style],
    places: Mapping[str, Place],
    *,
    percent: bool = False,
    hollow: Sequence[str] = (),
) -> None:
    """Draw points with text and intervals in both directions; lines join the models of a family in order."""
    scale = 100 if percent else 1
    families: dict[str, list[tuple[float, float, float]]] = {}  # places of the models of a line, and their points
    for model, (x, y) in found.items():
        look = looks[model]
        place = places.get(model, Place(""))
        at = (x.value, scale * y.value)
        style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": "none"}
        bars = axes.errorbar(*at, xerr=_reach(x), yerr=_reach(y, scale), **style, capsize=2, elinewidth=1, zorder=3)
        axes.plot([], [], **style, label=model)  # filled, for the legend
        if model in hollow:
            bars.lines[0].set_markerfacecolor("none")
        if place.text and len(found) <= 3 * NAMED:
            axes.annotate(place.text, at, textcoords="offset points", xytext=(6, 5), fontsize=7.5, color=look.colour)
        if not math.isnan(place.along):
            families.setdefault(place.line, []).append((place.along, *at))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    dashes = itertools.cycle(("-", "--", "-."))
    for (line, members), linestyle in zip(families.items(), dashes, strict=False):
        if len(members) > 1:
            _, xs, ys = zip(*sorted(members), strict=True)
            axes.plot(xs, ys, color=GREY, linestyle=linestyle, linewidth=1.2, label=line, zorder=1)


def _reach(estimate: Estimate, scale: float = 1) -> list[list[float]] | None:
    """Lengths of an error bar; None if there is no interval."""
    if math.isnan(estimate.low):
        return None
    low = estimate.value - estimate.low
    high = estimate.high - estimate.value
    return [[scale * max(0.0, low)], [scale * max(0.0, high)]]


# --- one reward over another ------------------------------------------------------------------------------------------


def fronts_of(table: Table, without: Sequence[str]) -> list[tuple[str, str]]:
    """At most three pairs of rewards that at least three models, including the reference, have in common."""
    procedures: dict[str, set[tuple[str, int]]] = {}
    for (_, quantity), row in table.rows.items():
        procedures.setdefault(quantity, set()).update(row)
    rewards = []
    for quantity, known in procedures.items():
        is_reward = ("bon", 1) in known and " by choice of " not in quantity
        if is_reward and quantity not in without:
            rewards.append(quantity)
    pairs = []
    for a, b in itertools.combinations(rewards, 2):
        both = [model for model in table.models if table.at(model, a, 1) and table.at(model, b, 1)]
        if len(both) > 2:
            pairs.append((a, b))
    return pairs[:3]


def fronts(
    table: Table,
    pairs: Sequence[tuple[str, str]],
    looks: Mapping[str, Style],
    places: Mapping[str, Place],
    *,
    narrow: bool = False,
) -> Figure:
    """Draw two rewards over each other: of single completions, and best-of-N of each reward.

    A point is hollow if another point is higher in both rewards.
    """
    wanted = [(a, b, n) for a, b in pairs for n in table.chosen_from()]
    figure, panels = _grid(len(wanted), narrow, height=4.0)
    for axes, (a, b, n) in zip(panels, wanted, strict=True):
        found = {}
        for model in table.models:
            x = table.at(model, a, n)
            y = table.at(model, b, n)
            if x is not None and y is not None:
                found[model] = x.estimate, y.estimate
        _scatter(axes, found, looks, places, hollow=beaten(found))
        procedure = "single completions" if n == 1 else f"best-of-{n}"
        missing = left_out(estimate.coverage for pair in found.values() for estimate in pair)
        axes.set_title(procedure + missing)
        axes.set_xlabel(shortened(a, 40))
        axes.set_ylabel(shortened(b, 40))
    legend(figure, panels if len(table.models) <= NAMED + 1 else [], table.models)
    return figure


def beaten(found: Mapping[str, tuple[Estimate, Estimate]]) -> list[str]:
    """Return the models for which another model is higher in both rewards."""
    lower = []
    for model, (x, y) in found.items():
        if any(a.value > x.value and b.value > y.value for a, b in found.values()):
            lower.append(model)
    return lower
