"""Reward functions: naming them in a config, calling them with TRL's signature, refusing what they must not return.

A reward is any callable ``f(prompts, completions, completion_ids, **columns) -> list[float | None]`` over all P*M
completions, sync or async; one that runs in TRL 1.16's ``GRPOTrainer`` runs here unchanged. ``None`` abstains.

A *kernel*, which diversity objectives take, is such a callable that returns for each completion the M similarities with
the completions of its group; M is its argument ``samples``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from nlgrpo.data.prompt_dataset import text_of
from nlgrpo.rewards.builtin import BUILTIN, Gsm8k
from nlgrpo.rewards.calling import Log, Outcome, TimedOut, call_all
from nlgrpo.rewards.outputs import Fault, similarities_of, values_of
from nlgrpo.rewards.similarity_kernels import KERNELS
from nlgrpo.runtime import user_code
from nlgrpo.runtime.user_code import nearest

log = logging.getLogger(__name__)

# What a function can take besides the columns of the data.
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


class RewardError(RuntimeError):
    """A reward failed while it scored; the message names it, the step, the prompts and what came instead of numbers."""


@dataclass(frozen=True)
class Reward:
    """A named reward; ``load`` makes one from a config, and any function with TRL's signature can be put in directly.

    ``timeout`` bounds one call, in seconds; a sync function then runs in a thread of its own. ``math.inf`` is no limit,
    and runs it in the thread of the trainer, for a function that needs the main thread (``signal.alarm``).
    ``on_error``: "stop" raises RewardError, "skip" drops the groups concerned. ``scale`` multiplies the function's
    values, before any objective sees them; a negative one is for users who want them low. ``pairwise``: it is a kernel.
    """

    name: str
    function: Callable[..., Any]
    timeout: float = 600.0
    on_error: Literal["stop", "skip"] = "stop"
    scale: float = 1.0
    pairwise: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a reward needs a name, got {self.name!r}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise ValueError(f"reward {self.name!r}: timeout is seconds above 0, or inf, got {self.timeout!r}")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"reward {self.name!r}: on_error is 'stop' or 'skip', got {self.on_error!r}")
        if (
            isinstance(self.scale, bool)
            or not isinstance(self.scale, (int, float))
            or not 0 < abs(self.scale) < math.inf
        ):
            raise ValueError(f"reward {self.name!r}: scale is a finite number other than 0, got {self.scale!r}")
        if not callable(self.function):
            raise ValueError(f"reward {self.name!r}: expected a function, got {self.function!r}")


@dataclass(frozen=True)
class Scores:
    """``values[name]`` (P, M) float64, NaN where that reward abstained and in all of a group in which it failed;
    of a kernel (P, M, M), NaN in the rows and columns of completions for which it abstained.
    ``skipped`` (P,) bool, the groups to drop because a reward with ``on_error="skip"`` failed there.
    """

    values: dict[str, Tensor]
    skipped: Tensor
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """What rewards gave to ``log_metric``, by name, all values."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What rewards gave to ``log_extra``, by column, P*M values; of those for one column the last."""


# ---- from a config to a function ----


def load(
    name: str,
    spec: str,
    *,
    timeout: float = 600.0,
    on_error: Literal["stop", "skip"] = "stop",
    scale: float = 1.0,
    device: str | torch.device = "cpu",
    pairwise: bool = False,
) -> Reward:
    """The reward that ``spec`` names: ``target`` or ``target(key=value, ...)`` with Python literals as values.

    Targets: a built-in (``length lexicon regex gsm8k classifier ensemble``, of ``pairwise`` ones the kernels ``ngrams
    length equal``), a function ``package.module:function`` or ``path/to/file.py:function`` (relative to the current
    folder), or a model folder, as ``classifier(path=...)``. The arguments are bound to a function at every call and
    come before a column of the same name; a class is called with them once, and its instance scores. ``device`` is
    where classifiers run.

    Raises ValueError for a spec that is none of these, and for arguments that its target does not take.
    """
    try:
        target, arguments = parse_spec(spec)
        if pairwise:
            resolved = _resolve(target, KERNELS, "kernel")
        else:
            target, arguments = _as_classifier(target, arguments, device)
            resolved = _resolve(target, BUILTIN, "reward")
        function = _bind(target, resolved, arguments)
    except ValueError as error:
        raise ValueError(f"reward {name!r} = {spec!r}: {error}") from error
    return Reward(name, function, timeout, on_error, scale, pairwise)


