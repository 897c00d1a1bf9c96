"""Reward functions: call them with TRL's signature, and check their results.

A reward is any callable ``f(prompts, completions, completion_ids, **columns) -> list[float | None]`` over all P*M
completions, sync or async. A reward that runs in TRL 1.16's ``GRPOTrainer`` runs here unchanged. ``None`` abstains.

A *kernel*, for diversity objectives, is such a callable that returns for each completion its M similarities to the
completions of its group; its argument ``samples`` is M.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from nlgrpo.data.conversations import text_of
from nlgrpo.rewards.builtin import vote
from nlgrpo.rewards.calling import PROVIDED, Log, Outcome, TimedOut, call_all, parameters
from nlgrpo.rewards.outputs import Fault, similarities_of, values_of

log = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward failed. The message names the reward, the step, the prompts and what it returned or raised."""


@dataclass(frozen=True)
class Reward:
    """A named reward, from `load` or built directly from any function with TRL's signature.

    ``timeout``: limit of one call in seconds; a sync function runs in its own thread. ``math.inf`` is no limit and runs
    the function in the trainer's thread, for functions that need the main thread (``signal.alarm``). ``on_error``:
    "stop" raises RewardError, "skip" drops the affected groups. ``scale``: factor of the function's values, applied
    before any objective; a negative one is for users who want low values. ``pairwise``: the function is a kernel.
    ``voted``: also extract the final answers, for an objective that needs them.

    Raises ValueError for invalid arguments.
    """

    name: str
    function: Callable[..., Any]
    timeout: float = 600.0
    on_error: Literal["stop", "skip"] = "stop"
    scale: float = 1.0
    pairwise: bool = False
    voted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a reward needs a name, got {self.name!r}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise ValueError(
                f"reward {self.name!r}: timeout must be a number of seconds > 0, or inf, got {self.timeout!r}"
            )
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"reward {self.name!r}: on_error must be 'stop' or 'skip', got {self.on_error!r}")
        if (
            isinstance(self.scale, bool)
            or not isinstance(self.scale, (int, float))
            or not 0 < abs(self.scale) < math.inf
        ):
            raise ValueError(f"reward {self.name!r}: scale must be a finite number other than 0, got {self.scale!r}")
        if not callable(self.function):
            raise ValueError(f"reward {self.name!r}: expected a function, got {self.function!r}")


