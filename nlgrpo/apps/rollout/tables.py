"""Tables and figures of the reference's rollouts: rewards, ties, lengths, Kolmogorov-Smirnov tests."""

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

from nlgrpo.apps.curves import calibration_figures
from nlgrpo.apps.report import figures
from nlgrpo.calibration import kolmogorov_smirnov
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.estimators import over_present
from nlgrpo.runtime import atomic_files


@dataclass(frozen=True)
class RewardSummary:
    """Statistics of one reward over all prompts; NaN if nothing was scored."""

    name: str
    mean: float
    std: float  # over all completions
    std_in_prompt: float  # mean over prompts of the std among a prompt's samples
    zero_std: float  # share of prompts whose samples all have the same reward
    ties: float  # share of pairs of a prompt's samples with the same reward
    abstained: int  # number of completions
    compared: int  # prompts with two scored samples or more, which the numbers within prompts are over


def summarize(name: str, rewards: Tensor) -> RewardSummary:
    """Summarize rewards (P, K). Unscored samples count nowhere; within prompts, neither does a single scored one."""
    scored = rewards[~rewards.isnan()]
    std, zero_std, ties = (over_present(measure, rewards, fewest=2) for measure in (_std, _all_equal, _ties))
    return RewardSummary(
        name=name,
        mean=scored.mean().item(),
        std=scored.std().item() if len(scored) > 1 else math.nan,
        std_in_prompt=std.nanmean().item(),
        zero_std=zero_std.nanmean().item(),
        ties=ties.nanmean().item(),
        abstained=rewards.numel() - len(scored),
        compared=int((~std.isnan()).sum()),
    )


def _std(rewards: Tensor) -> Tensor:
    return rewards.double().std(1)


def _all_equal(rewards: Tensor) -> Tensor:
    return rewards.amin(1) == rewards.amax(1)


def _ties(rewards: Tensor) -> Tensor:
    """Share of the ordered pairs of two samples that have the same reward."""
    ordered = rewards.sort(1).values
    K = rewards.shape[1]
    below = torch.searchsorted(ordered, ordered, right=False)
    upto = torch.searchsorted(ordered, ordered, right=True)
    return (upto - below - 1).double().sum(1) / (K * (K - 1))


def table(rollouts: ReferenceRollouts) -> Table:
    """Build a table with a row per reward, and lengths and log-probs in its caption."""
    P, K = rollouts.lengths.shape
    out = Table(title=f"{P:,} prompts x {K:,} samples of the reference", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("reward", "mean", "std", "std within prompt", "zero-std prompts", "ties", "abstained"):
        out.add_column(heading, justify="left" if heading == "reward" else "right")
    for name, values in rollouts.rewards.items():
        s = summarize(name, values)
        numbers = [f"{s.mean:.4f}", f"{s.std:.4f}", f"{s.std_in_prompt:.4f}", f"{s.zero_std:.1%}", f"{s.ties:.1%}"]
        lone = f"\n{P - s.compared:,} prompts with fewer\nthan 2 left out within" * (s.compared < P)
        out.add_row(Text(name), *("-" if "nan" in text else text for text in numbers), f"{s.abstained:,}{lone}")
    length = rollouts.lengths.double().mean().item()
    cut = (~rollouts.finished).double().mean().item()
    out.caption_justify = "left"
    out.caption = (
        f"{length:.1f} tokens per completion, {cut:.1%} truncated at {rollouts.index.origin.sampling.max_new_tokens}; "
        f"mean log-prob {rollouts.logprobs.mean().item():.2f}"
    )
    return out


def ks_tables(rollouts: ReferenceRollouts, sizes: Sequence[int], nested: bool) -> Iterator[Table]:
    """Yield a table of Kolmogorov-Smirnov tests per reward; prompts with an unscored sample are left out."""
    for name, values in rollouts.rewards.items():
        whole = values[~values.isnan().any(1)]
        if not len(whole):
            continue
        title = f"{name}: two-sample Kolmogorov-Smirnov tests at 5%, {'nested' if nested else 'disjoint'} samples"
        if len(whole) < len(values):
            title += f"; {len(whole)} of {len(values)} prompts, whose samples all have the reward"
        out = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in kolmogorov_smirnov.COLUMNS:
            out.add_column(heading, justify="right")
        for row in kolmogorov_smirnov.ks_table(whole, sizes, nested=nested):
            out.add_row(*row.cells())
        yield out


def draw_calibration(rollouts: ReferenceRollouts) -> list[Path]:
    """Save ``calibration-NAME.png`` per reward into the folder: rewards over ranks, before and after calibration."""
    written = []
    for name, values in rollouts.rewards.items():
        whole = values[~values.isnan().any(1)]
        if len(whole) and whole.shape[1] >= 4:
            written.append(rollouts.folder / f"calibration-{name}.png")
            draw = partial(calibration_figures.calibration, whole, left_out=len(values) - len(whole))
            atomic_files.atomic_write_bytes(written[-1], figures.render(draw))
    return written
