"""Summary of an evaluation: mean, best-of-N and their relatives of each reward, before and after training.

Every number is a mean over prompts with a 95% bootstrap interval; models are compared on the prompts that both have.
Samples without a reward count nowhere. A prompt with fewer than N others has no best-of-N, and is left out and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.engine.rollouts.evaluation_samples import Coverage, EvaluationSamples
from nlgrpo.estimators import best_of_n, bootstrap, over_present, two_way_interval, worst_of_n
from nlgrpo.objectives.registry import MajorityVote, is_pairwise, is_voted

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
    """A number before and after training, and the mean change over the prompts on which both have a value.

    ``low`` and ``high``: the 95% interval of the change, paired by prompt; NaN if there is none.
    """

    before: Row
    after: Row
    value: float
    prompts: int
    low: float = math.nan
    high: float = math.nan

    @property
    def interval(self) -> str:
        """``"[+0.0123, +0.0456]"``, empty if there is none."""
        return "" if math.isnan(self.low) else f"[{self.low:+.4f}, {self.high:+.4f}]"


@dataclass(frozen=True)
class _Values:
    """Values of a row per prompt, (P,), NaN where there is none; the samples and rewards behind them."""

    reward: str
    procedure: str
    n: int
    per_prompt: Tensor
    scored: Tensor  # (P, n)
    applies: Tensor  # (m, P): rewards that score one of the prompt's samples
    seeds: int
    rewards: dict[str, int] | None = None

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
        change = Change(old.row(), new.row(), math.nan, 0)
        if old.applies.shape == new.applies.shape:
            differences = new.per_prompt - old.per_prompt
            both = (old.applies == new.applies).all(0) & ~differences.isnan()
            if prompts := int(both.sum()):
                value = (new.per_prompt[both].mean() - old.per_prompt[both].mean()).item()
                paired = Estimate.of(differences.masked_fill(~both, math.nan), new.scored, seeds=new.seeds)
                change = replace(change, value=value, prompts=prompts, low=paired.low, high=paired.high)
        found.append(change)
    return found


def what_changed(before: EvaluationSamples, after: EvaluationSamples, ns: Sequence[int] = (1, 4)) -> str:
    """Return the changes of the reward, or of the weighted sum of several, in a line: two N, first the trained one.

    ``"solved: pass@8 +0.0964 [+0.0760, +0.1190], pass@1 +0.2651 [+0.2301, +0.3002] (95%, paired by prompt)"``, or that
    nothing can be compared. If the trained N is not in ``ns``, the first one is the smallest.
    """
    found = changes(before, after, ns)
    if not found:  # diversity has a value for N = 1 only
        return f"no reward has a value for N = {', '.join(map(str, ns))}"
    name = found[-1].after.reward
    binary = name in binary_rewards({"before": before, "after": after})
    trained = {int(n) for text in after.objectives.values() for n in re.findall(r"^(?:bon|wor|maj):(\d+)", text)}
    of_name = [change for change in found if change.after.reward == name and not math.isnan(change.value)]
    of_name.sort(key=lambda change: (change.after.n not in trained, change.after.n))
    shown = []
    for change in of_name[:2]:
        shown.append(f"{change.after.heading(binary=binary)} {format_change(change)} {change.interval}".strip())
    if not shown:
        return f"{name}: no prompt has a value before and after training"
    note = " (95%, paired by prompt)" if any(change.interval for change in of_name[:2]) else ""
    return f"{name}: {', '.join(shown)}{note}"


def _values(sampled: EvaluationSamples, ns: Sequence[int]) -> Iterator[_Values]:
    picks = {name: _pick(text) for name, text in sampled.objectives.items()}
    for name, rewards in sampled.rewards.items():
        pick = picks[name]
        scored = ~rewards.isnan()
        for n in ns:
            if n == 1 or pick != "diversity":
                values = _picked(sampled, name, n, pick)
                yield _Values(name, _procedure(pick, n), n, values, scored, scored.any(1)[None], sampled.seeds)
    if len(sampled.rewards) == 1:
        return
    different = set(picks.values())
    pick = different.pop() if len(different) == 1 else "each"
    applies = torch.stack(list(sampled.applies().values()))
    for n in ns:
        if n == 1 or pick != "diversity":
            values = _weighted(sampled, n, picks)
            rewards_of = sampled.prompts_of_rewards()
            yield _Values(
                WEIGHTED_SUM, _procedure(pick, n), n, values, sampled.scored(), applies, sampled.seeds, rewards_of
            )


def binary_rewards(sampled: Mapping[str, EvaluationSamples]) -> list[str]:
    """Names of the rewards that are 0 or 1 wherever there is one, in all models that have them."""
    binary: dict[str, bool] = {}
    for one in sampled.values():
        for name, rewards in one.rewards.items():
            known = rewards[~rewards.isnan()]
            this = len(known) > 0 and bool(((known == 0) | (known == 1)).all())
            binary[name] = binary.get(name, True) and this
    return [name for name, whole in binary.items() if whole]


def _procedure(pick: str, n: int) -> str:
    if n == 1:
        return "mean"
    return f"each of {n}" if pick == "each" else f"{pick}-of-{n}"


def _pick(objective: str) -> str:
    if is_voted(objective):
        return "majority"
    return "diversity" if is_pairwise(objective) else "worst" if objective.startswith("wor:") else "best"


def _picked(sampled: EvaluationSamples, name: str, n: int, pick: str) -> Tensor:
    """Best-of-n, worst-of-n or the majority of n of a reward, or for diversity its mean for every n, (P,)."""
    if pick == "majority":
        return voted(sampled, name, n)
    if pick == "diversity":
        n = 1
    of_n = worst_of_n if pick == "worst" else best_of_n
    return over_present(lambda rewards: of_n(rewards, [n])[0], sampled.rewards[name], fewest=n)


def voted(sampled: EvaluationSamples, name: str, n: int) -> Tensor:
    """Reward of the response that the majority of n samples chooses, (P,)."""
    return over_present(MajorityVote(n, "unbiased").value, sampled.votes(name), fewest=n)


def _weighted(sampled: EvaluationSamples, n: int, picks: Mapping[str, str]) -> Tensor:
    """Weighted sum, (P,), of the rewards that apply to a prompt."""
    applies = sampled.applies()
    parts = []
    for name, there in applies.items():
        value = sampled.weights[name] * _picked(sampled, name, n, picks[name])
        parts.append(value.where(there, 0.0))
    anywhere = torch.stack(list(applies.values())).any(0)
    return torch.stack(parts).sum(0).masked_fill(~anywhere, math.nan)


def number_lines(value: float, low: float, high: float) -> list[str]:
    """``["0.1234", "[0.1201, 0.1270]"]``; no second one without an interval, and "-" for NaN."""
    if math.isnan(value):
        return ["-"]
    if math.isnan(low):
        return [f"{value:.4f}"]
    return [f"{value:.4f}", f"[{low:.4f}, {high:.4f}]"]


def format_numbers(value: float, low: float, high: float, gap: str = " ") -> str:
    """`number_lines` as one text."""
    return gap.join(number_lines(value, low, high))


def format_interval(row: Row, gap: str = " ") -> str:
    """``-0.1234 [-0.1301, -0.1170]``; no brackets without an interval, and "-" for NaN.

    ``(19 of 20 prompts, 303 of 320 samples)`` follows if these are not all. ``gap`` is between the parts.
    """
    parts = number_lines(row.value, row.low, row.high)
    if gap == "\n":
        parts += row.coverage.lines
    elif row.coverage.lines:
        parts.append(f"({', '.join(row.coverage.lines)})")
    return gap.join(parts)


def format_change(change: Change, gap: str = " ") -> str:
    """``+0.0123``, or "-" without a prompt that has both values; their number follows if it is not that of all."""
    if math.isnan(change.value):
        return "-"
    shown = f"{change.value:+.4f}"
    some = change.prompts
    every = change.after.coverage.of_prompts
    if some >= every:
        return shown
    if gap == "\n":
        return f"{shown}\n{some} of {every}\nprompts"
    return f"{shown}{gap}({some} of {every} prompts)"


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
            cells = [*cells[1:], format_numbers(*recorded.values.get(row.n, (math.nan,) * 3), "\n")]
        table.add_row(*map(Text, cells))
        previous = row.reward
    if recorded is not None:
        table.caption = f"{recorded.label}: {recorded.about}"
    return table


# --- figures of GRPO, recorded once, to be shown beside those of a run ----------------------------------------------


RECORDED = "maze-grpo.json"
Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Recorded:
    """pass@k of models that were trained once: value and 95% interval for each k, and how they were made."""

    label: str
    about: str
    values: Mapping[int, Interval]


def recorded_for(config: Mapping[str, Any]) -> Recorded | None:
    """Return the recorded figures that may be compared with a run of this configuration, as a dictionary.

    None unless the run trains the same model from the same weights, and evaluates it on the same prompts with the same
    reward.
    """
    content = json.loads((files("nlgrpo.data") / "assets" / RECORDED).read_text("utf-8"))
    if any(value_of(config, key) != value for key, value in content["same"].items()):
        return None
    rewards = config.get("rewards")
    rewards = rewards if isinstance(rewards, Mapping) else {}
    if [value_of(rewards, f"{name}.function") for name in rewards] != [content["reward"]]:
        return None
    values = {int(k): (value, low, high) for k, (value, low, high) in content["pass_at_k"].items()}
    return Recorded(content["label"], content["about"], values)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Value of a key such as ``"model.path"``; None if the configuration, read from a file, does not have it."""
    section, _, name = key.partition(".")
    found = config.get(section)
    return found.get(name) if isinstance(found, Mapping) else None
