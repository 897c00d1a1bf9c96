"""Results of an evaluation as entries with intervals and tests, and as tables.

Every number is a mean over prompts with a 95% bootstrap interval; models are compared on the prompts that both have.
Samples without a reward count nowhere. A prompt with fewer than N others has no best-of-N, and is left out and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from nlgrpo.evaluation.estimators import (
    best_of_n,
    bootstrap,
    maj_at_k,
    over_present,
    paired_test,
    procedure_value,
    procedure_win_rate,
    selected_value,
    two_way_interval,
    weighted_win_rate,
    worst_of_n,
)
from nlgrpo.evaluation.recorded import Recorded
from nlgrpo.objectives.rank_based import OfN
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
    coverage: Coverage = field(default_factory=Coverage)

    @classmethod
    def of(
        cls, per_prompt: Tensor, scored: Tensor, rewards: dict[str, int] | None = None, *, seeds: int = 1
    ) -> Estimate:
        """Mean of ``per_prompt`` (P,) over the prompts with a value. Other arguments: see `Coverage.of`.

        With several ``seeds``, one after the other, the interval is over seeds and prompts, and a prompt counts if it
        has a value for each of them.
        """
        of_seeds = per_prompt.reshape(seeds, len(per_prompt) // seeds)
        counted = ~of_seeds.isnan().any(0)
        there = of_seeds[:, counted]
        coverage = Coverage.of(of_seeds.masked_fill(~counted, math.nan).flatten(), scored, rewards)
        if seeds > 1 and there.shape[1] > 1:
            value, low, high, _ = two_way_interval(there)
        elif there.numel():
            value, low, high = (x.item() for x in bootstrap(there.mean(0)))
        else:
            value = low = high = math.nan
        return cls(value, low, high, coverage)


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
            again = rewind.parse(text)
            if again is not None:
                yield from _rewound(name, again, rewards, reference.rewards[name])
                continue
            objective = parse(text, user_code.function)
            if not isinstance(objective, MajorityVote):
                yield name, text, *_under(rewards, reference.rewards[name], objective), scored
            elif name in sampled.answers:
                yield name, text, _voted(sampled, name, objective.n), None, scored
        if name in sampled.answers:
            yield from _majorities(name, sampled.votes(name), procedures)
        for judge in gold if name not in gold else ():
            for text in (text for text in procedures if rewind.parse(text) is None and not is_voted(text)):
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


def _voted(sampled: EvaluationSamples, name: str, n: int) -> Tensor:
    """Reward of the response that the majority of n samples chooses, (P,)."""
    return over_present(MajorityVote(n, "unbiased").value, sampled.votes(name), fewest=n)


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
    for text in (text for text in procedures if rewind.parse(text) is None):
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
    e, won = entry.estimate, entry.win_rate
    lines = [_numbers(e.value, e.low, e.high), *e.coverage.lines]
    if won is not None and not math.isnan(won.value):
        lines.append(f"wins {100 * won.value:.1f}%" + _stars(entry.p_value))
        lines += won.coverage.lines if won.coverage != e.coverage else []
    return "\n".join(lines)


def _numbers(value: float, low: float, high: float, gap: str = " ") -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if math.isnan(low) else f"{value:.4f}{gap}[{low:.4f}, {high:.4f}]"


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
    coverage: Coverage = field(default_factory=Coverage)
    n: int = 1

    def heading(self, *, binary: bool) -> str:
        """The procedure as tables show it: best-of-N of a reward that is 0 or 1 is ``"pass@N"``."""
        return f"pass@{self.n}" if binary and self.procedure in ("mean", f"best-of-{self.n}") else self.procedure


@dataclass(frozen=True)
class Change:
    """A number before and after training, and the mean change over the prompts on which both have a value."""

    before: Row
    after: Row
    value: float
    prompts: int


@dataclass(frozen=True)
class _Values:
    """Values of a row per prompt, (P,), NaN where there is none; the samples and rewards behind them."""

    reward: str
    procedure: str
    per_prompt: Tensor
    scored: Tensor  # (P, n)
    applies: Tensor  # (m, P): rewards that score one of the prompt's samples
    rewards: dict[str, int] | None
    n: int
    seeds: int

    def row(self) -> Row:
        found = Estimate.of(self.per_prompt, self.scored, self.rewards, seeds=self.seeds)
        return Row(self.reward, self.procedure, found.value, found.low, found.high, found.coverage, self.n)


def weighted_best_of_n(sampled: EvaluationSamples, ns: Sequence[int]) -> Tensor:
    """Weighted sum ``sum_i w_i BoN_i`` per prompt over the rewards that apply to it, (len(ns), P).

    Each reward chooses its own best of N, as in the training objective ``sum_i w_i R_i``. A diversity reward has its
    mean for every N. A reward applies to a prompt if it scores one of its samples. NaN where none with a weight does,
    and where one of them scores fewer than N samples.
    """
    picks = {name: "diversity" if is_pairwise(text) else "best" for name, text in sampled.objectives.items()}
    return torch.stack([_weighted(sampled, n, picks) for n in ns])


def summarize(sampled: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> list[Row]:
    """Rows with mean (N = 1) and best-of-N of each reward and, for several rewards, of their weighted sum.

    Rewards with the objective "wor:N" have worst-of-N instead, those with "maj:N" the majority of N, and diversity only
    its mean. In the weighted sum each reward is used as in its own rows; the procedure is "each of N" if these differ.
    Samples on which a reward abstains are left out, and prompts with fewer than N others; the sum is over the rewards
    that apply to a prompt (`weighted_best_of_n`). Without any prompt the row is NaN. Intervals are 95%. Raises
    UserError if N exceeds the number of samples per prompt.
    """
    return [values.row() for values in _values(sampled, ns)]


def changes(before: EvaluationSamples, after: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> list[Change]:
    """Rows of `summarize` before and after training. A weighted sum is compared where the same rewards apply."""
    found = []
    for old, new in zip(_values(before, ns), _values(after, ns), strict=True):
        both = torch.zeros(0, dtype=torch.bool)
        if old.applies.shape == new.applies.shape:
            both = (old.applies == new.applies).all(0) & ~(new.per_prompt - old.per_prompt).isnan()
        value = (new.per_prompt[both].mean() - old.per_prompt[both].mean()).item() if both.any() else math.nan
        found.append(Change(old.row(), new.row(), value, int(both.sum())))
    return found


def _values(sampled: EvaluationSamples, ns: Sequence[int]) -> Iterator[_Values]:
    picks = {name: _pick(text) for name, text in sampled.objectives.items()}
    for name, rewards in sampled.rewards.items():
        scored = ~rewards.isnan()
        for n in ns:
            if n == 1 or picks[name] != "diversity":
                values = _picked(sampled, name, n, picks[name])
                yield _Values(
                    name, _procedure(picks[name], n), values, scored, scored.any(1)[None], None, n, sampled.seeds
                )
    if len(sampled.rewards) == 1:
        return
    pick = next(iter(picks.values())) if len(set(picks.values())) == 1 else "each"
    behind = sampled.scored(), torch.stack(list(sampled.applies().values())), sampled.prompts_of_rewards()
    for n in ns:
        if n == 1 or pick != "diversity":
            yield _Values(WEIGHTED_SUM, _procedure(pick, n), _weighted(sampled, n, picks), *behind, n, sampled.seeds)


def binary_rewards(sampled: Mapping[str, EvaluationSamples]) -> list[str]:
    """Names of the rewards that are 0 or 1 wherever there is one, in all models that have them."""
    names = list(dict.fromkeys(name for one in sampled.values() for name in one.rewards))
    return [name for name in names if all(_is_binary(s.rewards[name]) for s in sampled.values() if name in s.rewards)]


def _is_binary(rewards: Tensor) -> bool:
    known = rewards[~rewards.isnan()]
    return len(known) > 0 and bool(((known == 0) | (known == 1)).all())


def _procedure(pick: str, n: int) -> str:
    return "mean" if n == 1 else f"each of {n}" if pick == "each" else f"{pick}-of-{n}"


def metrics(sampled: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> dict[str, float]:
    """Numbers of `summarize`, without intervals, and lengths, as trackers get them.

    TRL's names where it has them: eval_reward (the weighted sum), eval_rewards/NAME/mean, eval_completions/mean_length.
    Beside them are the procedures: eval_reward_best-of-4, eval_rewards/NAME/best-of-4. NaN without any scored prompt.
    A number that is not over all prompts and samples has METRIC/prompts and METRIC/samples beside it.
    """
    rows = summarize(sampled, ns)
    if len(sampled.rewards) == 1:
        weight = sampled.weights[rows[0].reward]
        rows += [replace(row, reward=WEIGHTED_SUM, value=weight * row.value) for row in rows]
    found = {}
    for row in rows:
        of_n = row.procedure.replace(" ", "-")
        total = "eval_reward" if of_n == "mean" else f"eval_reward_{of_n}"
        name = total if row.reward == WEIGHTED_SUM else f"eval_rewards/{row.reward}/{of_n}"
        found[name] = row.value
        if row.coverage.lines:
            found[f"{name}/prompts"] = float(row.coverage.prompts)
            found[f"{name}/samples"] = float(row.coverage.samples)
    lengths = sampled.lengths.double()
    for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
        found[f"eval_completions/{name}_length"] = value.item()
    return found


def _pick(objective: str) -> str:
    if is_voted(objective):
        return "majority"
    return "diversity" if is_pairwise(objective) else "worst" if objective.startswith("wor:") else "best"


def _picked(sampled: EvaluationSamples, name: str, n: int, pick: str) -> Tensor:
    """Best-of-n, worst-of-n or the majority of n of a reward, or for diversity its mean for every n, (P,)."""
    if pick == "majority":
        return _voted(sampled, name, n)
    n = 1 if pick == "diversity" else n
    of_n = partial(worst_of_n if pick == "worst" else best_of_n, ns=[n])
    return over_present(lambda rewards: of_n(rewards)[0], sampled.rewards[name], fewest=n)


def _weighted(sampled: EvaluationSamples, n: int, picks: Mapping[str, str]) -> Tensor:
    """Weighted sum, (P,), of the rewards that apply to a prompt."""
    applies = sampled.applies()
    values = {name: sampled.weights[name] * _picked(sampled, name, n, picks[name]) for name in applies}
    parts = [values[name].where(there, 0.0) for name, there in applies.items()]
    return torch.stack(parts).sum(0).masked_fill(~torch.stack(list(applies.values())).any(0), math.nan)


def format_interval(row: Row, gap: str = " ") -> str:
    """``-0.1234 [-0.1301, -0.1170]``; no brackets without an interval, and "-" for NaN.

    ``(19 of 20 prompts, 303 of 320 samples)`` follows if these are not all. ``gap`` is between the parts.
    """
    lines = row.coverage.lines
    if gap != "\n" and lines:
        lines = [f"({', '.join(lines)})"]
    return gap.join([_numbers(row.value, row.low, row.high, gap), *lines])


def format_change(change: Change, gap: str = " ") -> str:
    """``+0.0123``, or "-" without a prompt that has both values; their number follows if it is not that of all."""
    if math.isnan(change.value):
        return "-"
    some, every = change.prompts, change.after.coverage.of_prompts
    note = f"\n{some} of {every}\nprompts" if gap == "\n" else f"{gap}({some} of {every} prompts)"
    return f"{change.value:+.4f}" + note * (some < every)


def before_after_table(
    before: EvaluationSamples,
    after: EvaluationSamples,
    ns: Sequence[int] = (1, 4),
    recorded: Recorded | None = None,
) -> Table:
    """Table of each reward and procedure before and after training, with 95% intervals over prompts.

    ``recorded``: figures of other models, for a single reward, in a column of their own. Raises UserError if N exceeds
    the number of samples per prompt.
    """
    found = changes(before, after, ns)
    binary = binary_rewards({"before": before, "after": after})
    title = f"before and after training ({after.size}, 95% intervals)"
    headings = ["reward", "procedure", "before", "after", "change"]
    if recorded is not None:  # no room for the reward in 80 columns
        (name,) = after.rewards
        title = f"{name}, trained for {after.objectives[name]} ({after.size}, 95% intervals)"
        headings = [*headings[1:], recorded.label]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, caption_justify="left")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != "reward")
    previous = None
    for change in found:
        # Put intervals below values and objectives below rewards, to fit 80 columns.
        row = change.after
        name = f"{row.reward}\n{after.objectives.get(row.reward, '')}" if row.reward != previous else ""
        cells = [name, row.heading(binary=row.reward in binary)]
        cells += [format_interval(change.before, "\n"), format_interval(row, "\n"), format_change(change, "\n")]
        if recorded is not None:
            cells = [*cells[1:], _numbers(*recorded.values.get(row.n, (math.nan,) * 3), "\n")]
        table.add_row(*map(Text, cells))
        previous = row.reward
    if recorded is not None:
        table.caption = f"{recorded.label}: {recorded.about}"
    return table