@dataclass(frozen=True)
class Scores:
    """Scores of all rewards for the P*M completions of a step.

    ``values[name]``: (P, M) float64, NaN where the reward abstained and in groups in which it failed; for a kernel
    (P, M, M), NaN in the rows and columns of completions for which it abstained. ``skipped``: (P,) bool, the groups to
    drop because a reward with ``on_error="skip"`` failed in them.
    """

    values: dict[str, Tensor]
    skipped: Tensor
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Values passed to ``log_metric``, by name."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Values (P*M) passed to ``log_extra``, by column; the last call for a column counts."""
    answers: dict[str, Tensor] = field(default_factory=dict)
    """Numbers of the final answers, (P, M) int64, for rewards with ``voted``; see `answer_numbers`."""


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Raise ValueError if a reward needs a column that the data do not have.

    ``columns``: columns of the data. A function needs its arguments without a default, a built-in its ``data_columns``.
    """
    for reward in rewards:
        known = {*columns, *PROVIDED, *(("samples",) if reward.pairwise else ())} - {"prompt", "completion"}
        required = getattr(reward.function, "data_columns", ())
        missing = _missing(reward, known) + [column for column in required if column not in columns]
        if missing:
            available = ", ".join(columns) or "none besides the prompt"
            raise ValueError(
                f"reward {reward.name!r} needs {', '.join(map(repr, missing))}. Columns of the data: {available}"
            )


def _missing(reward: Reward, known: Collection[str]) -> list[str]:
    """Return the required arguments of a reward that are not in ``known``."""
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    _, required, _ = parameters(reward.function)
    return sorted(required - bound.keys() - set(known))


# ---- scores of completions ----


@dataclass(frozen=True)
class _Batch:
    """The P*M completions of one step, prompt-major, and all arguments that rewards can take."""

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
    """Call every reward once with all completions; return their values as (P, M), M = ``samples``, and their logs.

    All lists have P*M items, prompt-major. ``first_prompt``: number of the first prompt, for messages.

    A function is called with ``prompts``, ``completions``, ``completion_ids``, the columns, ``trainer_state``
    (``.global_step .max_steps``), ``log_metric(name, value)`` and ``log_extra(column, values)``; a kernel also with
    ``samples`` = M. A function without ``**kwargs`` gets only the arguments that it names. Lists and dicts are copied
    for each function. Async functions run concurrently in one event loop, the same at every step, while the sync ones
    run one after another.

    Raises RewardError if a reward raises, exceeds its timeout, or does not return a list, tuple, 1-D tensor or array
    with one finite number, bool or None per completion (a kernel: M such numbers, symmetric within a group). With
    ``on_error="skip"``, an invalid value drops its group and a failed call all groups, with a warning in the log. An
    argument that nothing provides is an error in both cases. Raises ValueError for lists of different lengths, and for
    two rewards with the same name.

    A sync function that exceeds its timeout keeps running in its thread, because Python cannot stop threads. One that
    holds the interpreter's lock, such as a regular expression with exponential backtracking, blocks the trainer in
    spite of the timeout.
    """
    _check_lengths(samples, len(prompts), {"completions": completions, "completion_ids": completion_ids, **columns})
    if len({reward.name for reward in rewards}) < len(rewards):
        raise ValueError(f"rewards must have different names, got {[reward.name for reward in rewards]}")
    arguments = {
        # TRL withholds these two columns as well.
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
        rows, faults = _checked(reward, outcome, shape)
        failed = _failed_groups(reward, faults, batch)
        by_group = rows.view(batch.groups, samples, *shape[1:])
        values[reward.name] = by_group.masked_fill(failed.view(-1, *[1] * len(shape)), math.nan)
        skipped |= failed
    metrics: dict[str, list[float]] = {}
    for name, value in (entry for log in logs for entry in log.metrics):
        metrics.setdefault(name, []).append(value)
    extra = {name: column for log in logs for name, column in log.extra.items()}
    texts = [text_of(completion) for completion in completions]
    grouped = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    answers = {reward.name: _answers(reward, grouped, batch) for reward in rewards if reward.voted}
    return Scores(values, skipped, metrics, extra, answers)


def _answers(reward: Reward, completions: Sequence[Sequence[str]], batch: _Batch) -> Tensor:
    try:
        return answer_numbers(reward.function, completions)
    except Exception as error:  # its method `answer` is user code
        fault = Fault(f"raised {type(error).__name__} in its method answer: {error}", "Its traceback is above.")
        raise RewardError(_message(reward, fault, batch)) from error


def answer_numbers(function: Callable[..., Any], completions: Sequence[Sequence[str]]) -> Tensor:
    """Number the final answers of each prompt's completions, (P, M) int64: the same for equal answers, -1 for none.

    The method ``answer(text)`` of the reward extracts them, if it has one, else `nlgrpo.rewards.builtin.vote`.
    """
    extract, rows = getattr(function, "answer", vote), []
    for texts in completions:
        known: dict[Any, int] = {}
        given = [extract(text) for text in texts]
        rows.append([-1 if answer is None else known.setdefault(answer, len(known)) for answer in given])
    return torch.tensor(rows, dtype=torch.int64)


def _check_lengths(samples: int, count: int, lists: dict[str, list[Any]]) -> None:
    wrong = {name: len(values) for name, values in lists.items() if len(values) != count}
    if samples < 1 or count % samples or wrong:
        raise ValueError(
            f"expected P x {samples} items in every list, got {count} prompts and {wrong or 'lists of equal length'}"
        )


def _call_of(reward: Reward, batch: _Batch, log: Log) -> functools.partial[Any]:
    """Bind a reward to the arguments that it takes. Raises RewardError if nothing provides one of them."""
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    taken, _, takes_all = parameters(reward.function)
    given = batch.arguments | {"log_metric": log.log_metric, "log_extra": log.log_extra}
    given |= {"samples": batch.samples} if reward.pairwise else {}
    if missing := _missing(reward, given):
        what = f"takes {', '.join(map(repr, missing))}, which nothing provides"
        advice = f"Available, with the columns of the data: {', '.join(given)}."
        raise RewardError(_message(reward, Fault(what, advice), batch))
    names = [name for name in given if name not in bound and (takes_all or name in taken)]
    return functools.partial(reward.function, **{name: _copy(given[name]) for name in names})


def _copy(value: Any) -> Any:
    """Copy nested lists and dicts, so that a reward that changes them affects neither the data nor other rewards."""
    if isinstance(value, list):
        return [_copy(item) if isinstance(item, (list, dict)) else item for item in value]
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _checked(reward: Reward, outcome: Outcome, shape: tuple[int, ...]) -> tuple[Tensor, list[Fault]]:
    """Values (count,), or (count, M) of a kernel, in float64, with NaN for None and invalid ones; and the faults."""
    if outcome.error is None:
        return (
            similarities_of(outcome.result, shape[0], shape[1], reward.scale)
            if reward.pairwise
            else values_of(outcome.result, shape[0], reward.scale)
        )
    if isinstance(outcome.error, TimedOut):
        advice = "Increase its timeout if it may take longer; if it calls a server, check that the server responds."
        fault = Fault(f"did not return within its timeout of {reward.timeout:g} s", advice)
    else:
        advice = "Its traceback is above. If it needs the main thread (signal.alarm), set its timeout to inf."
        fault = Fault(f"raised {type(outcome.error).__name__}: {outcome.error}", advice, cause=outcome.error)
    return torch.full(shape, math.nan, dtype=torch.float64), [fault]


def _failed_groups(reward: Reward, faults: list[Fault], batch: _Batch) -> Tensor:
    """Groups (P,) bool in which the reward failed. Raises RewardError unless ``on_error`` is "skip"."""
    failed = torch.zeros(batch.groups, dtype=torch.bool)
    if faults and reward.on_error == "stop":
        raise RewardError(_message(reward, faults[0], batch)) from faults[0].cause
    for fault in faults:
        failed[slice(None) if fault.index is None else fault.index // batch.samples] = True
    if faults:
        log.warning(
            "%s\n  Dropped %d of %d groups.", _message(reward, faults[0], batch), int(failed.sum()), len(failed)
        )
    return failed


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
