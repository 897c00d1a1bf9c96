"""Tables of an evaluation: every reward under every procedure, with intervals over prompts.

Shapes: P prompts, n samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.evaluation.estimators import best_of_n, bootstrap, worst_of_n
from nlgrpo.objectives.registry import is_pairwise

WEIGHTED_SUM = "weighted sum"


@dataclass(frozen=True)
class Row:
    """One number with its interval: ``value`` of ``reward`` under ``procedure`` (``"mean"``, ``"best-of-4"``)."""

    reward: str
    procedure: str
    value: float
    low: float
    high: float


def weighted_best_of_n(sampled: EvaluationSamples, ns: Sequence[int]) -> Tensor:
    """``sum_i w_i BoN_i`` of each prompt: (len(ns), P'), over the P' prompts on which no reward abstains.

    Each reward picks its own best of N, as in the training objective ``sum_i w_i R_i``; from diversity nothing is
    picked, it counts as it is.
    """
    picks = {name: "diversity" if is_pairwise(text) else "best" for name, text in sampled.objectives.items()}
    return _weighted(sampled, ns, picks)


def summarize(sampled: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> list[Row]:
    """Mean (N = 1) and best-of-N of each reward, then of the weighted sum if rewards are several, with 95% intervals.

    A reward with the objective "wor:N" has its worst-of-N instead, and diversity its mean alone; in the weighted sum,
    "each of N", every reward is taken as in its own rows. A prompt on which a reward abstains for any sample is left
    out for that reward, and for the weighted sum; where no prompt is left the row is NaN. Raises ValueError for N above
    the samples a prompt.
    """
    picks = {name: _pick(text) for name, text in sampled.objectives.items()}
    per_prompt = {
        name: (_picked(values[~values.isnan().any(1)], ns, picks[name]), picks[name])
        for name, values in sampled.rewards.items()
    }
    if len(per_prompt) > 1:
        of_all = picks.values() if len(set(picks.values())) == 1 else ["each"]
        per_prompt[WEIGHTED_SUM] = _weighted(sampled, ns, picks), next(iter(of_all))
    rows = []
    for name, (values, pick) in per_prompt.items():
        for number, value in zip(ns, values, strict=True):
            if number > 1 and pick == "diversity":
                continue
            numbers = [x.item() for x in bootstrap(value)] if len(value) else [math.nan] * 3
            of_n = f"each of {number}" if pick == "each" else f"{pick}-of-{number}"
            rows.append(Row(name, "mean" if number == 1 else of_n, *numbers))
    return rows


def _pick(objective: str) -> str:
    return "diversity" if is_pairwise(objective) else "worst" if objective.startswith("wor:") else "best"


def _picked(rewards: Tensor, ns: Sequence[int], pick: str) -> Tensor:
    """(len(ns), P) of one reward: its best or worst of N, or for diversity its mean whatever N is."""
    if pick == "diversity":
        return best_of_n(rewards, [1]).expand(len(ns), -1)
    return (worst_of_n if pick == "worst" else best_of_n)(rewards, ns)


def _weighted(sampled: EvaluationSamples, ns: Sequence[int], picks: Mapping[str, str]) -> Tensor:
    """(len(ns), P') weighted sum over the P' prompts on which no reward abstains."""
    scored = ~torch.stack([values.isnan().any(1) for values in sampled.rewards.values()]).any(0)
    parts = [sampled.weights[name] * _picked(r[scored], ns, picks[name]) for name, r in sampled.rewards.items()]
    return torch.stack(parts).sum(0)


def format_interval(row: Row, gap: str = " ") -> str:
    """``-0.1234 [-0.1301, -0.1170]``; no brackets where there is no interval, a dash where nothing was scored."""
    if math.isnan(row.value):
        return "-"
    return f"{row.value:.4f}" if math.isnan(row.low) else f"{row.value:.4f}{gap}[{row.low:.4f}, {row.high:.4f}]"


def format_change(old: Row, new: Row) -> str:
    """``+0.0123``, or a dash where one of both was not scored."""
    change = new.value - old.value
    return "-" if math.isnan(change) else f"{change:+.4f}"


def before_after_table(before: EvaluationSamples, after: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> Table:
    """The table that ends a run: every reward and procedure, before -> after, with 95% intervals over prompts.

    Raises ValueError for N above the samples a prompt.
    """
    prompts, n = after.lengths.shape
    title = f"before and after training ({prompts} prompts x {n} samples, 95% intervals)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("reward", "procedure", "before", "after", "change"):
        table.add_column(heading, no_wrap=heading != "reward")
    previous = None
    for old, new in zip(summarize(before, ns), summarize(after, ns), strict=True):
        # An interval goes under its value, the objective under its reward: the table fits 80 columns.
        name = Text(f"{new.reward}\n{after.objectives.get(new.reward, '')}") if new.reward != previous else ""
        cells = (format_interval(row, "\n") for row in (old, new))
        table.add_row(name, new.procedure, *map(Text, cells), format_change(old, new))
        previous = new.reward
    return table
