"""Results of an evaluation as entries with intervals and tests, and as tables.

Every number is a mean over prompts with a 95% bootstrap interval; models are compared on the prompts that both have.
Samples without a reward count nowhere. A prompt with fewer than N others has no best-of-N, and is left out and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from nlgrpo.engine.rollouts.evaluation_samples import Coverage, EvaluationSamples
from nlgrpo.estimators import (
    maj_at_k,
    over_present,
    paired_test,
    procedure_value,
    procedure_win_rate,
    selected_value,
    two_way_interval,
    weighted_win_rate,
)
from nlgrpo.objectives.rank_based import OfN
from nlgrpo.objectives.registry import BestOfN, MajorityVote, Objective, is_pairwise, is_voted, parse
from nlgrpo.runtime import user_code
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.training.evaluation_summary import Estimate, format_numbers, voted

RESULTS_FILE = "results.json"


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
        for quantity, procedure, values, wins, scored in _measured(sampled, reference, procedures, gold):
            seeds = sampled.seeds
            entry = Entry(label, quantity, procedure, Estimate.of(values, scored, seeds=seeds))
            if label == name:
                base[quantity, procedure] = values
            else:
                won = None if wins is None else Estimate.of(wins, scored, seeds=seeds)
                reference_values = base.get((quantity, procedure))
                entry = compared(replace(entry, win_rate=won), values, reference_values, scored, seeds=seeds)
            rows.append(entry)
    return rows


def compared(entry: Entry, values: Tensor, base: Tensor | None, scored: Tensor, *, seeds: int = 1) -> Entry:
    """Return an entry with its change from the reference, at the prompts on which both have values, (P,) each.

    With several ``seeds``, the interval and the test are over seeds and prompts, as in `Estimate.of`.
    """
    both = torch.zeros(0, dtype=torch.bool) if base is None else ~(values.isnan() | base.isnan())
    if base is None or not both.any():
        return entry
    if seeds > 1:
        both = both.view(seeds, -1).all(0).repeat(seeds)
        if both.sum() < 2 * seeds:
            return entry
        mean, low, high, p = two_way_interval((values - base)[both].view(seeds, -1))
    else:
        mean, low, high, p = paired_test(values[both], base[both])
    coverage = Coverage.of(values.masked_fill(~both, math.nan), scored)
    return replace(entry, change=Estimate(mean, low, high, coverage), p_value=p)


Measured = Iterator[tuple[str, str, Tensor, Tensor | None, Tensor]]


def _measured(
    sampled: EvaluationSamples, reference: EvaluationSamples, procedures: Sequence[str], gold: Sequence[str]
) -> Measured:
    """Yield (quantity, procedure, value per prompt, win rate per prompt, which samples count); NaN is undefined."""
    for name, rewards in sampled.rewards.items():
        scored = ~rewards.isnan()
        if is_pairwise(sampled.objectives[name]):
            yield name, "mean", rewards.nanmean(1), None, scored
            continue
        for text in procedures:
            again = rewind.parse_rewind(text)
            if again is not None:
                yield from _rewound(name, again, rewards, reference.rewards[name])
                continue
            objective = parse(text, user_code.function)
            if not isinstance(objective, MajorityVote):
                yield name, text, *_under(rewards, reference.rewards[name], objective), scored
            elif name in sampled.answers:
                yield name, text, voted(sampled, name, objective.n), None, scored
        if name in sampled.answers:
            yield from _majorities(name, sampled.votes(name), procedures)
        for judge in gold if name not in gold else ():
            for text in (text for text in procedures if rewind.parse_rewind(text) is None and not is_voted(text)):
                objective = parse(text, user_code.function)
                judged = sampled.rewards[judge]
                values = _chosen(rewards, judged, objective)
                yield f"{judge} by choice of {name}", text, values, None, scored & ~judged.isnan()
    every = torch.ones_like(sampled.lengths, dtype=torch.bool)
    for kind, values in sampled.kl.items():
        yield f"kl/{kind}", "", values.mean(1), None, every
    yield "length", "", sampled.lengths.double().mean(1), None, every
    for n, values in sampled.distinct.items():
        yield f"distinct/{n}", "", values, None, every


def _needed(objective: Objective) -> int:
    """Number of samples of a prompt that an estimate of the objective needs."""
    return objective.n if isinstance(objective, OfN | MajorityVote) else objective.fewest


def _under(rewards: Tensor, reference: Tensor, objective: Objective) -> tuple[Tensor, Tensor | None]:
    """Value and win rate per prompt under an objective; the win rate is None if the objective does not choose."""
    fewest = _needed(objective)
    values = over_present(partial(procedure_value, objective=objective), rewards, fewest=fewest)
    try:
        won = over_present(partial(procedure_win_rate, objective=objective), rewards, reference, fewest=fewest)
    except ValueError:
        return values, None
    return values, won


def _rewound(name: str, again: RewindAndRepeat, rewards: Tensor, reference: Tensor) -> Measured:
    """Yield the reward of the answer and the number of draws, for prompts on which the reference has rewards too."""

    def value(ours: Tensor, base: Tensor) -> Tensor:
        return (again.chosen(ours, base)[0] * ours).sum(1)

    def won(ours: Tensor, base: Tensor) -> Tensor:
        return weighted_win_rate(ours, again.chosen(ours, base)[0], base, again.chosen(base, base)[0])

    def draws(ours: Tensor, base: Tensor) -> Tensor:
        return again.chosen(ours, base)[1]

    of_both = partial(over_present, fewest=again.most)
    scored = ~rewards.isnan()
    yield name, str(again), of_both(value, rewards, reference), of_both(won, rewards, reference), scored
    yield f"draws until {name}", str(again), of_both(draws, rewards, reference), None, scored


def _majorities(name: str, votes: Tensor, procedures: Sequence[str]) -> Measured:
    for text in (text for text in procedures if rewind.parse_rewind(text) is None):
        objective = parse(text, user_code.function)
        if isinstance(objective, BestOfN):
            values = over_present(partial(_majority, n=objective.n), votes, fewest=objective.n)
            yield name, f"maj@{objective.n}", values, None, ~votes[..., 0].isnan()


def _majority(votes: Tensor, n: int) -> Tensor:
    return maj_at_k(votes[..., 0], votes[..., 1].long(), [n])[0]


def _chosen(rewards: Tensor, gold: Tensor, objective: Objective) -> Tensor:
    """Value per prompt of the gold reward when ``rewards`` chooses the response, among samples that have both."""

    def value(both: Tensor) -> Tensor:
        return selected_value(both[..., 0], both[..., 1], objective)

    return over_present(value, torch.stack([rewards, gold], -1), fewest=_needed(objective))


def write(
    found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str], cfg: Config, folder: Path
) -> None:
    """Write ``results.json``: all entries, what was evaluated, the configuration and the versions."""
    rows = [asdict(entry, dict_factory=Coverage.fields) for entry in entries(found, procedures, gold)]
    content: dict[str, object] = {"nlgrpo": __version__, "torch": torch.__version__, "config": to_dict(cfg)}
    content |= {"evaluated": next(iter(found.values())).sizes, "results": rows}
    atomic_write(folder / RESULTS_FILE, json.dumps(_no_nan(content), indent=1) + "\n")


def _no_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _no_nan(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str]) -> Iterator[Table]:
    """Yield one table per quantity: a row per procedure, a column per model, with win rates against the reference."""
    every = entries(found, procedures, gold)
    size = next(iter(found.values())).size
    for quantity in dict.fromkeys(entry.quantity for entry in every if entry.procedure):
        rows = [entry for entry in every if entry.quantity == quantity]
        yield _table(f"{quantity} ({size})", rows, list(found), "procedure")
    rows = [Entry(entry.model, "", entry.quantity, entry.estimate) for entry in every if not entry.procedure]
    yield _table("KL to the reference, length, diversity", rows, list(found), "")


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
    if entry is None:
        return "-"
    e = entry.estimate
    won = entry.win_rate
    lines = [format_numbers(e.value, e.low, e.high), *e.coverage.lines]
    if won is not None and not math.isnan(won.value):
        lines.append(f"wins {100 * won.value:.1f}%" + _stars(entry.p_value))
        lines += won.coverage.lines if won.coverage != e.coverage else []
    return "\n".join(lines)


def _stars(p: float) -> str:
    """Text of the p-value; empty for NaN."""
    return "" if math.isnan(p) else f", p {p:.2g}" if p >= 0.001 else ", p < 0.001"
