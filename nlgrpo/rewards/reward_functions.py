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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from nlgrpo.data.conversations import text_of
from nlgrpo.data.sources import RESERVED
from nlgrpo.errors import UserCodeError, UserError, did_you_mean, nearest, show_traceback
from nlgrpo.rewards.calling import (
    PROVIDED,
    Call,
    ErrorInProcess,
    Log,
    Outcome,
    TimedOut,
    call_all,
    has_own_process,
    needs_main_thread,
)
from nlgrpo.rewards.history import SHOWN, History
from nlgrpo.rewards.outputs import Read, RewardFault, similarities_of, values_of
from nlgrpo.runtime.supervision.time_limit import is_main_thread
from nlgrpo.runtime.user_code import parameters

if TYPE_CHECKING:
    from nlgrpo.rewards.processes.function_process import FunctionProcess

log = logging.getLogger(__name__)

IN_ANSWER = " in its method answer"


class RewardError(UserCodeError):
    """A reward failed. The message names the reward, the step, the prompts and what it returned or raised."""


@dataclass(frozen=True)
class Reward:
    """A named reward, from `load` or built directly from any function with TRL's signature.

    A sync function runs in the main thread, as in TRL: ``signal.alarm``, ``asyncio.run``, SQLite and matplotlib work.
    Async functions run together in an event loop, in a thread of its own. ``process``: the function runs in the main
    thread of a process of its own; it must then be a function of a module, and arguments and results are pickled.

    ``timeout``: limit of one call in seconds, ``math.inf`` for none; see `score`. ``on_error``: "stop" raises
    RewardError, "skip" drops the affected groups. ``scale``: factor of the function's values, applied before any
    objective; a negative one is for users who want low values. ``pairwise``: the function is a kernel. ``voted``: also
    extract the final answers, for an objective that needs them.

    Raises UserError for invalid arguments.
    """

    name: str
    function: Callable[..., Any]
    timeout: float = 600.0
    on_error: Literal["stop", "skip"] = "stop"
    scale: float = 1.0
    pairwise: bool = False
    voted: bool = False
    process: bool = False
    history: History = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"a reward needs a name, got {self.name!r}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise UserError(
                f"reward {self.name!r}: timeout must be a number of seconds > 0, or inf, got {self.timeout!r}"
            )
        if self.on_error not in ("stop", "skip"):
            raise UserError(f"reward {self.name!r}: on_error must be 'stop' or 'skip', got {self.on_error!r}")
        if (
            isinstance(self.scale, bool)
            or not isinstance(self.scale, (int, float))
            or not 0 < abs(self.scale) < math.inf
        ):
            raise UserError(f"reward {self.name!r}: scale must be a finite number other than 0, got {self.scale!r}")
        if not callable(self.function):
            raise UserError(f"reward {self.name!r}: expected a function, got {self.function!r}")
        object.__setattr__(self, "history", History(self.name))
        if self.process:
            object.__setattr__(self, "function", self._in_process())

    def _in_process(self) -> FunctionProcess:
        """Return the function in a process of its own, with the timeout of this reward."""
        from nlgrpo.rewards.processes.function_process import FunctionProcess

        try:
            found = self.function if isinstance(self.function, FunctionProcess) else FunctionProcess.of(self.function)
        except ValueError as error:
            raise UserError(f"reward {self.name!r} with process = true: {error}") from error
        return replace(found, timeout=self.timeout)


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
    nans: dict[str, int] = field(default_factory=dict)
    """Number of completions for which a reward returned NaN, by name; those with some."""

    def joined(self, other: Scores, names: Sequence[str]) -> Scores:
        """Return these scores and those of ``other`` rewards for the same completions, in the order of ``names``."""
        values = self.values | other.values
        metrics = {name: list(logged) for name, logged in self.metrics.items()}
        for name, logged in other.metrics.items():
            metrics.setdefault(name, []).extend(logged)
        return Scores(
            {name: values[name] for name in names},
            self.skipped | other.skipped,
            metrics,
            self.extra | other.extra,
            self.answers | other.answers,
            self.nans | other.nans,
        )


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Raise UserError, with the nearest names, if a reward needs a column that the data do not have.

    ``columns``: columns of the data. A function needs its arguments without a default, a built-in its ``data_columns``.
    """
    for reward in rewards:
        missing = missing_columns([reward], columns)
        if missing:
            available = ", ".join(columns) or "none besides the prompt"
            close = [near for column in missing for near in nearest(column, columns)]
            raise UserError(
                f"reward {reward.name!r} needs {', '.join(map(repr, missing))}{did_you_mean(close)} "
                f"Columns of the data: {available}."
            )


def check_rows(rewards: Sequence[Reward], prompts: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for the first example that a reward cannot score, by its method ``check_row`` if it has one.

    ``rows``: the examples; their prompts are in ``prompts``, as rewards get them.
    """
    for reward in rewards:
        check = getattr(reward.function, "check_row", None)
        if check is None:
            continue
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            columns = {name: value for name, value in row.items() if name not in RESERVED}
            try:
                check(prompt, **columns)
            except ValueError as error:
                where = f"example {number} of the data"
                raise UserError(f"reward {reward.name!r} cannot score {where}: {error}") from error


