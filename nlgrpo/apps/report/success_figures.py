"""Figures of rewards that are 0 or 1: how often prompts are solved, and the walks of answers to mazes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from nlgrpo.apps.report.figures import COLOURS, GREY, figure_of, shortened, values_over_n
from nlgrpo.data import mazes
from nlgrpo.data.mazes import Maze
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, left_out
from nlgrpo.training.evaluation_summary import binary_rewards

# Shares of a prompt's samples that are right, from none to all, and the colour of each group of prompts.
GROUPS = ("never", "up to 1/4", "up to 1/2", "up to 3/4", "more", "always")
SHADES = (GREY, "#cfe1f2", "#93c3df", "#4b97c9", "#1764ab", "#08306b")
RIGHT: dict[str, Any] = {"color": COLOURS[0], "linestyle": "-"}
WRONG: dict[str, Any] = {"color": COLOURS[1], "linestyle": (0, (2, 1.2))}
# most models and mazes whose walks are drawn
MODELS = 4
MAZES = 2
SPREAD = 0.5  # of the walks of one maze, in squares, so that equal ones are seen


# --- prompts by their successes ---------------------------------------------------------------------------------------


def shares_of_prompts(rewards: Tensor) -> list[float]:
    """Share of the prompts in each of `GROUPS`, by how many of their samples are right: (P, n) of 0, 1 and NaN.

    Samples without a reward count nowhere, and neither do prompts without any.
    """
    known = ~rewards.isnan()
    there = known.any(1)
    right = rewards.nan_to_num(0.0).sum(1)[there] / known.sum(1)[there]
    group = (right == 1.0).int()
    for edge in (0.0, 0.25, 0.5, 0.75):
        group += (right > edge).int()
    return [float((group == number).double().mean()) for number in range(len(GROUPS))]


def successes(sampled: Mapping[str, EvaluationSamples], *, narrow: bool = False) -> Figure:
    """Draw for each model and each binary reward (at most four) the prompts that it solves never, sometimes, always."""
    names = binary_rewards(sampled)[:4]
    rows = max(len(sampled), 1)
    figure = figure_of((4.2 if narrow else 7.2, (1.2 + 0.42 * rows) * len(names) + 0.5))
    panels = list(figure.subplots(len(names), 1, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=True):
        having = {label: one.rewards[name] for label, one in sampled.items() if name in one.rewards}
        _stacked(axes, having)
        axes.set_title(f"{shortened(name, 20 if narrow else 40)}: share of right samples")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if narrow else len(GROUPS))
    return figure


def comparison(
    models: Mapping[str, EvaluationSamples], values: Mapping[str, Sequence[Any]], ns: Sequence[int]
) -> Figure:
    """Draw the prompts of one binary reward by their successes (left), and its pass@N ``values`` (right)."""
    (name,) = next(iter(models.values())).rewards
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    _stacked(left, {label: sampled.rewards[name] for label, sampled in models.items()})
    left.set_title("Prompts by the share of their samples that are right")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(GROUPS))
    values_over_n(right, values, ns)
    right.set_ylim(0, 1)
    right.set_ylabel("pass@N")
    missing = left_out(row.coverage for rows in values.values() for row in rows)
    right.set_title(f"Prompts with a right answer among N{missing}")
    return figure


def _stacked(axes: Axes, rewards: Mapping[str, Tensor]) -> None:
    """One horizontal bar per model, from the prompts that it never solves to those that it always solves."""
    percent = np.array([shares_of_prompts(of_model) for of_model in rewards.values()]) * 100
    rows = range(len(rewards))
    left = np.zeros(len(rewards))
    for i, (group, shade) in enumerate(zip(GROUPS, SHADES, strict=True)):
        axes.barh(rows, percent[:, i], left=left, color=shade, label=group, height=0.72)
        left += percent[:, i]
    axes.set_yticks(rows, [shortened(label, 20) for label in rewards])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("prompts (%)")
    axes.grid(axis="y", visible=False)


# --- walks through mazes ----------------------------------------------------------------------------------------------


def maze_prompts(sampled: Mapping[str, EvaluationSamples]) -> list[int]:
    """Numbers of the saved prompts, of at most `MAZES`, that are mazes which some of the first model's samples solve.

    Those are taken that are nearest to solved in a third of the samples: there is most to see.
    """
    first = next(iter(sampled.values()), None)
    if first is None or not first.completions:
        return []
    found: list[tuple[float, int]] = []
    for number, (prompt, answers) in enumerate(zip(first.prompts, first.completions, strict=False)):
        try:
            maze = mazes.parse(prompt)
        except ValueError:
            return []
        right = sum(map(maze.solved_by, answers)) / len(answers)
        found.append((abs(right - 1 / 3), number))
    return [number for _, number in sorted(found)[:MAZES]]


def walks(sampled: Mapping[str, EvaluationSamples], prompts: Sequence[int], *, narrow: bool = False) -> Figure:
    """Draw the walks of all saved answers to some mazes, one row per maze and one column per model."""
    first = next(iter(sampled.values()))
    shown = [(label, one) for label, one in sampled.items() if one.prompts == first.prompts][:MODELS]
    if narrow:
        figure = figure_of((4.2, 2.5 * len(shown) + 0.4))
        panels = figure.subplots(len(shown), len(prompts), squeeze=False).T
    else:
        figure = figure_of((2.5 * len(shown), 2.9 * len(prompts) + 0.4))
        panels = figure.subplots(len(prompts), len(shown), squeeze=False)
    for i, number in enumerate(prompts):
        for j, (label, one) in enumerate(shown):
            _walks_of_one(panels[i, j], mazes.parse(one.prompts[number]), one.completions[number], label)
    handles = []
    for name, style in (("reaches the goal", RIGHT), ("does not", WRONG)):
        handles += panels[0, 0].plot([], [], **style, label=name)
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _walks_of_one(axes: Axes, maze: Maze, answers: Sequence[str], label: str) -> None:
    closed = np.ones((maze.height, maze.width), dtype=bool)
    for square in maze.open:
        closed[square] = False
    rows = np.arange(maze.height + 1) - 0.5
    columns = np.arange(maze.width + 1) - 0.5
    walls = np.ma.masked_where(~closed, closed)
    axes.pcolormesh(columns, rows, walls, cmap=ListedColormap([GREY]), alpha=0.6, rasterized=True)
    right = [maze.solved_by(answer) for answer in answers]
    for number, answer in enumerate(answers):
        shift = SPREAD * ((number + 0.5) / len(answers) - 0.5)
        i, j = np.array(maze.follow(answer.split())).T
        style = RIGHT if right[number] else WRONG
        axes.plot(j + shift, i + shift, **style, linewidth=1.1, alpha=0.8)
        if not right[number]:
            axes.plot(j[-1] + shift, i[-1] + shift, color=style["color"], marker="x", markersize=4)
    for (i, j), letter in ((maze.start, "S"), (maze.goal, "G")):
        axes.text(j, i, letter, ha="center", va="center", fontweight="bold")
    axes.set_xlim(columns[0], columns[-1])
    axes.set_ylim(rows[-1], rows[0])
    axes.set_aspect("equal")
    axes.set_axis_off()
    different = len(set(answers))
    walks_of = "1 different walk" if different == 1 else f"{different} different walks"
    axes.set_title(f"{shortened(label, 26)}\n{sum(right)} of {len(answers)} right, {walks_of}", fontsize=9)
