"""Results of an evaluation as entries with intervals and tests, and as tables.

Every number is a mean over prompts with a 95% bootstrap interval; models are compared on the same prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo import __version__
from nlgrpo.calibration import rewind
from nlgrpo.calibration.rewind import RewindAndRepeat
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.evaluation.estimators import (
    best_of_n,
    bootstrap,
    maj_at_k,
    paired_test,
    procedure_value,
    procedure_win_rate,
    selected_value,
    weighted_win_rate,
    worst_of_n,
)
from nlgrpo.objectives.registry import BestOfN, MajorityVote, Objective, is_pairwise, is_voted, parse
from nlgrpo.runtime import user_code
from nlgrpo.runtime.atomic_files import atomic_write

FILE = "results.json"
WEIGHTED_SUM = "weighted sum"


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95% interval; NaN if there is none."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, per_prompt: Tensor) -> Estimate:
        there = per_prompt[~per_prompt.isnan()]
        return cls(*(x.item() for x in bootstrap(there))) if len(there) else cls(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Entry:
    """One quantity of a model under one procedure; procedure "" for KL, length and diversity."""

    model: str
    quantity: str  # a reward's name, "reward by choice of another", "kl/k1", "length", "distinct/2"
    procedure: str
    estimate: Estimate
    win_rate: Estimate | None = None  # against the reference under the same procedure
    change: Estimate | None = None  # difference to the reference, prompt by prompt
    p_value: float = math.nan  # of the hypothesis of no change


def entries(found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str]) -> list[Entry]:
    """Return the entries of all models; the first model is the reference."""
    name, reference = next(iter(found.items()))
    base: dict[tuple[str, str], Tensor] = {}
    rows = []
    for label, sampled in found.items():
        for quantity, procedure, values, wins in _measured(sampled, reference, procedures, gold):
            if label == name:
                base[quantity, procedure] = values
                rows.append(Entry(label, quantity, procedure, Estimate.of(values)))
            else:
                rows.append(compared(label, quantity, procedure, values, wins, base.get((quantity, procedure))))
    return rows


def compared(
    label: str, quantity: str, procedure: str, values: Tensor, wins: Tensor | None, base: Tensor | None
) -> Entry:
    """Return the entry of a model, compared with the reference's values ``base`` (P,) unless they are None."""
    estimate, won = Estimate.of(values), None if wins is None else Estimate.of(wins)
    both = torch.zeros(0, dtype=torch.bool) if base is None else ~(values.isnan() | base.isnan())
    if base is None or not both.any():
        return Entry(label, quantity, procedure, estimate, won)
    mean, low, high, p = paired_test(values[both], base[both])
    return Entry(label, quantity, procedure, estimate, won, Estimate(mean, low, high), p)


Measured = Iterator[tuple[str, str, Tensor, Tensor | None]]


def _measured(
    sampled: EvaluationSamples, reference: EvaluationSamples, procedures: Sequence[str], gold: Sequence[str]
) -> Measured:
    """Yield (quantity, procedure, value per prompt, win rate per prompt); undefined values are NaN."""
    for name, rewards in sampled.rewards.items():
        if is_pairwise(sampled.objectives[name]):
            yield name, "mean", rewards.nanmean(1), None
            continue
        for text in procedures:
            again = rewind.parse(text)
            if again is not None:
                yield from _rewound(name, again, rewards, reference.rewards[name])
                continue
            objective = parse(text, user_code.function)
            if not isinstance(objective, MajorityVote):
                yield name, text, *_under(rewards, reference.rewards[name], objective)
            elif name in sampled.answers:
                scored = ~rewards.isnan().any(1)
                yield name, text, _at(scored, _voted(sampled, name, scored, [objective.n])[0]), None
        if name in sampled.answers:
            yield from _majorities(name, rewards, sampled.answers[name], procedures)
        for judge in gold if name not in gold else ():
            for text in (text for text in procedures if rewind.parse(text) is None and not is_voted(text)):
                objective = parse(text, user_code.function)
                yield f"{judge} by choice of {name}", text, _chosen(rewards, sampled.rewards[judge], objective), None
    for kind, values in sampled.kl.items():
        yield f"kl/{kind}", "", values.mean(1), None
    yield "length", "", sampled.lengths.double().mean(1), None
    for n, values in sampled.distinct.items():
        yield f"distinct/{n}", "", values, None


def _voted(sampled: EvaluationSamples, name: str, scored: Tensor, ns: Sequence[int]) -> Tensor:
    """Reward of the response that the majority of N samples chooses, (len(ns), P'), for the P' ``scored`` prompts."""
    rewards, answers = sampled.rewards[name][scored], sampled.answers[name][scored]
    votes = torch.stack([rewards, answers.to(rewards)], -1)
    return torch.stack([MajorityVote(n, "unbiased").value(votes) for n in ns])