def missing_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> list[str]:
    """Return the columns that rewards need and that are not in ``columns``."""
    found: list[str] = []
    for reward in rewards:
        known = {*columns, *PROVIDED, *(("samples",) if reward.pairwise else ())} - {"prompt", "completion"}
        required = getattr(reward.function, "data_columns", ())
        found += _missing(reward, known) + [column for column in required if column not in columns]
    return found


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
    for each function. Async functions run concurrently in one event loop, the same at every step, and functions with
    ``process`` in their processes, while the sync ones run one after another in the main thread.

    A function returns one number or None per completion (a kernel: M numbers, symmetric within a group): in a list or
    another sequence, from a generator, or in an array or tensor of shape (P*M,) or (P*M, 1). NaN abstains as None does,
    with a warning of its share. A reward whose values in its first calls are all the same, or all missing, is named in
    a warning with some completions.

    Raises RewardError if a reward raises, exceeds its timeout, or returns anything else, such as an infinite number.
    With ``on_error="skip"``, an invalid value drops its group and a failed call all groups, with a warning in the log.
    An argument that nothing provides is an error in both cases. Raises UserError for lists of different lengths, and
    for two rewards with the same name.

    A sync function that exceeds its timeout is interrupted: an exception that only a bare ``except`` catches is raised
    in it. Where that is not possible for 10 seconds, as in C code that does not return, the process ends with the
    reward's name and the stacks of its threads; a reward with ``process`` loses its own process instead, and goes on in
    another at the next call. Outside of the main thread nothing can be interrupted: a sync function then runs in a
    thread of its own, which it keeps after its timeout, with a warning if it is not from this package.
    """
    _check_lengths(samples, len(prompts), {"completions": completions, "completion_ids": completion_ids, **columns})
    if len({reward.name for reward in rewards}) < len(rewards):
        raise UserError(f"rewards must have different names, got {[reward.name for reward in rewards]}")
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
    nans: dict[str, int] = {}
    skipped = torch.zeros(batch.groups, dtype=torch.bool)
    calls = [_call_of(reward, batch, log) for reward, log in zip(rewards, logs, strict=True)]
    texts = [text_of(completion) for completion in completions]
    outcomes = call_all(calls)
    for reward, outcome in zip(rewards, outcomes, strict=True):
        shape = (len(prompts), samples) if reward.pairwise else (len(prompts),)
        read = _checked(reward, outcome, shape)
        failed = _failed_groups(reward, read.faults, batch)
        by_group = read.values.view(batch.groups, samples, *shape[1:])
        values[reward.name] = by_group.masked_fill(failed.view(-1, *[1] * len(shape)), math.nan)
        skipped |= failed
        if read.nans:
            nans[reward.name] = read.nans
            reward.history.add_nans(read.nans, len(prompts))
        if not reward.pairwise:  # equal completions are alike
            reward.history.add(values[reward.name], len(texts), list(map(_excerpt, texts[:SHOWN])))
    metrics: dict[str, list[float]] = {}
    for name, value in (entry for log in logs for entry in log.metrics):
        metrics.setdefault(name, []).append(value)
    extra = {name: column for log in logs for name, column in log.extra.items()}
    grouped = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    answers: dict[str, Tensor] = {}
    for reward in rewards:
        if reward.voted:
            answers[reward.name], faults = _answers(reward, grouped)
            failed = _failed_groups(reward, faults, batch)
            values[reward.name][failed] = math.nan
            skipped |= failed
    return Scores(values, skipped, metrics, extra, answers, nans)


def final_answers(reward: Reward, completions: Sequence[Sequence[str]]) -> Tensor:
    """Return the numbers of the final answers as `answer_numbers`, within the reward's timeout.

    Raises RewardError if its method ``answer`` fails; with ``on_error="skip"`` there are no answers then, with a
    warning in the log.
    """
    numbers, faults = _answers(reward, completions)
    for fault in faults:
        message = f"reward {reward.name!r} {fault.what}.\n  {fault.advice}"
        if reward.on_error == "stop":
            raise RewardError(message) from fault.cause
        show_traceback(fault.cause)
        log.warning("%s", message)
    return numbers


def answer_of(reward: Reward, text: str) -> Hashable | None:
    """Return the final answer in a text by the reward's method ``answer``. Raises RewardError if it fails."""
    extract = cast(Any, reward.function).answer

    def extracted() -> Hashable | None:
        answer = extract(text)
        hash(answer)  # equal answers are counted
        return cast("Hashable | None", answer)

    outcome = _outcome(reward, extracted)
    if outcome.error is None:
        return cast("Hashable | None", outcome.result)
    fault = _fault_of(reward, outcome.error, IN_ANSWER)
    raise RewardError(f"reward {reward.name!r} {fault.what}.\n  {fault.advice}") from fault.cause


