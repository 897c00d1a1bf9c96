"""Values of models under inference procedures, with intervals, tests and win rates, from samples of an evaluation.

Every number is a mean over prompts with a 95% bootstrap interval; models are compared on the prompts that both have.
Samples without a reward count nowhere. A prompt with fewer than N others has no best-of-N, and is left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nlgrpo.engine.rollouts.evaluation_samples import Coverage, EvaluationSamples
from nlgrpo.errors import UserCodeError, UserError, as_user_error
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
from nlgrpo.objectives.registry import BestOfN, Functional, MajorityVote, Objective, is_pairwise, parse
from nlgrpo.objectives.tilted import EntropicRisk
from nlgrpo.runtime import user_code
from nlgrpo.training.evaluation_summary import Estimate, voted

if TYPE_CHECKING:
    from nlgrpo.calibration.rewind import RewindAndRepeat


def _parse(text: str) -> Objective | RewindAndRepeat:
    if text.partition(":")[0] == "rewind":
        from nlgrpo.calibration import rewind

        return rewind.parse_rewind(text) or parse(text, user_code.function)
    return parse(text, user_code.function)


def expanded(procedures: Sequence[str], ns: Sequence[int], samples: int, key: str, samples_key: str) -> list[str]:
    """Expand "bon" and "wor" to every N (N = 1 is "mean"), and parse the other procedures.

    ``key`` and ``samples_key``: the options that gave ``procedures`` and ``samples``, for messages. Raises UserError
    for an unknown procedure, and for one that needs more samples.
    """
    names = []
    for text in filter(None, map(str.strip, procedures)):
        names += [f"{text}:{n}" for n in ns] if text in ("bon", "wor") else [text]
    found = []
    for name in names:
        with as_user_error():
            chosen = _parse(name)
        if not isinstance(chosen, Objective) and chosen.most > samples:
            raise UserError(f"{key} {chosen}: needs up to {chosen.most} samples, and {samples_key} is {samples}")
        if isinstance(chosen, MajorityVote | OfN) and chosen.n > samples:
            what = "votes" if isinstance(chosen, MajorityVote) else "completions"
            raise UserError(f"{key} {chosen}: {chosen.n} {what} of {samples} samples; increase {samples_key}")
        found.append("mean" if name in ("bon:1", "wor:1") else str(chosen))
    return list(dict.fromkeys(found))


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


Procedures = Mapping[str, "Objective | RewindAndRepeat"]


def entries(found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str]) -> list[Entry]:
    """Return the entries of all models; the first model is the reference."""
    parsed = {text: _parse(text) for text in procedures}
    first, reference = next(iter(found.items()))
    base: dict[tuple[str, str], Tensor] = {}  # values of the reference
    rows = []
    for label, sampled in found.items():
        for measured in _measured(sampled, reference, parsed, gold):
            key = measured.quantity, measured.procedure
            entry = Entry(label, *key, Estimate.of(measured.values, measured.scored, seeds=sampled.seeds))
            if label == first:
                base[key] = measured.values
            else:
                if measured.wins is not None:
                    won = Estimate.of(measured.wins, measured.scored, seeds=sampled.seeds)
                    entry = replace(entry, win_rate=won)
                entry = compared(entry, measured.values, base.get(key), measured.scored, seeds=sampled.seeds)
            rows.append(entry)
    return rows


def compared(entry: Entry, values: Tensor, base: Tensor | None, scored: Tensor, *, seeds: int = 1) -> Entry:
    """Return an entry with its change from the reference, at the prompts on which both have values, (P,) each.

    With several ``seeds``, the interval and the test are over seeds and prompts, as in `Estimate.of`.
    """
    if base is None:
        return entry
    both = ~(values.isnan() | base.isnan())
    if not both.any():
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


@dataclass(frozen=True)
class Measured:
    """A quantity of a model per prompt under one procedure."""

    quantity: str
    procedure: str
    values: Tensor  # (P,), NaN where there is none
    scored: Tensor  # (P, n): the samples that count
    wins: Tensor | None = None  # (P,): win rates against the reference


def _measured(
    sampled: EvaluationSamples, reference: EvaluationSamples, procedures: Procedures, gold: Sequence[str]
) -> Iterator[Measured]:
    """Measure all rewards of a model under all procedures, then its KL, lengths and diversity."""
    for name, rewards in sampled.rewards.items():
        if is_pairwise(sampled.objectives[name]):
            yield Measured(name, "mean", rewards.nanmean(1), ~rewards.isnan())
            continue
        yield from _of_reward(name, sampled, reference.rewards[name], procedures)
        if name not in gold:
            for judge in gold:
                yield from _judged(name, judge, sampled, procedures)
    every = torch.ones_like(sampled.lengths, dtype=torch.bool)
    for kind, values in sampled.kl.items():
        yield Measured(f"kl/{kind}", "", values.mean(1), every)
    yield Measured("length", "", sampled.lengths.double().mean(1), every)
    for n, values in sampled.distinct.items():
        yield Measured(f"distinct/{n}", "", values, every)


def _of_reward(name: str, sampled: EvaluationSamples, reference: Tensor, procedures: Procedures) -> Iterator[Measured]:
    """Measure a reward under all procedures, and majority votes beside best-of-N if it extracts answers."""
    rewards = sampled.rewards[name]
    scored = ~rewards.isnan()
    for text, procedure in procedures.items():
        if not isinstance(procedure, Objective):
            yield from _rewound(name, procedure, rewards, reference)
        elif not isinstance(procedure, MajorityVote):
            yield _under(name, text, rewards, reference, procedure)
        elif name in sampled.answers:
            yield Measured(name, text, voted(sampled, name, procedure.n), scored)
    if name not in sampled.answers:
        return
    votes = sampled.votes(name)
    for procedure in procedures.values():
        if isinstance(procedure, BestOfN):
            values = over_present(partial(_majority, n=procedure.n), votes, fewest=procedure.n)
            yield Measured(name, f"maj@{procedure.n}", values, scored)


def _judged(name: str, judge: str, sampled: EvaluationSamples, procedures: Procedures) -> Iterator[Measured]:
    """Measure a gold reward, ``judge``, of the responses that the reward ``name`` chooses."""
    rewards = sampled.rewards[name]
    judged = sampled.rewards[judge]
    scored = ~rewards.isnan() & ~judged.isnan()
    for text, procedure in procedures.items():
        if isinstance(procedure, Objective) and not isinstance(procedure, MajorityVote | Functional | EntropicRisk):
            yield Measured(f"{judge} by choice of {name}", text, _chosen(rewards, judged, procedure), scored)


def needed(objective: Objective) -> int:
    """Number of samples of a prompt that an estimate of the objective needs."""
    return objective.n if isinstance(objective, OfN | MajorityVote) else objective.fewest


def _under(name: str, text: str, rewards: Tensor, reference: Tensor, objective: Objective) -> Measured:
    """Measure a reward under an objective; there is no win rate if the objective does not choose."""
    fewest = needed(objective)
    try:
        values = over_present(partial(procedure_value, objective=objective), rewards, fewest=fewest)
    except ValueError as error:
        if not isinstance(objective, Functional):
            raise
        raise UserCodeError(f"procedure {text}: {error}") from error.__cause__
    try:
        wins = over_present(partial(procedure_win_rate, objective=objective), rewards, reference, fewest=fewest)
    except ValueError:
        wins = None
    return Measured(name, text, values, ~rewards.isnan(), wins)


def _rewound(name: str, again: RewindAndRepeat, rewards: Tensor, reference: Tensor) -> Iterator[Measured]:
    """Measure the reward of the answer and the number of draws, on prompts where the reference has rewards too."""

    def value(ours: Tensor, base: Tensor) -> Tensor:
        return (again.chosen(ours, base)[0] * ours).sum(1)

    def won(ours: Tensor, base: Tensor) -> Tensor:
        return weighted_win_rate(ours, again.chosen(ours, base)[0], base, again.chosen(base, base)[0])

    def draws(ours: Tensor, base: Tensor) -> Tensor:
        return again.chosen(ours, base)[1]

    of_both = partial(over_present, fewest=again.most)
    scored = ~rewards.isnan()
    wins = of_both(won, rewards, reference)
    yield Measured(name, str(again), of_both(value, rewards, reference), scored, wins)
    yield Measured(f"draws until {name}", str(again), of_both(draws, rewards, reference), scored)


def _majority(votes: Tensor, n: int) -> Tensor:
    return maj_at_k(votes[..., 0], votes[..., 1].long(), [n])[0]


def _chosen(rewards: Tensor, gold: Tensor, objective: Objective) -> Tensor:
    """Value per prompt of the gold reward when ``rewards`` chooses the response, among samples that have both."""

    def value(both: Tensor) -> Tensor:
        return selected_value(both[..., 0], both[..., 1], objective)

    return over_present(value, torch.stack([rewards, gold], -1), fewest=needed(objective))