def _under(rewards: Tensor, reference: Tensor, objective: Objective) -> tuple[Tensor, Tensor | None]:
    """Value and win rate per prompt under an objective; the win rate is None if the objective does not choose."""
    scored = ~rewards.isnan().any(1)
    values = _at(scored, procedure_value(rewards[scored], objective))
    both = scored & ~reference.isnan().any(1)
    try:
        return values, _at(both, procedure_win_rate(rewards[both], reference[both], objective))
    except ValueError:
        return values, None


def _rewound(name: str, again: RewindAndRepeat, rewards: Tensor, reference: Tensor) -> Measured:
    """Yield the reward of the answer and the number of draws, for prompts on which the reference has rewards too."""
    both = ~(rewards.isnan().any(1) | reference.isnan().any(1))
    if not both.any():
        return
    ours, base = rewards[both], reference[both]
    chances, draws = again.chosen(ours, base)
    won = weighted_win_rate(ours, chances, base, again.chosen(base, base)[0])
    yield name, str(again), _at(both, (chances * ours).sum(1)), _at(both, won)
    yield f"draws until {name}", str(again), _at(both, draws), None


def _majorities(name: str, rewards: Tensor, answers: Tensor, procedures: Sequence[str]) -> Measured:
    scored = ~rewards.isnan().any(1)
    for text in (text for text in procedures if rewind.parse(text) is None):
        objective = parse(text, user_code.function)
        if isinstance(objective, BestOfN):
            yield (
                name,
                f"maj@{objective.n}",
                _at(scored, maj_at_k(rewards[scored], answers[scored], [objective.n])[0]),
                None,
            )


def _chosen(rewards: Tensor, gold: Tensor, objective: Objective) -> Tensor:
    """Value per prompt of the gold reward when ``rewards`` chooses the response."""
    scored = ~(rewards.isnan() | gold.isnan()).any(1)
    return _at(scored, selected_value(rewards[scored], gold[scored], objective))


def _at(where: Tensor, values: Tensor) -> Tensor:
    """Scatter ``values`` into (P,), NaN elsewhere."""
    out = torch.full(where.shape, math.nan, dtype=torch.float64)
    out[where] = values.double().cpu()
    return out


def write(
    found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str], cfg: Config, folder: Path
) -> None:
    """Write ``results.json``: all entries, the configuration and the versions."""
    rows = [asdict(entry) for entry in entries(found, procedures, gold)]
    content = {"nlgrpo": __version__, "torch": torch.__version__, "config": to_dict(cfg), "results": rows}
    atomic_write(folder / FILE, json.dumps(_no_nan(content), indent=1) + "\n")


def _no_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _no_nan(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str]) -> Iterator[Table]:
    """Yield one table per quantity: a row per procedure, a column per model, with win rates against the reference."""
    every = entries(found, procedures, gold)
    prompts, n = next(iter(found.values())).lengths.shape
    for quantity in dict.fromkeys(entry.quantity for entry in every if entry.procedure):
        rows = [entry for entry in every if entry.quantity == quantity]
        yield _table(f"{quantity} ({prompts} prompts x {n} samples)", rows, list(found), "procedure")
    rows = [entry for entry in every if not entry.procedure]
    yield _table(
        "KL to the reference, length, diversity",
        [Entry(e.model, "", e.quantity, e.estimate) for e in rows],
        list(found),
        "",
    )