def _as_classifier(target: str, arguments: dict[str, Any], device: str | torch.device) -> tuple[str, dict[str, Any]]:
    """A model folder as ``classifier(path=...)``, and classifiers on their device; others as they are."""
    if target not in BUILTIN and os.path.isfile(Path(os.path.expanduser(target)) / "config.json"):
        target, arguments = "classifier", {"path": target, **arguments}
    on_device = target in ("classifier", "ensemble")
    return target, {"device": str(device), **arguments} if on_device else arguments


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``"length(target=25)"`` as ``("length", {"target": 25})``; only literals, nothing is evaluated."""
    if not isinstance(spec, str):
        raise ValueError(f"expected a text such as 'length(target=25, scale=128)', got {type(spec).__name__}")
    match = re.fullmatch(r"\s*([^(]+?)\s*\((.*)\)\s*", spec, re.DOTALL)
    if match is None:
        return spec.strip(), {}
    target, inside = match.groups()
    try:
        return target, _parse_arguments(inside)
    except (SyntaxError, ValueError, TypeError) as error:
        advice = "write name=value, ..., with plain Python values and texts in quotes"
        raise ValueError(f"cannot read the arguments ({inside}): {error}. Please {advice}.") from error


def _parse_arguments(inside: str) -> dict[str, Any]:
    call = ast.parse(f"f({inside}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("not all of them have a name")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("** is not read" if keyword.arg is None else f"{keyword.arg} is given twice")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return arguments


def _resolve(target: str, builtin: Mapping[str, type], kind: str) -> Callable[..., Any]:
    if target in builtin:
        return builtin[target]
    if not user_code.is_name(target):
        raise ValueError(_unknown(target, builtin, kind))
    return user_code.function(target)


def _unknown(target: str, builtin: Mapping[str, type], kind: str) -> str:
    forms = [f"{name}({', '.join(inspect.signature(made).parameters)})" for name, made in builtin.items()]
    forms += ["package.module:function", "path/to/file.py:function"]
    forms += ["a folder with a config.json (a classifier)"] * (kind == "reward")
    return f"there is no {kind} {target!r}{nearest(target, list(builtin))} Known are:\n  " + "\n  ".join(forms)


def _bind(target: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    taken, required, takes_all = _parameters(function)
    unknown = [name for name in arguments if not takes_all and name not in taken]
    missing = sorted(required - arguments.keys()) if isinstance(function, type) else []
    if unknown:
        raise ValueError(
            f"{target} does not take {unknown[0]!r}{nearest(unknown[0], taken)} It takes: {', '.join(taken)}"
        )
    if missing:
        raise ValueError(f"{target} needs {', '.join(missing)}; it takes: {', '.join(taken)}")
    if not isinstance(function, type):
        return functools.partial(function, **arguments)
    try:
        made: Callable[..., Any] = function(**arguments)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # of a class that is not ours anything may come
        raise ValueError(f"{target} cannot be made, {type(error).__name__}: {error}") from error
    return made


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """ValueError for a reward that needs a column which the data do not have, in `score`'s terms.

    ``columns``: those of the data. A function needs what it takes without a default, a built-in what it names.
    """
    for reward in rewards:
        known = {*columns, *PROVIDED, *(("samples",) if reward.pairwise else ())} - {"prompt", "completion"}
        own = reward.function.data_columns if isinstance(reward.function, Gsm8k) else ()
        missing = _missing(reward, known) + [column for column in own if column not in columns]
        if missing:
            has = ", ".join(columns) or "none besides the prompt"
            raise ValueError(
                f"reward {reward.name!r} needs {', '.join(map(repr, missing))}. Columns of the data: {has}"
            )


def _missing(reward: Reward, known: Collection[str]) -> list[str]:
    """The arguments that a reward must be given and nothing provides."""
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    _, required, _ = _parameters(reward.function)
    return sorted(required - bound.keys() - set(known))


# ---- from completions to scores ----


@dataclass(frozen=True)
class _Batch:
    """The P*M completions of one step, prompt-major, and the arguments that rewards can take."""

    prompts: list[Any]
    completions: list[Any]
    samples: int
    step: int
    first_prompt: int
    arguments: dict[str, Any]

    @property
    def groups(self) -> int:
        return len(self.prompts) // self.samples


def score(
    rewards: Sequence[Reward],
    *,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
    samples: int,
    step: int,
    total_steps: int,
    first_prompt: int = 0,
) -> Scores:
    """Call every reward once on all completions and return its values as (P, M), ``M = samples``, and what it logged.

    All lists have P*M items, prompt-major; ``first_prompt`` is the number of the first prompt, for messages. A function
    is called with ``prompts completions completion_ids``, the columns, ``trainer_state`` (``.global_step .max_steps``),
    ``log_metric(name, value)`` and ``log_extra(column, values)``, a kernel also with ``samples``, which is M; without
    ``**kwargs``, with those that it names. The lists are its own, and those and the dicts in them. Async functions run
    together in one event loop, the same at every step, while the sync ones run one by one.

    Raises RewardError when a reward raises, exceeds its timeout, or returns other than a list, tuple, 1-D tensor or
    array of one finite number, bool or None per completion (a kernel: of M such numbers, symmetric in a group);
    infinities are refused like NaN, as no advantage can be computed from them. With ``on_error="skip"`` a bad value
    drops its group and a failed call all groups, with a warning in the log. An argument that a function takes and
    nothing provides is an error in both cases. Raises ValueError for lists of other lengths, and for two rewards of one
    name.

    A sync function that exceeds its timeout is left behind in its thread, which Python cannot end. One that keeps the
    interpreter's lock (a regular expression that explodes, for instance) holds up the trainer, timeout or not.
    """
    _check_lengths(samples, len(prompts), {"completions": completions, "completion_ids": completion_ids, **columns})
    if len({reward.name for reward in rewards}) < len(rewards):
        raise ValueError(f"rewards need different names, got {[reward.name for reward in rewards]}")
    arguments = {
        # TRL keeps these two columns to itself as well; its lists of all prompts and completions have other names.
        **{name: column for name, column in columns.items() if name not in ("prompt", "completion")},
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "trainer_state": SimpleNamespace(global_step=step, max_steps=total_steps),
    }
    batch = _Batch(prompts, completions, samples, step, first_prompt, arguments)

    values: dict[str, Tensor] = {}
    logs = [Log(len(prompts)) for _ in rewards]
    skipped = torch.zeros(batch.groups, dtype=torch.bool)
    calls = [_call_of(reward, batch, log) for reward, log in zip(rewards, logs, strict=True)]
    outcomes = call_all(calls, [reward.timeout for reward in rewards])
    for reward, outcome in zip(rewards, outcomes, strict=True):
        shape = (len(prompts), samples) if reward.pairwise else (len(prompts),)
        rows, faults = _judge(reward, outcome, shape)
        lost = _lost_groups(reward, faults, batch)
        each = rows.view(batch.groups, samples, *shape[1:])
        values[reward.name] = each.masked_fill(lost.view(-1, *[1] * len(shape)), math.nan)
        skipped |= lost
    metrics: dict[str, list[float]] = {}
    for name, value in (entry for log in logs for entry in log.metrics):
        metrics.setdefault(name, []).append(value)
    return Scores(values, skipped, metrics, {name: column for log in logs for name, column in log.extra.items()})


def _check_lengths(samples: int, count: int, lists: dict[str, list[Any]]) -> None:
    wrong = {name: len(values) for name, values in lists.items() if len(values) != count}
    if samples < 1 or count % samples or wrong:
        raise ValueError(
            f"expected P x {samples} items in every list, got {count} prompts and {wrong or 'as many others'}"
        )


def _call_of(reward: Reward, batch: _Batch, log: Log) -> functools.partial[Any]:
    """The reward with the arguments that it takes. Raises RewardError for one that nothing provides."""
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    taken, _, takes_all = _parameters(reward.function)
    given = batch.arguments | {"log_metric": log.log_metric, "log_extra": log.log_extra}
    given |= {"samples": batch.samples} if reward.pairwise else {}
    if missing := _missing(reward, given):
        what = f"takes {', '.join(map(repr, missing))}, which nothing provides"
        advice = f"A reward can take: {', '.join(given)}. The columns of the data are among them."
        raise RewardError(_message(reward, Fault(what, advice), batch))
    names = [name for name in given if name not in bound and (takes_all or name in taken)]
    return functools.partial(reward.function, **{name: _own(given[name]) for name in names})


def _own(value: Any) -> Any:
    """With lists and dicts of its own, so that a reward that changes one changes no data, nor what others get."""
    if isinstance(value, list):
        return [_own(item) if isinstance(item, (list, dict)) else item for item in value]
    return {key: _own(item) for key, item in value.items()} if isinstance(value, dict) else value


def _parameters(function: Callable[..., Any]) -> tuple[list[str], set[str], bool]:
    """The names that can be given to a function, those that must be, and whether it takes any other too."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in named], {p.name for p in named if p.default is p.empty}, takes_all