def _answers(reward: Reward, completions: Sequence[Sequence[str]]) -> tuple[Tensor, list[RewardFault]]:
    """Numbers of the final answers, -1 for all if the method ``answer``, user code, failed; and that fault."""
    outcome = _outcome(reward, functools.partial(answer_numbers, reward.function, completions))
    if outcome.error is None:
        return cast(Tensor, outcome.result), []
    none = [[-1] * len(texts) for texts in completions]
    return torch.tensor(none, dtype=torch.int64), [_fault_of(reward, outcome.error, IN_ANSWER)]


def _outcome(reward: Reward, function: Callable[[], Any]) -> Outcome:
    """Call a function of the reward's code within its timeout."""
    [outcome] = call_all([Call(reward.name, function, _unchanged, reward.timeout)])
    return outcome


def _unchanged(result: Any) -> Any:
    return result


def answer_numbers(function: Callable[..., Any], completions: Sequence[Sequence[str]]) -> Tensor:
    """Number the final answers of each prompt's completions, (P, M) int64: the same for equal answers, -1 for none.

    The method ``answer(text)`` of the reward extracts them, if it has one, else `nlgrpo.rewards.builtin.vote`.
    """
    if hasattr(function, "answer"):
        extract = function.answer
    else:
        from nlgrpo.rewards.builtin import vote as extract
    rows = []
    for texts in completions:
        known: dict[Any, int] = {}
        given = [extract(text) for text in texts]
        rows.append([-1 if answer is None else known.setdefault(answer, len(known)) for answer in given])
    return torch.tensor(rows, dtype=torch.int64)