def _table(title: str, rows: Sequence[Entry], models: Sequence[str], heading: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(heading, no_wrap=True)
    for label in models:
        table.add_column(Text(label))
    for procedure in dict.fromkeys(entry.procedure for entry in rows):
        by_model = {entry.model: entry for entry in rows if entry.procedure == procedure}
        table.add_row(procedure, *(Text(_cell(by_model.get(label))) for label in models))
    return table


def _cell(entry: Entry | None) -> str:
    if entry is None or math.isnan(entry.estimate.value):
        return "-"
    e = entry.estimate
    lines = [f"{e.value:.4f}" + ("" if math.isnan(e.low) else f" [{e.low:.4f}, {e.high:.4f}]")]
    if entry.win_rate is not None:
        lines.append(f"wins {100 * entry.win_rate.value:.1f}%" + _stars(entry.p_value))
    return "\n".join(lines)


def _stars(p: float) -> str:
    """Text of the p-value; empty for NaN."""
    return "" if math.isnan(p) else f", p {p:.2g}" if p >= 0.001 else ", p < 0.001"


# --- before and after training ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One number with its interval: ``value`` of ``reward`` under ``procedure`` (``"mean"``, ``"best-of-4"``)."""

    reward: str
    procedure: str
    value: float
    low: float
    high: float


def weighted_best_of_n(sampled: EvaluationSamples, ns: Sequence[int]) -> Tensor:
    """Weighted sum ``sum_i w_i BoN_i`` per prompt, (len(ns), P'), for the P' prompts on which no reward abstains.

    Each reward chooses its own best of N, as in the training objective ``sum_i w_i R_i``. A diversity reward has its
    mean for every N.
    """
    picks = {name: "diversity" if is_pairwise(text) else "best" for name, text in sampled.objectives.items()}
    return _weighted(sampled, ns, picks)


def summarize(sampled: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> list[Row]:
    """Rows with mean (N = 1) and best-of-N of each reward and, for several rewards, of their weighted sum.

    Rewards with the objective "wor:N" have worst-of-N instead, those with "maj:N" the majority of N, and diversity only
    its mean. In the weighted sum each reward is used as in its own rows; the procedure is "each of N" if these differ.
    A prompt on which a reward abstains for any sample is left out for that reward and for the weighted sum; without
    any prompt the row is NaN. Intervals are 95%. Raises ValueError if N exceeds the number of samples per prompt.
    """
    picks = {name: _pick(text) for name, text in sampled.objectives.items()}
    per_prompt = {
        name: (_picked(sampled, name, ~values.isnan().any(1), ns, picks[name]), picks[name])
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


def metrics(sampled: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> dict[str, float]:
    """Numbers of `summarize`, without intervals, and lengths, as trackers get them.

    TRL's names where it has them: eval_reward (the weighted sum), eval_rewards/NAME/mean, eval_completions/mean_length.
    Beside them are the procedures: eval_reward_best-of-4, eval_rewards/NAME/best-of-4. NaN without any scored prompt.
    """
    rows = summarize(sampled, ns)
    if len(sampled.rewards) == 1:
        weight = sampled.weights[rows[0].reward]
        rows += [replace(row, reward=WEIGHTED_SUM, value=weight * row.value) for row in rows]
    found = {}
    for row in rows:
        of_n = row.procedure.replace(" ", "-")
        total = "eval_reward" if of_n == "mean" else f"eval_reward_{of_n}"
        found[total if row.reward == WEIGHTED_SUM else f"eval_rewards/{row.reward}/{of_n}"] = row.value
    lengths = sampled.lengths.double()
    for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
        found[f"eval_completions/{name}_length"] = value.item()
    return found


def _pick(objective: str) -> str:
    if is_voted(objective):
        return "majority"
    return "diversity" if is_pairwise(objective) else "worst" if objective.startswith("wor:") else "best"


def _picked(sampled: EvaluationSamples, name: str, scored: Tensor, ns: Sequence[int], pick: str) -> Tensor:
    """Best-of-N, worst-of-N or the majority of N of a reward, or for diversity its mean for every N, (len(ns), P')."""
    if pick == "majority":
        return _voted(sampled, name, scored, ns)
    rewards = sampled.rewards[name][scored]
    if pick == "diversity":
        return best_of_n(rewards, [1]).expand(len(ns), -1)
    return (worst_of_n if pick == "worst" else best_of_n)(rewards, ns)


def _weighted(sampled: EvaluationSamples, ns: Sequence[int], picks: Mapping[str, str]) -> Tensor:
    """Weighted sum of the rewards, (len(ns), P'), for the P' prompts on which no reward abstains."""
    scored = ~torch.stack([values.isnan().any(1) for values in sampled.rewards.values()]).any(0)
    parts = [sampled.weights[name] * _picked(sampled, name, scored, ns, picks[name]) for name in sampled.rewards]
    return torch.stack(parts).sum(0)


def format_interval(row: Row, gap: str = " ") -> str:
    """``-0.1234 [-0.1301, -0.1170]``; no brackets without an interval, and "-" for NaN."""
    if math.isnan(row.value):
        return "-"
    return f"{row.value:.4f}" if math.isnan(row.low) else f"{row.value:.4f}{gap}[{row.low:.4f}, {row.high:.4f}]"


def format_change(old: Row, new: Row) -> str:
    """``+0.0123``, or "-" if one of the two is NaN."""
    change = new.value - old.value
    return "-" if math.isnan(change) else f"{change:+.4f}"


def before_after_table(before: EvaluationSamples, after: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> Table:
    """Table of each reward and procedure before and after training, with 95% intervals over prompts.

    Raises ValueError if N exceeds the number of samples per prompt.
    """
    prompts, n = after.lengths.shape
    title = f"before and after training ({prompts} prompts x {n} samples, 95% intervals)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("reward", "procedure", "before", "after", "change"):
        table.add_column(heading, no_wrap=heading != "reward")
    previous = None
    for old, new in zip(summarize(before, ns), summarize(after, ns), strict=True):
        # Put intervals below values and objectives below rewards, to fit 80 columns.
        name = Text(f"{new.reward}\n{after.objectives.get(new.reward, '')}") if new.reward != previous else ""
        cells = (format_interval(row, "\n") for row in (old, new))
        table.add_row(name, new.procedure, *map(Text, cells), format_change(old, new))
        previous = new.reward
    return table
