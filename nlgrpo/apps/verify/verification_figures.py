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
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, bias) in enumerate(biases.items()):
        axes.plot(sizes, bias, DASHES[i // 6], color=COLOURS[i % 6], marker=MARKERS[i % 6], markersize=4, label=name)
    _guide(axes, sizes, 0.5 * min(bias[0] for bias in biases.values()))
    _doubling(axes, sizes, "M (samples per group)")
    axes.set_yscale("log")
    axes.set_ylabel("relative bias")
    axes.set_title("Bias of the plug-in gradient (all groups from 3 atoms)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
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
        bias, variance = (np.array([error[k] ** 2 for error in errors.values()]) for k in (0, 1))
        axes.fill_between(sizes, 0, bias, color=COLOURS[1], alpha=0.35, linewidth=0, label="bias²")
        axes.fill_between(sizes, bias, bias + variance, color=COLOURS[0], alpha=0.25, linewidth=0, label="variance")
        axes.plot(sizes, bias + variance, color=COLOURS[0], marker="o", markersize=4, label="plug-in, total")
        exact = {M: error[0] ** 2 + error[1] ** 2 for M, error in unbiased[n].items()}
        axes.plot(list(exact), list(exact.values()), "--", color=COLOURS[2], marker="s", markersize=4, label="unbiased")
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
        colour, label = (COLOURS[i], name) if optimum is not None else (GREY, "mean reward (GRPO)")
        left.plot(y, reached, color=colour, label=label)
        if optimum is not None:
            left.plot(y, optimum, "--", color=colour, linewidth=1.2)
    left.plot([], [], "--", color=GREY, linewidth=1.2, label="closed form")
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
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, ((L, beta), (gaps, bound)) in enumerate(lines.items()):
        T = np.arange(1, len(gaps) + 1)
        shown = gaps > 1e-14
        axes.plot(T[shown], gaps[shown], color=COLOURS[i], label=f"beta = {beta:g}, L = {L:g}")
        axes.plot(T, bound, "--", color=COLOURS[i], linewidth=1.2)
    axes.plot([], [], "--", color=GREY, linewidth=1.2, label="bound of Thm 5.2")
    axes.set_yscale("log")
    axes.set_ylim(1e-14, 10)
    axes.set_xlabel("T (updates)")
    axes.set_ylabel("gap to the optimum")
    axes.set_title(f"Convergence with a KL penalty (bon:{n})")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def theorem_5_3(lines: Mapping[str, tuple[Tensor, Tensor]], n: int) -> Figure:
    """Draw the mean gap of inexact updates and the bounds of Thm 5.3 over T."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, (setting, (gaps, bound)) in enumerate(lines.items()):
        T = np.arange(1, len(gaps) + 1)
        axes.plot(T, gaps, color=COLOURS[i], label=setting)
        axes.plot(T, bound, "--", color=COLOURS[i], linewidth=1.2)
    axes.plot([], [], "--", color=GREY, linewidth=1.2, label="bound of Thm 5.3")
    axes.set_yscale("log")
    axes.set_xlabel("T (updates)")
    axes.set_ylabel("mean gap to the optimum")
    axes.set_title(f"Updates from M samples (bon:{n})")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def pareto(n: int, with_bon: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> Figure:
    """Draw the two rewards of each trained policy: best-of-n (left) and one sample (right)."""
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    for axes, points, title in zip(
        figure.subplots(1, 2), (with_bon, alone), (f"Best-of-{n}", "One sample"), strict=True
    ):
        for i, (name, xy) in enumerate(points.items()):
            if name == "untrained":
                axes.plot(*xy[0], "x", color=GREY, markersize=8, markeredgewidth=2, label=name)
                continue
            label = f"trained for {name}" + (" (GRPO)" if name == "mean" else f" of bon:{n}")
            style = ("-", "none", "-")[i]
            axes.plot(*xy.T, color=COLOURS[(0, 2, 1)[i]], linestyle=style, marker=MARKERS[i], markersize=4, label=label)
        axes.set_xlabel("r_1 = 1 - y²")
        axes.set_ylabel("r_2 = 1 - (1 - y)²")
        axes.set_title(title)
    figure.axes[0].legend(loc="lower left")
    return figure


def theorem_3(curves: Mapping[str, tuple[Tensor, Tensor]], finite: Mapping[str, Tensor], n: int) -> Figure:
    """Draw win rates over KL: Theorem 3 of InfAlign as curves, policies over a few responses as points."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, (kl, won)) in enumerate(curves.items()):
        axes.plot(kl, won, color=COLOURS[i], label=name)
        if name in finite:
            axes.plot(*finite[name].T, MARKERS[i], color=COLOURS[i], markersize=5, markerfacecolor="none")
    axes.plot([], [], "o", color=GREY, markerfacecolor="none", label="50 responses,\nexact")
    axes.set_xlabel("KL to the reference (nats)")
    axes.set_ylabel(f"best-of-{n} win rate")
    axes.set_title("Theorem 3 of InfAlign and policies over 50 responses")
    axes.legend(loc="lower right")
    return figure


def lower_bounds(values: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> Figure:
    """Draw both lower bounds of vBoN against the objective, with one panel per N > 1 and one point per policy."""
    shown = {n: v for n, v in values.items() if n > 1}
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    panels = figure.subplots(1, len(shown))
    for axes, (n, (J, L, L_1)) in zip(panels, shown.items(), strict=True):
        for bound, colour, name in ((L, COLOURS[0], "L (Thm 2)"), (L_1, COLOURS[1], "L_1 (Thm 3)")):
            axes.plot(J[:300], bound[:300], ".", color=colour, markersize=4, label=name)
        ends = [J[:300].min().item(), 0.0]
        axes.plot(ends, ends, color=GREY, linewidth=1.2, label="J")
        axes.set_xlabel("J = -KL(pi | pi_bon)")
        axes.set_title(f"N = {n}")
    panels[0].set_ylabel("lower bound")
    panels[0].legend(loc="lower right")
    return figure


def theorem_1(horizons: Tensor, lines: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw the gap of IRO's iterated values over T and its bound."""
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, (gaps, bound)) in enumerate(lines.items()):
        shown = gaps > 1e-14
        axes.plot(horizons[shown], gaps[shown], color=COLOURS[i], marker=MARKERS[i], markersize=4, label=name)
        axes.plot(horizons, bound, "--", color=COLOURS[i], linewidth=1.2)
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1.2, label="r_max")
    axes.plot([], [], "--", color=GREY, linewidth=1.2, label="bound of Thm 1")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("T (value functions)")
    axes.set_ylabel("smallest gap to the best reward")
    axes.set_title("Iterated exact values on token trees (IRO)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _guide(axes: Axes, sizes: Sequence[int], start: float) -> None:
    line = [start * sizes[0] / M for M in sizes]
    axes.plot(sizes, line, ":", color=GREY, linewidth=1.4, label="1/M")


def _doubling(axes: Axes, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(M) for M in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
