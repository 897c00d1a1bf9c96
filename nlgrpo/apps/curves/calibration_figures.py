"""Figures of calibrated rewards: win rates of their transforms, and the reference's rewards before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nlgrpo.apps.report.figures import GREY, figure_of, legend, series_style
from nlgrpo.calibration.alignment import Curve, calibrate
from nlgrpo.calibration.ecdf import ranks
from nlgrpo.errors import UserError

PROMPTS = 10  # most prompts in a figure
DELTA = 0.05  # the band contains a prompt's whole curve with probability 1 - DELTA


def alignment(curves: Mapping[str, Curve], reference: Curve) -> Figure:
    """Draw win rates over KL for each transform: one sample, best-of-N and worst-of-N (InfAlign, Figs. 2 and 11).

    A panel for each further procedure of ``reference`` follows. ``reference``: the curve of a policy whose single
    samples are best-of-m samples of the reference, for a few m.
    """
    panels = _rates(reference)
    rows = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / rows)
    figure = figure_of((3.8 * columns, 4.4 * rows))
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every[len(panels) :]:
        axes.remove()
    for axes, title in zip(every, panels, strict=False):
        for i, (name, curve) in enumerate(curves.items()):
            order = curve.kl.argsort()
            percent = 100 * _rates(curve)[title]
            axes.plot(curve.kl[order], percent[order], **series_style(i).line, label=name)
        label = "best-of-2, 4, 8 of the reference"
        axes.plot(reference.kl, 100 * panels[title], "x", color=GREY, markersize=7, label=label)
        axes.set_title(title)
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_xlim(left=0)
    for axes in every[: len(panels) : columns]:
        axes.set_ylabel("win rate (%)")
    legend(figure, every[: len(panels)])
    return figure


def _rates(curve: Curve) -> dict[str, Tensor]:
    """Return the win rates of a curve by the title of their panel."""
    n = curve.n
    own = {"One sample": curve.win_rate, f"Best-of-{n}": curve.bon_win_rate, f"Worst-of-{n}": curve.won_win_rate}
    return own | dict(curve.procedures)


def calibration(rewards: Tensor, left_out: int = 0) -> Figure:
    """Draw the reference's rewards (P, K) over their rank per prompt, before and after calibration (InfAlign, Fig. 3).

    Right panel: the second half of each prompt's samples, calibrated on the first half, which shows the accuracy of K/2
    samples. The grey line is y = x. A prompt's points are inside the grey band with probability 95% (Lemma 6, for each
    of the two halves). At most 10 prompts, equally spaced, are drawn. ``left_out``: number of prompts that are not
    given, because one of their samples has no reward; the title has it.

    Raises UserError for another shape, NaN, and K < 4.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 4 or not len(rewards):
        raise UserError(f"expected rewards (P, K) of P >= 1 prompts with K >= 4 samples, got {tuple(rewards.shape)}.")
    drawn = np.unique(np.linspace(0, len(rewards) - 1, PROMPTS).round().astype(int))
    rewards = rewards.detach().double().cpu()[drawn]
    half = rewards.shape[1] // 2
    reference = rewards[:, :half]
    others = rewards[:, half:]
    figure = figure_of((9.6, 4.2))
    before, after = figure.subplots(1, 2)
    _over_ranks(before, ranks(rewards), rewards)
    _over_ranks(after, ranks(others), calibrate(others, reference))
    line = np.linspace(0, 1, 101)
    reach = sum(math.sqrt(math.log(2 / (DELTA / 2)) / (2 * part.shape[1])) for part in (reference, others))
    after.plot(line, line, color=GREY, linewidth=1.2, zorder=1)
    after.fill_between(line, (line - reach).clip(0), (line + reach).clip(max=1), color=GREY, alpha=0.15, linewidth=0)
    title = f"Before: rewards of {rewards.shape[1]} samples, {len(drawn)} prompts"
    if left_out:
        title += f"\n{left_out} prompts left out: samples without a reward"
    before.set_title(title)
    before.set_ylabel("reward")
    after.set_title(f"After: samples calibrated on {half} others")
    after.set_ylabel("calibrated reward")
    return figure


def _over_ranks(axes: Axes, ranks_of: Tensor, values: Tensor) -> None:
    for i, (x, y) in enumerate(zip(ranks_of, values, strict=True)):
        style = series_style(i)
        axes.plot(x, y, style.marker, color=style.colour, markersize=3.5, alpha=0.7, linewidth=0)
    axes.set_xlabel("rank among the prompt's samples")