def _judge(reward: Reward, outcome: Outcome, shape: tuple[int, ...]) -> tuple[Tensor, list[Fault]]:
    """The values (count,), or (count, M) of a kernel, in float64, NaN for None and what is not usable; the faults."""
    if outcome.error is None:
        return (
            similarities_of(outcome.result, shape[0], shape[1], reward.scale)
            if reward.pairwise
            else values_of(outcome.result, shape[0], reward.scale)
        )
    if isinstance(outcome.error, TimedOut):
        advice = "Raise its timeout if that can be normal; where it asks a server, see that the server answers."
        fault = Fault(f"gave no answer within its timeout of {reward.timeout:g} s", advice)
    else:
        advice = "Its own traceback is above. If it needs the main thread (signal.alarm), set its timeout to inf."
        fault = Fault(f"raised {type(outcome.error).__name__}: {outcome.error}", advice, cause=outcome.error)
    return torch.full(shape, math.nan, dtype=torch.float64), [fault]


def _lost_groups(reward: Reward, faults: list[Fault], batch: _Batch) -> Tensor:
    """(P,) bool: the groups in which the reward failed. Raises RewardError unless it is to skip them."""
    lost = torch.zeros(batch.groups, dtype=torch.bool)
    if faults and reward.on_error == "stop":
        raise RewardError(_message(reward, faults[0], batch)) from faults[0].cause
    for fault in faults:
        lost[slice(None) if fault.index is None else fault.index // batch.samples] = True
    if faults:
        log.warning("%s\n  Dropped %d of %d groups.", _message(reward, faults[0], batch), int(lost.sum()), len(lost))
    return lost


def _message(reward: Reward, fault: Fault, batch: _Batch) -> str:
    first, last = batch.first_prompt, batch.first_prompt + batch.groups - 1
    if fault.index is None:
        where = f"prompts {first} to {last}" if last > first else f"prompt {first}"
        return f"reward {reward.name!r} {fault.what} (step {batch.step}, {where}).\n  {fault.advice}"
    group, sample = divmod(fault.index, batch.samples)
    return (
        f"reward {reward.name!r} {fault.what} (step {batch.step}, prompt {first + group}, sample {sample}).\n"
        f"  prompt:     {_excerpt(batch.prompts[fault.index])}\n"
        f"  completion: {_excerpt(batch.completions[fault.index])}\n"
        f"  {fault.advice}"
    )


def _excerpt(message: Any, width: int = 160) -> str:
    shown = repr(text_of(message))
    return shown if len(shown) <= width else f"{shown[: width // 2]} ... {shown[-width // 2 :]}"
