"""The tables [evaluation.sets.NAME]: each lays keys over the sections [data], [rollout] and [evaluation]."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nlgrpo.config import schema
from nlgrpo.config.schema import Config, DataConfig, EvaluationConfig
from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.objectives import registry
from nlgrpo.objectives.majority import MOST_VOTES

NAME = re.compile(r"[\w.-]+")
TAKEN = ("objective", "rewards", "reward", "win_rate", "completions")  # with which metrics of the main set begin
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
OF_A_RUN = ("mixture", "streaming", "shuffle_buffer", "evaluation", "evaluation_split", "every", "patience", "sets")


@dataclass(frozen=True)
class SetConfig:
    """One evaluation set."""

    name: str
    config: Config
    """That of the run, with the keys of the set laid over it."""
    has_source: bool
    """Whether it has prompts of its own, those of ``config.data.source``, and not the evaluation prompts of the run."""
    rewards: tuple[str, ...]
    """Names of the rewards that score it."""
    shared: bool
    """Whether its prompts may be trained on too."""

    @classmethod
    def of(cls, run: Config, name: str) -> SetConfig:
        """Read a table of ``run.evaluation.sets``. Raises UserError for a key or a value that it cannot have."""
        where = f"evaluation.sets.{name}"
        table = run.evaluation.sets[name]
        if not NAME.fullmatch(name) or name in TAKEN:
            raise UserError(
                f"evaluation.sets: {name!r} is not a name; use letters, digits, '_', '-' and '.', and none of "
                f"{', '.join(TAKEN)}"
            )
        if not isinstance(table, dict):
            raise UserError(f"{where} = {table!r}: expected a table, such as {{ source = 'test.jsonl' }}")
        values = dict(table)
        known = list(run.rewards)
        rewards = values.pop("rewards", known)
        if not isinstance(rewards, Sequence) or isinstance(rewards, str) or not rewards or set(rewards) - set(known):
            raise UserError(f"{where}.rewards = {rewards!r}: expected a list of {', '.join(map(repr, known))}")
        shared = values.pop("shared", False)
        if not isinstance(shared, bool):
            raise UserError(f"{where}.shared = {shared!r}: expected true or false")
        has_source = "source" in values
        changed = {}
        for section, keys in _sections(values, has_source, where).items():
            base = getattr(run, section)
            if section == "data" and has_source:
                base = dataclasses.replace(
                    base, mixture={}, evaluation="", evaluation_split="", split="train", limit=None
                )
            if section == "evaluation":
                base = _that_fit(base, keys.get("samples", base.samples))
            changed[section] = schema.overlay(base, keys, where)
            for key, value, allowed in schema.out_of_bounds(changed[section]):
                raise UserError(f"{where}.{key} = {value!r}: allowed is {allowed}")
        config = dataclasses.replace(run, **changed)
        if fault := config.evaluation.ns_fault(where):
            raise UserError(fault)
        votes = any(registry.is_voted(run.rewards[name].objective) for name in rewards)
        if votes and max(config.evaluation.ns) > MOST_VOTES:
            raise UserError(f"{where}.ns: at most {MOST_VOTES} with the objective maj:N")
        for gold in config.evaluation.gold:
            if gold not in rewards:
                raise UserError(f"{where}.gold: there is no reward {gold!r}{did_you_mean(nearest(gold, rewards))}")
        return cls(name, config, has_source, tuple(rewards), shared)


def faults(run: Config) -> list[str]:
    """What is wrong with the keys of evaluations during training, of the best policy and of the sets."""
    evaluation = run.evaluation
    keep_best = run.train.keep_best
    found = []
    for gold in evaluation.gold:
        if gold not in run.rewards:
            found.append(f"evaluation.gold: there is no reward {gold!r}{did_you_mean(nearest(gold, run.rewards))}")
    if evaluation.sets and run.environment.id:
        found.append("evaluation.sets: not with an environment, which gives the evaluation prompts")
    if evaluation.prompts == 0 and (evaluation.every > 0 or evaluation.sets):
        key = f"evaluation.every = {evaluation.every}" if evaluation.every > 0 else "evaluation.sets"
        found.append(f"{key}: nothing is evaluated with evaluation.prompts = 0")
    if keep_best and evaluation.every == 0:
        found.append(f"train.keep_best = {keep_best!r}: set evaluation.every, the steps between evaluations")
    if evaluation.patience > 0 and not keep_best:
        found.append(f"evaluation.patience = {evaluation.patience}: set train.keep_best, the metric that must improve")
    for name in evaluation.sets:
        try:
            SetConfig.of(run, name)
        except UserError as error:
            found.append(str(error))
    return found


def _that_fit(evaluation: EvaluationConfig, samples: Any) -> EvaluationConfig:
    """Leave out what a set cannot inherit from the main one, because it has fewer samples."""
    if not isinstance(samples, int):
        return evaluation  # an error that is found later
    ns = tuple(n for n in evaluation.ns if n <= samples) or (1,)
    procedures = []
    for text in evaluation.procedures:
        needed = re.fullmatch(r"(?:bon|wor|maj):(\d+)(?::.*)?|rewind:.*:(\d+)", text)
        if needed is None or int(needed[1] or needed[2]) <= samples:
            procedures.append(text)
    return dataclasses.replace(evaluation, ns=ns, procedures=tuple(procedures))


def _sections(values: dict[str, Any], has_source: bool, where: str) -> dict[str, dict[str, Any]]:
    """Sort the keys of a table into the sections that they belong to."""
    of_data = {key.name for key in dataclasses.fields(DataConfig)} - set(OF_A_RUN)
    of_evaluation = {key.name for key in dataclasses.fields(EvaluationConfig)} - set(OF_A_RUN)
    found: dict[str, dict[str, Any]] = {"data": {}, "rollout": {}, "evaluation": {}}
    for key, value in values.items():
        if key in SAMPLING:
            found["rollout"][key] = value
        elif key in of_evaluation:
            found["evaluation"][key] = value
        elif key in of_data and has_source:
            found["data"][key] = value
        elif key in of_data:
            raise UserError(f"{where}.{key} is for a set with prompts of its own; add source")
        else:
            guesses = nearest(str(key), [*SAMPLING, *of_evaluation, *of_data, "rewards", "shared"])
            raise UserError(f"{where}: unknown key {key!r}{did_you_mean(guesses)}")
    return found
