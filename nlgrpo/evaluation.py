"""What a model is worth under best-of-N: unbiased estimates from n samples a prompt, with intervals over prompts.

Shapes: P prompts, n samples a prompt. All estimates are computed in float64. A run keeps the samples of its reference
and of its trained model in ``evaluation.json``, so that a report or a comparison of runs can be made later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.metrics import atomic_write
from nlgrpo.objectives import is_pairwise
from nlgrpo.rank_based import order_weights

FILE = "evaluation.json"
WEIGHTED_SUM = "weighted sum"


# --- estimators ---------------------------------------------------------------------------------------------------


def best_of_n(rewards: Tensor, ns: Sequence[int]) -> Tensor:
    """Expected reward of the best of N samples, for every N in ``ns``: rewards (P, n) -> (len(ns), P) float64.

        sum_k r_(k) C(k-1, N-1) / C(n, N),   r_(1) <= ... <= r_(n)

    The mean over all subsets of N of the n samples, so unbiased for independent samples. N = 1 is the mean, N = n the
    maximum.

    Raises ValueError for rewards that are not (P, n), not finite, and for N < 1 or N > n.
    """
    rewards = _group(rewards, "rewards")
    if not rewards.isfinite().all():
        raise ValueError(
            f"rewards hold {rewards.isinf().sum()} infinite values, which have no average; clamp them first"
        )
    n = rewards.shape[1]
    weights = torch.stack([order_weights(n, _checked_n(best_of, n)) for best_of in _sequence(ns)])
    return weights.to(rewards.device) @ rewards.sort(dim=1).values.T


def worst_of_n(rewards: Tensor, ns: Sequence[int]) -> Tensor:
    """Expected reward of the worst of N samples: ``worst(r) = -best(-r)``. Shapes and errors as in `best_of_n`."""
    return -best_of_n(-rewards, ns)


def win_rate(a: Tensor, b: Tensor, n: int, worst: bool = False) -> Tensor:
    """Rate at which best-of-n of A beats best-of-n of B: samples' rewards a (P, n_a), b (P, n_b) -> (P,) float64.

        P(max A > max B) + 1/2 P(max A = max B) = sum_i w_i (G(a_(i)-) + G(a_(i))) / 2,   G the CDF of max B

    Exact over all pairs of subsets of n samples of each side, in O(n log n). Equal rewards share the tie whatever their
    order, because G jumps at a value by the weight of all samples that have it. ``worst`` compares minima instead.
    Against itself a model gets 1/2; best-of-n against one sample of the same continuous distribution would be n/(n+1).

    Raises ValueError for NaN, shapes that do not agree, and n below 1 or above n_a or n_b. Infinities are ordered.
    """
    a, b = _group(a, "a"), _group(b, "b")
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} prompts and b has {len(b)}; both sides must answer the same prompts")
    if worst:  # min A > min B exactly when max(-B) > max(-A)
        a, b = -b, -a
    a, b = a.sort(dim=1).values, b.sort(dim=1).values
    weights_a = order_weights(a.shape[1], _checked_n(n, a.shape[1])).to(a.device)
    weights_b = order_weights(b.shape[1], _checked_n(n, b.shape[1])).to(b.device)
    cdf = torch.cat([weights_b.new_zeros(1), weights_b.cumsum(0)])
    below, upto = torch.searchsorted(b, a), torch.searchsorted(b, a, right=True)
    return (weights_a * (cdf[below] + cdf[upto]) / 2).sum(1)


def bootstrap(
    per_prompt: Tensor, *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over prompts and its percentile bootstrap interval: (..., P) -> mean, low, high, each (...).

    Prompts are drawn with replacement, the same ones for every leading index, so that rows stay paired. One prompt
    alone has no interval: low and high are NaN. The same seed gives the same interval.

    Raises ValueError for no prompts, NaN or infinite values, resamples < 1 and a level outside (0, 1).
    """
    values = torch.as_tensor(per_prompt).double().cpu()
    if values.dim() == 0 or values.shape[-1] == 0:
        raise ValueError(f"per_prompt must have shape (..., P) with P >= 1, got {tuple(values.shape)}")
    if not values.isfinite().all():
        raise ValueError(
            f"per_prompt holds {(~values.isfinite()).sum()} NaN or infinite values; leave those prompts out"
        )
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"need resamples >= 1 and 0 < level < 1, got resamples={resamples}, level={level}")
    mean, prompts = values.mean(-1), values.shape[-1]
    if prompts == 1:
        return mean, torch.full_like(mean, math.nan), torch.full_like(mean, math.nan)
    means = _resampled_means(values, resamples, torch.Generator().manual_seed(seed))
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(means, edges, dim=0)
    return mean, low, high


