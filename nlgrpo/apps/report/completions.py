"""The completions that runs saved, during training and in evaluations, as plain data for the page's browser of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from nlgrpo.apps.report.logged import is_number
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.training.tracking import run_files

TEXT = 20_000  # most characters of a prompt or a completion
IN_ALL = 40_000_000  # most bytes of all of them


@dataclass
class Completion:
    """A completion. ``numbers``: values of `Source.numbers`, None where there is none; ``returned``: by what."""

    text: str
    numbers: list[float | None]
    note: str = ""
    returned: str = ""


@dataclass
class Group:
    """Completions of a prompt, by model: of one step of training, or of an evaluation (``step`` is None)."""

    prompt: str
    step: int | None
    columns: dict[str, list[Completion]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes on the page, at most 200 for the numbers of a completion."""
        samples = [one for column in self.columns.values() for one in column]
        return _bytes(self.prompt) + sum(200 + _bytes(one.text) for one in samples)


@dataclass
class Source:
    """What the browser shows at a time: the completions of an evaluation, or of the training of a run."""

    name: str
    numbers: list[str]
    groups: list[Group]

    @property
    def marked(self) -> bool:
        """Whether a procedure returns one of the completions."""
        return any(one.returned for group in self.groups for column in group.columns.values() for one in column)


def browser(sources: Sequence[Source], colours: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of the browser. Of too many bytes, groups are left out at equal distances, and counted."""
    total = sum(group.size for source in sources for group in source.groups)
    every = math.ceil(total / IN_ALL)
    shown = []
    for source in sources:
        kept = source.groups[:: max(1, every)]
        groups = [_as_data(group) for group in kept]
        left_out = len(source.groups) - len(kept)
        shown.append({"name": source.name, "numbers": source.numbers, "groups": groups, "left_out": left_out})
    return {"colours": dict(colours), "sources": shown}


def _as_data(group: Group) -> dict[str, Any]:
    data = asdict(group)
    data["columns"] = [
        {"name": name, "samples": [[one["text"], one["numbers"], one["note"], one["returned"]] for one in column]}
        for name, column in data["columns"].items()
    ]
    return data


# --- where they come from ---------------------------------------------------------------------------------------------


def of_training(folder: Path, name: str, label: str, objectives: Mapping[str, str]) -> Source | None:
    """Read the `samples.jsonl` of a run; None if it has none. ``label``: of the run, ``objectives``: by reward."""
    rows = run_files.read_jsonl(folder / run_files.SAMPLES_FILE)
    if not rows:
        return None
    rewards = _names(rows, "rewards")
    linearized = _names(rows, "linearized")
    numbers = [*rewards, *(f"linearized {name}" for name in linearized), "advantage", "tokens"]
    groups = []
    for (step, _, prompt), of_group in groupby(
        rows, key=lambda row: (row["step"], row.get("group"), row.get("prompt"))
    ):
        column = []
        samples = list(of_group)
        for row in samples:
            values = [_value(row, "rewards", name) for name in rewards]
            values += [_value(row, "linearized", name) for name in linearized]
            values += [_number(row.get("advantage")), _number(row.get("tokens"))]
            extra = row.get("extra")
            note = ", ".join(f"{key} {value}" for key, value in extra.items()) if isinstance(extra, Mapping) else ""
            column.append(Completion(_cut(row.get("completion")), values, note[:TEXT]))
        by_reward = {name: [_value(row, "rewards", name) for row in samples] for name in rewards}
        _mark(column, by_reward, objectives)
        groups.append(Group(_cut(prompt), step, {label: column}))
    return Source(name, numbers, groups)


def of_evaluation(name: str, sampled: Mapping[str, EvaluationSamples]) -> Source | None:
    """Return the saved completions of an evaluation's models side by side, by prompt; None if there are none."""
    known = {label: one for label, one in sampled.items() if one.prompts and one.completions}
    if not known:
        return None
    rewards = list(dict.fromkeys(reward for one in known.values() for reward in one.rewards))
    groups: dict[str, Group] = {}
    for label, one in known.items():
        for number, prompt in enumerate(one.prompts[: len(one.completions)]):
            group = groups.setdefault(prompt, Group(_cut(prompt), None))
            if label not in group.columns:  # the same prompt again, in another seed
                group.columns[label] = list(_of_model(one, number, rewards))
    return Source(name, [*rewards, "tokens"], list(groups.values()))


def _of_model(sampled: EvaluationSamples, prompt: int, rewards: Sequence[str]) -> Iterator[Completion]:
    texts = sampled.completions[prompt][: sampled.lengths.shape[1]]
    values: dict[str, list[float | None]] = {}
    for name in rewards:
        of_prompt = sampled.rewards[name][prompt, : len(texts)].tolist() if name in sampled.rewards else []
        values[name] = [_number(x) for x in of_prompt] or [None] * len(texts)
    lengths = sampled.lengths[prompt].tolist()
    column = []
    for j, text in enumerate(texts):
        column.append(Completion(_cut(text), [*(values[name][j] for name in rewards), lengths[j]]))
    every = {name: [_number(x) for x in of_all[prompt].tolist()] for name, of_all in sampled.rewards.items()}
    _mark(column, every, sampled.objectives)
    return iter(column)


def _names(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    found: dict[str, None] = {}
    for row in rows:
        values = row.get(key)
        if isinstance(values, Mapping):
            found |= dict.fromkeys(values)
    return list(found)


def _value(row: Mapping[str, Any], key: str, name: str) -> float | None:
    values = row.get(key)
    return _number(values.get(name)) if isinstance(values, Mapping) else None


def _number(value: Any) -> float | None:
    """Return a number with six digits; None for anything else, NaN and infinities."""
    return float(f"{value:.6g}") if is_number(value) else None


def _bytes(text: str) -> int:
    """Number of bytes of a text in the page, where markup and control characters are written as six characters."""
    return len(text.encode(errors="replace")) + 5 * sum(c in "<>&'" or c < " " for c in text)


def _cut(text: Any) -> str:
    text = text if isinstance(text, str) else str(text)
    if len(text) <= TEXT:
        return text
    return f"{text[:TEXT]} … ({len(text) - TEXT:,} more characters are in the run's files)"


# --- what a procedure returns -----------------------------------------------------------------------------------------


def _mark(
    column: Sequence[Completion], rewards: Mapping[str, Sequence[float | None]], objectives: Mapping[str, str]
) -> None:
    """Note at each completion by which objectives it is returned."""
    for name, objective in objectives.items():
        place = returned(objective, rewards.get(name, []))
        if place is None or place >= len(column):  # its text was not saved
            continue
        procedure = ":".join(objective.split(":")[:2])  # without its estimator
        chosen = f"{procedure}, {name}" if len(objectives) > 1 else procedure
        mark = column[place]
        mark.returned = f"{mark.returned}; {chosen}" if mark.returned else chosen


def returned(objective: str, rewards: Sequence[float | None]) -> int | None:
    """Return which of a prompt's completions best-of-N or worst-of-N returns, of the first N; the first of ties.

    None for other objectives, and if no completion has a reward. With less than N completions it is that of all.
    """
    kind, _, rest = objective.partition(":")
    number = rest.partition(":")[0]
    if kind not in ("bon", "wor") or not number.isdecimal():
        return None
    known = [(value, place) for place, value in enumerate(rewards[: int(number)]) if value is not None]
    if not known:
        return None
    if kind == "bon":
        return max(known, key=lambda item: (item[0], -item[1]))[1]
    return min(known)[1]
