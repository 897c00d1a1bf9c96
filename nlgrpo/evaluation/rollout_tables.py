"""Tables and pictures of the reference's rollouts: rewards, ties, lengths, Kolmogorov-Smirnov tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.calibration import kolmogorov_smirnov
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.evaluation import calibration_figures, figures
from nlgrpo.runtime import atomic_files


@dataclass(frozen=True)
class RewardSummary:
    """One reward over all prompts; NaN where nothing was scored."""

    name: str
    mean: float
    deviation: float  # of all completions
    within: float  # mean over prompts of the deviation among a prompt's samples
    one_value: float  # share of prompts whose samples all have one reward: their ranks say nothing
    ties: float  # share of the pairs of a prompt's samples that have the same reward
    abstained: int  # completions


def summarize(name: str, rewards: Tensor) -> RewardSummary:
    """Of rewards (P, K). Prompts of which a sample was not scored count in the mean and the deviation alone."""
    there = rewards[~rewards.isnan()]
    whole = rewards[~rewards.isnan().any(1)].sort(1).values
    K = rewards.shape[1]
    below = torch.searchsorted(whole, whole, right=False)
    upto = torch.searchsorted(whole, whole, right=True)
    tied = (upto - below - 1).double().sum(1) / (K * (K - 1))  # ordered pairs of two samples
    squares = (whole - whole.mean(1, keepdim=True)).square().sum(1)
    return RewardSummary(
        name=name,
        mean=there.mean().item(),
        deviation=there.std().item() if len(there) > 1 else math.nan,
        within=(squares / (K - 1)).sqrt().mean().item(),
        one_value=(whole[:, 0] == whole[:, -1]).double().mean().item(),
        ties=tied.mean().item(),
        abstained=rewards.numel() - len(there),
    )


def table(rollouts: ReferenceRollouts) -> Table:
    """A line a reward, and what the completions are like below."""
    P, K = rollouts.lengths.shape
    found = Table(title=f"{P:,} prompts x {K:,} samples of the reference", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("reward", "mean", "deviation", "within", "one value", "ties", "abstained"):
        found.add_column(heading, justify="left" if heading == "reward" else "right")
    for name, values in rollouts.rewards.items():
        s = summarize(name, values)
        numbers = [f"{s.mean:.4f}", f"{s.deviation:.4f}", f"{s.within:.4f}", f"{s.one_value:.1%}", f"{s.ties:.1%}"]
        found.add_row(Text(name), *("-" if "nan" in text else text for text in numbers), f"{s.abstained:,}")
    length, cut = rollouts.lengths.double().mean().item(), (~rollouts.finished).double().mean().item()
    found.caption_justify = "left"
    found.caption = (
        f"{length:.1f} tokens a completion, {cut:.1%} cut at {rollouts.index.origin.sampling.max_new_tokens}; "
        f"log-prob {rollouts.logprobs.mean().item():.2f}"
    )
    return found


def ks_tables(rollouts: ReferenceRollouts, sizes: Sequence[int], nested: bool) -> Iterator[Table]:
    """A table a reward; prompts of which a sample was not scored are left out."""
    for name, values in rollouts.rewards.items():
        whole = values[~values.isnan().any(1)]
        if not len(whole):
            continue
        how = "the smaller of the larger's own" if nested else "of samples that share none"
        title = f"{name}: two-sample Kolmogorov-Smirnov tests at 5%, {how}"
        found = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in kolmogorov_smirnov.COLUMNS:
            found.add_column(heading, justify="right")
        for row in kolmogorov_smirnov.ks_table(whole, sizes, nested=nested):
            found.add_row(*row.cells())
        yield found


def draw_calibration(rollouts: ReferenceRollouts) -> list[Path]:
    """``calibration-NAME.png`` of every reward, in the folder: rewards over ranks, before and after."""
    written = []
    for name, values in rollouts.rewards.items():
        whole = values[~values.isnan().any(1)]
        if len(whole) and whole.shape[1] >= 4:
            written.append(rollouts.folder / f"calibration-{name}.png")
            atomic_files.atomic_write_bytes(
                written[-1], figures.render(partial(calibration_figures.calibration, whole))
            )
    return written
