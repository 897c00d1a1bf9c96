"""Figures of tradeoff.py: win rates and rewards over KL, in one row of panels or one per family of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments.alignment_tradeoff.tradeoff_curves import (
    ALL,
    BEST_OF,
    BON,
    WORST_OF,
    Curve,
    Measured,
    Reference,
    label,
    points,
    scale_of,
    undominated,
)
from nlgrpo.apps.report import figures
from nlgrpo.calibration.alignment import at_kl
from nlgrpo.estimators import bootstrap

FAMILIES = (  # rows of a figure with many methods
    ("The reward itself", ("grpo", "ppo", "bon", "rank")),
    ("InfAlign-CTRL, by GRPO", ("identity", "log", "exp:10", "exp:-10", "bon_fp")),
    ("InfAlign-CTRL, by PPO", ("ppo/identity", "ppo/log", "ppo/exp:10", "ppo/bon_fp")),
    ("vBoN and BOND", ("vbon", "vbon:bound", "ppo/vbon", "ppo/vbon:bound", "bond")),
    ("Offline", ("bon_sft", "dpo", "dpo/all", "ipo", "bonbon")),
)
TOGETHER = 8  # most methods of one panel


def draw_curves(found: Mapping[str, Sequence[Curve]], reference: Reference, quantities: Sequence[str]) -> Figure:
    """Curves through the means over seeds, with intervals over prompts (InfAlign, Fig. 4).

    More than 8 methods are drawn in one row of panels per family, with the methods of the other families in grey.
    """
    furthest = max(float(curve.kl[-1]) for own in found.values() for curve in own)
    rows = families(list(found))
    drawn = {(method, quantity): _curve(own, quantity) for method, own in found.items() for quantity in quantities}
    figure, grid = _panels(quantities, furthest, reference, len(rows))
    for line, (name, methods) in zip(grid, rows, strict=True):
        for axes, quantity in zip(line, quantities, strict=True):
            for method in found:
                if method not in methods:
                    axes.plot(*drawn[method, quantity][:2], color=figures.GREY, alpha=0.3, linewidth=0.8)
            for i, method in enumerate(methods):
                kl, mean, reach = drawn[method, quantity]
                look = figures.series_style(i)
                axes.errorbar(kl, mean, reach, **look.line, marker=look.marker, capsize=2, label=label(method))
        _name(line[0], name)
    return _with_legends(figure, grid)


def draw_points(measured: Measured, reference: Reference, quantities: Sequence[str]) -> Figure:
    """One point per run; pale points are dominated by another run of their method (vBoN, Fig. 2). Rows as above."""
    every = list(dict.fromkeys(method for method, _, _ in measured))
    rows = families(every)
    furthest = max(float(each["kl"].mean()) for each in measured.values())
    figure, grid = _panels(quantities, furthest, reference, len(rows))
    for line, (name, methods) in zip(grid, rows, strict=True):
        for axes, quantity in zip(line, quantities, strict=True):
            for i, method in enumerate(methods):
                look = figures.series_style(i)
                own = points({run: x for run, x in measured.items() if run[0] == method}, quantity)
                for (x, y), best in zip(own, undominated(own), strict=True):
                    axes.plot(x, y, look.marker, color=look.colour, alpha=1.0 if best else 0.3, linewidth=0)
                axes.plot([], [], look.marker, color=look.colour, linewidth=0, label=label(method))
        _name(line[0], name)
    return _with_legends(figure, grid)


def families(methods: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Name and methods of each row of a figure: one row without a name for few methods, else one per family."""
    if len(methods) <= TOGETHER:
        return [("", list(methods))]
    known = {method for _, own in FAMILIES for method in own}
    groups = [(name, [m for m in methods if m in own]) for name, own in FAMILIES]
    groups.append(("Others", [m for m in methods if m not in known]))
    return [(name, own) for name, own in groups if own]


def _curve(seeds: Sequence[Curve], quantity: str) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """KL and mean over seeds at each strength, and the reach of the interval over prompts below and above."""
    kl = torch.stack([curve.kl for curve in seeds]).mean(0)
    values = torch.stack([curve.values[quantity] for curve in seeds]).mean(0)
    mean, low, high = (scale_of(quantity) * x.numpy() for x in bootstrap(values))
    return kl, mean, np.stack([mean - low, high - mean]).clip(min=0)


def _name(axes: Axes, name: str) -> None:
    if name:
        axes.set_ylabel(name, fontweight="bold")


def _with_legends(figure: Figure, grid: Sequence[Sequence[Axes]]) -> Figure:
    """Add one legend below all panels, or one in each row."""
    if len(grid) == 1:
        figures.legend(figure, grid[0])
    else:
        for line in grid:
            line[0].legend(loc="lower right", fontsize=8)
    return figure


def _panels(
    quantities: Sequence[str], furthest: float, reference: Reference, rows: int
) -> tuple[Figure, list[list[Axes]]]:
    """Panels with the curves of best-of-N of the reference and of the best policy."""
    figure = figures.figure_of((5.2 * len(quantities), 5.2 if rows == 1 else 3.6 * rows))
    grid = [list(line) for line in figure.subplots(rows, len(quantities), squeeze=False)]
    bon = [reference.best_of(float(n)) for n in np.geomspace(1, reference.rewards.shape[1], 60)]
    near = [each for each in bon if float(each["kl"].mean()) <= 1.05 * max(furthest, 0.1)]
    for place, quantity in enumerate(quantities):
        xs, ys = ([float(each[key].mean()) for each in near] for key in ("kl", quantity))
        best = optimum(quantity, furthest)
        for line in grid:
            axes = line[place]
            axes.plot(xs, [scale_of(quantity) * y for y in ys], color=figures.GREY, linestyle="--", label=BON)
            if best is not None:
                axes.plot(best[0], 100 * best[1], color=figures.GREY, linestyle=":", label="best possible policy")
            axes.set_xscale("function", functions=(lambda kl: np.sqrt(np.maximum(kl, 0)), np.square))  # `Curve.at`
            axes.set_xlim(0, 1.08 * max(furthest, 0.1))
        grid[0][place].set_title(ALL[quantity])
        grid[-1][place].set_xlabel("KL to the reference (nats)")
    return figure, grid


def optimum(quantity: str, furthest: float) -> tuple[Tensor, Tensor] | None:
    """KLs, and the best win rate of any policy at each, for rewards without ties (InfAlign, Theorem 3, Cor. 2)."""
    known = {f"best{n}": (f"bon_fp:{n}", n) for n in BEST_OF} | {"worst": (f"won_fp:{WORST_OF}", WORST_OF)}
    if quantity not in known or furthest < 0.1:
        return None
    transform, n = known[quantity]
    curve = at_kl(transform, np.geomspace(0.02, min(furthest, 20.0), 24).tolist(), n)
    return curve.kl, curve.won_win_rate if quantity == "worst" else curve.bon_win_rate