def _resampled_means(values: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """Means over prompts drawn with replacement: (..., P) -> (resamples, ...)."""
    prompts = values.shape[-1]
    chunk = max(1, 2**22 // prompts)  # 32 MiB of counts at a time, however many prompts
    parts = []
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = torch.randint(prompts, (rows, prompts), generator=generator)
        counts = torch.zeros(rows, prompts, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        parts.append(torch.tensordot(counts, values, dims=([1], [values.dim() - 1])) / prompts)
    return torch.cat(parts)


def _group(rewards: Tensor, name: str) -> Tensor:
    """``rewards`` in float64, refused unless (P, n) with n >= 1 and without NaN."""
    if not isinstance(rewards, Tensor) or rewards.dim() != 2 or rewards.shape[1] == 0:
        came = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"{name} must be a tensor (P prompts, n >= 1 samples), got {came}")
    rewards = rewards.double()
    if rewards.isnan().any():
        prompt, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"{name} holds {rewards.isnan().sum()} NaN, the first at prompt {prompt}, sample {sample}; "
            "leave out the prompts on which a reward abstains"
        )
    return rewards


def _sequence(ns: Sequence[int]) -> list[int]:
    if isinstance(ns, Integral) or len(ns) == 0:
        raise ValueError(f"ns must be a sequence of one or more N, such as [1, 4], got {ns!r}")
    return list(ns)


def _checked_n(best_of: int, n: int) -> int:
    if not isinstance(best_of, Integral) or not 1 <= best_of <= n:
        raise ValueError(f"N must be an integer from 1 to the {n} samples a prompt, got {best_of!r}; draw more samples")
    return int(best_of)


# --- what a model gave --------------------------------------------------------------------------------------------


@dataclass
class Sampled:
    """What one model gave on the evaluation prompts.

    ``rewards[name]`` is (P, n) with NaN where the reward abstained; of a kernel, each completion's share in the
    diversity of its group. ``lengths`` (P, n) counts tokens. ``objectives`` and ``weights`` have an entry for each
    reward, such as ``"bon:4"`` and 0.5. ``prompts`` and ``completions`` show the first few prompts only.

    Raises ValueError where shapes or names do not agree, and for infinite rewards.
    """

    rewards: dict[str, Tensor]
    lengths: Tensor
    objectives: dict[str, str]
    weights: dict[str, float]
    max_length: int
    prompts: list[str] = field(default_factory=list)
    completions: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rewards or any(set(d) != set(self.rewards) for d in (self.objectives, self.weights)):
            raise ValueError(
                f"every reward needs an objective and a weight: rewards {sorted(self.rewards)}, "
                f"objectives {sorted(self.objectives)}, weights {sorted(self.weights)}"
            )
        for name, values in self.rewards.items():
            if values.dim() != 2 or values.shape != self.lengths.shape:
                raise ValueError(
                    f"reward {name!r} is {tuple(values.shape)}, lengths {tuple(self.lengths.shape)}: not (P, n)"
                )
            if values.isinf().any():
                raise ValueError(f"reward {name!r} holds infinite values; a reward is finite or NaN")

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain lists for ``json.dump``; NaN becomes None."""
        rewards = {
            name: [[None if math.isnan(r) else r for r in row] for row in values.tolist()]
            for name, values in self.rewards.items()
        }
        return {**vars(self), "rewards": rewards, "lengths": self.lengths.tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sampled:
        """The inverse of `to_json`; rewards come back as float64."""
        rewards = {
            name: torch.tensor([[math.nan if r is None else r for r in row] for row in values], dtype=torch.float64)
            for name, values in data["rewards"].items()
        }
        return cls(**{**data, "rewards": rewards, "lengths": torch.tensor(data["lengths"], dtype=torch.int64)})


def write_evaluation(run: Path, **sampled: Sampled) -> None:
    """Write ``evaluation.json``: ``write_evaluation(run, before=..., after=...)``, no ``after`` in training."""
    atomic_write(run / FILE, json.dumps({name: s.to_json() for name, s in sampled.items()}, allow_nan=False))


def read_evaluation(run: Path) -> dict[str, Sampled]:
    """``{"before": ..., "after": ...}`` of a run. Raises ValueError where the file is missing or damaged."""
    path = run / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the run was stopped before its evaluation; resume it to finish")
    try:
        return {name: Sampled.from_json(data) for name, data in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} cannot be read ({error}); resume the run to evaluate again") from error


# --- summary ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One number with its interval: ``value`` of ``reward`` under ``procedure`` (``"mean"``, ``"best-of-4"``)."""

    reward: str
    procedure: str
    value: float
    low: float
    high: float


def weighted_best_of_n(sampled: Sampled, ns: Sequence[int]) -> Tensor:
    """``sum_i w_i BoN_i`` of each prompt: (len(ns), P'), over the P' prompts on which no reward abstains.

    Each reward picks its own best of N, as in the training objective ``sum_i w_i R_i``; from diversity nothing is
    picked, it counts as it is.
    """
    picks = {name: "diversity" if is_pairwise(text) else "best" for name, text in sampled.objectives.items()}
    return _weighted(sampled, ns, picks)


def summarize(sampled: Sampled, ns: Sequence[int] = (1, 4)) -> list[Row]:
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


def _weighted(sampled: Sampled, ns: Sequence[int], picks: Mapping[str, str]) -> Tensor:
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


def before_after_table(before: Sampled, after: Sampled, ns: Sequence[int] = (1, 4)) -> Table:
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
