"""Figures of `nlgrpo verify`; each function takes ``drawn`` of a `claims.Proof` as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nlgrpo.apps.report.figures import COLOURS, GREY, MARKERS

Errors = Mapping[int, Mapping[int, tuple[float, float]]]
DASHES = ("-", "--")


def plugin(sizes: Sequence[int], biases: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the bias of the plug-in gradient over M, with the line 1/M."""
    figure, axes = _one_panel()
    for i, (name, bias) in enumerate(biases.items()):
        dash = DASHES[i // 6]
        axes.plot(sizes, bias, dash, color=COLOURS[i % 6], marker=MARKERS[i % 6], markersize=4, label=name)
    start = 0.5 * min(bias[0] for bias in biases.values())
    axes.plot(sizes, [start * sizes[0] / M for M in sizes], ":", color=GREY, linewidth=1.4, label="1/M")
    _doubling(axes, sizes, "M (samples per group)")
    axes.set_yscale("log")
    axes.set_ylabel("relative bias")
    axes.set_title("Bias of the plug-in gradient (all groups from 3 atoms)")
    _legend_beside(axes)
    return figure


def lemma_5_6(sizes: Sequence[int], shares: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw the error of a group's first variation divided by the lemma's bound: constant if the error is O(1/M)."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    panels = figure.subplots(1, len(shares), sharey=True)
    for axes, (where, lines) in zip(panels, shares.items(), strict=True):
        for i, (name, share) in enumerate(lines.items()):
            axes.plot(sizes, share, color=COLOURS[i], marker=MARKERS[i], markersize=4, label=name)
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1, label="bound")
        _doubling(axes, sizes, "M (samples per group)")
        axes.set_yscale("log")
        axes.set_title(where.capitalize())
    panels[0].set_ylabel("error / bound of Lemma 5.6")
    panels[0].legend(loc="upper right", bbox_to_anchor=(1.0, 0.9), ncols=2)
    return figure


def linearised_loss(sizes: Sequence[int], plugin: Errors, unbiased: Errors) -> Figure:
    """Draw bias and variance of the linearised loss over M, with one panel per N (IAMA, Fig. 4)."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(plugin), sharey=True)
    for axes, (n, errors) in zip(panels, plugin.items(), strict=True):
        squared_bias = np.array([bias**2 for bias, _ in errors.values()])
        variance = np.array([std**2 for _, std in errors.values()])
        total = squared_bias + variance
        axes.fill_between(sizes, 0, squared_bias, color=COLOURS[1], alpha=0.35, linewidth=0, label="bias²")
        axes.fill_between(sizes, squared_bias, total, color=COLOURS[0], alpha=0.25, linewidth=0, label="variance")
        axes.plot(sizes, total, color=COLOURS[0], marker="o", markersize=4, label="plug-in, total")
        sizes_of_unbiased = list(unbiased[n])
        unbiased_total = [bias**2 + std**2 for bias, std in unbiased[n].values()]
        axes.plot(
            sizes_of_unbiased,
            unbiased_total,
            "--",
            color=COLOURS[2],
            marker="s",
            markersize=4,
            label="unbiased",
        )
        if n > 1:
            axes.axvline(n, color=GREY, linestyle=":", linewidth=1.2, label="M = N")
        _doubling(axes, sizes, "M")
        axes.set_ylim(0, 1.25)
        axes.set_title(f"N = {n}" + (" (plain GRPO)" if n == 1 else ""))
    panels[0].set_ylabel("relative squared error")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right center")
    return figure


def proposition_3_1(
    densities: Mapping[str, tuple[Tensor, Tensor | None]], paths: Mapping[str, tuple[Tensor, Tensor]]
) -> Figure:
    """Draw trained policies and the closed form (left); the gap and the distance of CDFs over updates (right)."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    for i, (name, (reached, optimum)) in enumerate(densities.items()):
        y = (np.arange(len(reached)) + 0.5) / len(reached)
        if optimum is None:
            left.plot(y, reached, color=GREY, label="mean reward (GRPO)")
        else:
            left.plot(y, reached, color=COLOURS[i], label=name)
            _bound(left, y, optimum, COLOURS[i])
    _label_of_bounds(left, "closed form")
    left.set_yscale("log")
    left.set_ylim(0.05, 500)
    left.set_xlabel("y")
    left.set_ylabel("policy density")
    left.set_title("Exact updates and the closed form (Prop. 3.1)")
    left.legend(loc="center", bbox_to_anchor=(0.29, 0.75))  # between a pole and the point mass
    for i, (name, (gaps, distances)) in enumerate(paths.items()):
        steps = np.arange(1, len(gaps))
        right.plot(steps, gaps[1:] / gaps[0], color=COLOURS[i], label=f"{name}: gap")
        right.plot(steps, distances[1:] / distances[0], "-.", color=COLOURS[i], label=f"{name}: sup |C - C*|")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("update")
    right.set_ylabel("relative to the start")
    right.set_title("Convergence to the optimum")
    right.legend(loc="lower left")
    return figure


def theorem_5_2(lines: Mapping[tuple[float, float], tuple[Tensor, Tensor]], n: int) -> Figure:
    """Draw the gaps of the regularised objective and their bounds over T."""
    figure, axes = _one_panel()
    for i, ((L, beta), (gaps, bound)) in enumerate(lines.items()):
        T = np.arange(1, len(gaps) + 1)
        shown = gaps > 1e-14
        axes.plot(T[shown], gaps[shown], color=COLOURS[i], label=f"beta = {beta:g}, L = {L:g}")
        _bound(axes, T, bound, COLOURS[i])
    _label_of_bounds(axes, "bound of Thm 5.2")
    axes.set_yscale("log")
    axes.set_ylim(1e-14, 10)
    axes.set_xlabel("T (updates)")
    axes.set_ylabel("gap to the optimum")
    axes.set_title(f"Convergence with a KL penalty (bon:{n})")
    _legend_beside(axes)
    return figure


def theorem_5_3(lines: Mapping[str, tuple[Tensor, Tensor]], n: int) -> Figure:
    """Draw the mean gap of inexact updates and the bounds of Thm 5.3 over T."""
    figure, axes = _one_panel()
    for i, (setting, (gaps, bound)) in enumerate(lines.items()):
        T = np.arange(1, len(gaps) + 1)
        axes.plot(T, gaps, color=COLOURS[i], label=setting)
        _bound(axes, T, bound, COLOURS[i])
    _label_of_bounds(axes, "bound of Thm 5.3")
    axes.set_yscale("log")
    axes.set_xlabel("T (updates)")
    axes.set_ylabel("mean gap to the optimum")
    axes.set_title(f"Updates from M samples (bon:{n})")
    _legend_beside(axes)
    return figure


def pareto(n: int, with_bon: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> Figure:
    """Draw the two rewards of each trained policy: best-of-n (left) and one sample (right)."""
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _fronts(left, with_bon, n)
    left.set_title(f"Best-of-{n}")
    left.legend(loc="lower left")
    _fronts(right, alone, n)
    right.set_title("One sample")
    return figure


def _fronts(axes: Axes, points: Mapping[str, Tensor], n: int) -> None:
    labels = {
        "weighted sum": f"trained for weighted sum of bon:{n}",
        "smooth-min": f"trained for smooth-min of bon:{n}",
        "mean": "trained for mean (GRPO)",
        "untrained": "untrained",
    }
    # colour, line and marker
    styles = {
        "weighted sum": (COLOURS[0], "-", MARKERS[0]),
        "smooth-min": (COLOURS[2], "none", MARKERS[1]),
        "mean": (COLOURS[1], "-", MARKERS[2]),
    }
    for name, xy in points.items():
        x, y = xy.T
        if name == "untrained":
            axes.plot(x, y, "x", color=GREY, markersize=8, markeredgewidth=2, label=labels[name])
        else:
            colour, line, marker = styles[name]
            axes.plot(x, y, color=colour, linestyle=line, marker=marker, markersize=4, label=labels[name])
    axes.set_xlabel("r_1 = 1 - y²")
    axes.set_ylabel("r_2 = 1 - (1 - y)²")


def theorem_3(curves: Mapping[str, tuple[Tensor, Tensor]], finite: Mapping[str, Tensor], n: int) -> Figure:
    """Draw win rates over KL: Theorem 3 of InfAlign as curves, policies over a few responses as points."""
    figure, axes = _one_panel()
    for i, (name, (kl, won)) in enumerate(curves.items()):
        axes.plot(kl, won, color=COLOURS[i], label=name)
        if name in finite:
            x, y = finite[name].T
            axes.plot(x, y, MARKERS[i], color=COLOURS[i], markersize=5, markerfacecolor="none")
    axes.plot([], [], "o", color=GREY, markerfacecolor="none", label="50 responses,\nexact")
    axes.set_xlabel("KL to the reference (nats)")
    axes.set_ylabel(f"best-of-{n} win rate")
    axes.set_title("Theorem 3 of InfAlign and policies over 50 responses")
    axes.legend(loc="lower right")
    return figure


def lower_bounds(values: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> Figure:
    """Draw both lower bounds of vBoN against the objective, with one panel per N > 1 and one point per policy."""
    shown = [n for n in values if n > 1]
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    panels = figure.subplots(1, len(shown))
    for axes, n in zip(panels, shown, strict=True):
        J, L, L_1 = (of_each[:300] for of_each in values[n])
        axes.plot(J, L, ".", color=COLOURS[0], markersize=4, label="L (Thm 2)")
        axes.plot(J, L_1, ".", color=COLOURS[1], markersize=4, label="L_1 (Thm 3)")
        ends = [J.min().item(), 0.0]
        axes.plot(ends, ends, color=GREY, linewidth=1.2, label="J")
        axes.set_xlabel("J = -KL(pi | pi_bon)")
        axes.set_title(f"N = {n}")
    panels[0].set_ylabel("lower bound")
    panels[0].legend(loc="lower right")
    return figure


def theorem_1(horizons: Tensor, lines: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw the gap of IRO's iterated values over T and its bound."""
    figure, axes = _one_panel()
    for i, (name, (gaps, bound)) in enumerate(lines.items()):
        shown = gaps > 1e-14
        axes.plot(horizons[shown], gaps[shown], color=COLOURS[i], marker=MARKERS[i], markersize=4, label=name)
        _bound(axes, horizons, bound, COLOURS[i])
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1.2, label="r_max")
    _label_of_bounds(axes, "bound of Thm 1")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("T (value functions)")
    axes.set_ylabel("smallest gap to the best reward")
    axes.set_title("Iterated exact values on token trees (IRO)")
    _legend_beside(axes)
    return figure


def _one_panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    return figure, figure.subplots()


def _legend_beside(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _bound(axes: Axes, x: np.ndarray | Tensor, y: Tensor, colour: str) -> None:
    """Draw a bound or an exact result, dashed in the colour of what is compared with it."""
    axes.plot(x, y, "--", color=colour, linewidth=1.2)


def _label_of_bounds(axes: Axes, label: str) -> None:
    axes.plot([], [], "--", color=GREY, linewidth=1.2, label=label)


def _doubling(axes: Axes, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(M) for M in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