def _check_lengths(samples: int, count: int, lists: dict[str, list[Any]]) -> None:
    wrong = {name: len(values) for name, values in lists.items() if len(values) != count}
    if samples < 1 or count % samples or wrong:
        raise UserError(
            f"expected P x {samples} items in every list, got {count} prompts and {wrong or 'lists of equal length'}"
        )


def _call_of(reward: Reward, batch: _Batch, log: Log) -> Call:
    """Bind a reward to the arguments that it takes, with the reader of what it returns.

    Raises RewardError if nothing provides one of them.
    """
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    taken, _, takes_all = parameters(reward.function)
    given = batch.arguments | {"log_metric": log.log_metric, "log_extra": log.log_extra}
    given |= {"samples": batch.samples} if reward.pairwise else {}
    if missing := _missing(reward, given):
        what = f"takes {', '.join(map(repr, missing))}, which nothing provides"
        advice = f"Available, with the columns of the data: {', '.join(given)}."
        raise RewardError(_message(reward, RewardFault(what, advice), batch))
    names = [name for name in given if name not in bound and (takes_all or name in taken)]
    if needs_main_thread(reward.function) and not is_main_thread():
        reward.history.add_thread()
    arguments = {name: _copy(given[name]) for name in names}
    count = len(batch.prompts)
    samples = batch.samples
    function = functools.partial(reward.function, **arguments)
    if has_own_process(reward.function):
        function = functools.partial(reward.function, count, **arguments)
    read = functools.partial(values_of, count=count, scale=reward.scale)
    if reward.pairwise:
        read = functools.partial(similarities_of, count=count, samples=samples, scale=reward.scale)
    return Call(reward.name, function, read, reward.timeout)


def _copy(value: Any) -> Any:
    """Copy nested lists and dicts, so that a reward that changes them affects neither the data nor other rewards."""
    if isinstance(value, list):
        return [_copy(item) if isinstance(item, (list, dict)) else item for item in value]
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _checked(reward: Reward, outcome: Outcome, shape: tuple[int, ...]) -> Read:
    """Return what a reward returned; without any value if it failed."""
    if outcome.error is None:
        return cast(Read, outcome.result)
    return Read(torch.full(shape, math.nan, dtype=torch.float64), [_fault_of(reward, outcome.error)])


def _fault_of(reward: Reward, error: BaseException, where: str = "") -> RewardFault:
    if isinstance(error, TimedOut):
        at = f" It was interrupted at {error.place}." if error.place else ""
        advice = "Increase its timeout if it may take longer; if it calls a server, check that the server responds."
        return RewardFault(f"did not return within its timeout of {reward.timeout:g} s{where}", advice + at)
    kind = type(error).__name__
    said = str(error)
    if isinstance(error, ErrorInProcess):
        kind = error.kind
        said = error.said
    what = "failed" if kind == UserError.__name__ else f"raised {kind}"
    return RewardFault(f"{what}{where}: {said}", "Its traceback is above.", cause=error)


def _failed_groups(reward: Reward, faults: list[RewardFault], batch: _Batch) -> Tensor:
    """Groups (P,) bool in which the reward failed. Raises RewardError unless ``on_error`` is "skip"."""
    failed = torch.zeros(batch.groups, dtype=torch.bool)
    if faults and reward.on_error == "stop":
        raise RewardError(_message(reward, faults[0], batch)) from faults[0].cause
    for fault in faults:
        failed[slice(None) if fault.index is None else fault.index // batch.samples] = True
    for fault in faults[:1]:
        if fault.cause is None or reward.history.is_first(fault.cause):
            show_traceback(fault.cause)
        else:
            fault = replace(fault, advice="The traceback of the first such error was printed.")
        log.warning("%s\n  Dropped %d of %d groups.", _message(reward, fault, batch), int(failed.sum()), len(failed))
    return failed


def _message(reward: Reward, fault: RewardFault, batch: _Batch) -> str:
    first = batch.first_prompt
    last = batch.first_prompt + batch.groups - 1
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
