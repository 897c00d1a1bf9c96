"""Calls of user functions, sync or async, with timeouts; catches all they raise and collects what they log."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from nlgrpo.errors import UserError
from nlgrpo.runtime.supervision.threads import event_loop, in_thread
from nlgrpo.runtime.supervision.time_limit import TimedOut, ended_after, is_main_thread, limited

THREAD = "nlgrpo-reward"  # name of the threads that run user code

# Arguments of a reward function besides the columns of the data.
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


@dataclass(frozen=True)
class Call:
    """One call of the reward ``name``: the result is ``read(function())``.

    ``read`` belongs to the call, because it runs the user's code if the function returns a generator.
    """

    name: str
    function: Callable[[], Any]
    read: Callable[[Any], Any]
    timeout: float
    """Limit in seconds, ``math.inf`` for none."""


@dataclass(frozen=True)
class Outcome:
    """Result of a call, or the error that it raised."""

    result: Any = None
    error: BaseException | None = None


class Log:
    """Log of one call, with the two functions that TRL passes to rewards.

    ``count``: number of completions; a column has one value for each. Invalid arguments raise in the reward.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        if not isinstance(name, str) or isinstance(value, str):
            raise TypeError(f"log_metric takes a name and a number, got {name!r} and {value!r}")
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if not isinstance(column, str) or len(values) != self.count:
            raise UserError(
                f"log_extra takes a column name and {self.count} values, got {column!r} and {len(values)} values"
            )
        self.extra[column] = list(values)


def call_all(calls: Sequence[Call]) -> list[Outcome]:
    """Run all calls, each for at most its timeout, and return their outcomes in the order of the calls.

    Async functions run concurrently in one event loop, and functions with a process of their own in their processes;
    both start first. The others run one after another here. In the main thread, a function is interrupted when its time
    is over, and the process ends if that is not possible (see `limited`). Other threads cannot be interrupted: there,
    each function gets a thread of its own, in which it stays after its timeout.
    """
    loop = _responsive_loop() if any(is_async(call.function) for call in calls) else None
    started = time.monotonic()
    futures: dict[int, Future[Outcome]] = {}
    for i, call in enumerate(calls):
        if loop and is_async(call.function):
            futures[i] = asyncio.run_coroutine_threadsafe(_settle(call), loop)
        elif has_own_process(call.function):
            futures[i] = in_thread(functools.partial(_settle_sync, call), THREAD)
    try:
        outcomes = {i: _run_sync(call) for i, call in enumerate(calls) if i not in futures}
        for i, future in futures.items():
            # A process keeps the time of its function itself, without the time that it takes to start.
            seconds = math.inf if has_own_process(calls[i].function) else calls[i].timeout
            outcomes[i] = _wait(calls[i], future, seconds - (time.monotonic() - started))
    finally:
        for future in futures.values():
            future.cancel()  # stops the running ones
    return [outcomes[i] for i in range(len(calls))]


def in_event_loop(call: Callable[[], Awaitable[Any]]) -> Future[Any]:
    """Run an async call in the event loop of the rewards, and return the future of its result."""

    async def run() -> Any:
        return await call()

    return asyncio.run_coroutine_threadsafe(run(), _responsive_loop())


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: an async function, an object with an async ``__call__``, a partial of one.

    A composite says it by its attribute ``is_async``: it depends on its parts.
    """
    function = _without_arguments(function)
    composite = getattr(function, "is_async", False) is True
    return composite or inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class ErrorInProcess(Exception):
    """An error that a function raised in its process: its type ``kind``, its text ``said``, and its traceback."""

    def __init__(self, kind: str, said: str, shown: str) -> None:
        super().__init__(f"in a process of its own:\n{shown}")
        self.kind = kind
        self.said = said


def has_own_process(function: Callable[..., Any]) -> bool:
    """Whether a function runs in a process of its own (``process = true``)."""
    return getattr(_without_arguments(function), "own_process", False) is True


def needs_main_thread(function: Callable[..., Any]) -> bool:
    """Whether a function runs in the main thread: the sync ones of the user, which may use ``signal.alarm``.

    Those of this package run in any thread, unless they say otherwise by the attribute ``in_main_thread``: a regular
    expression of the user can be interrupted there only.
    """
    if is_async(function) or has_own_process(function):
        return False
    function = _without_arguments(function)
    module = function.__module__ if inspect.isroutine(function) else type(function).__module__
    built_in = str(module).startswith("nlgrpo.rewards.")
    return not built_in or getattr(function, "in_main_thread", False)


def _without_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


async def _settle(call: Call) -> Outcome:
    """Await a call and return its outcome, whatever it raises."""
    try:
        return Outcome(call.read(await call.function()))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Outcome(error=error)


def _wait(call: Call, future: Future[Outcome], seconds: float) -> Outcome:
    # threading rejects timeouts above TIMEOUT_MAX, also infinity; None is no limit.
    if seconds > threading.TIMEOUT_MAX:
        wait([future])
    elif seconds > 0 and is_main_thread():
        with ended_after(seconds, _cannot_interrupt(call)):  # it may hold the interpreter's lock
            wait([future], seconds)
    else:
        wait([future], max(seconds, 0.0))
    if not future.done():
        return Outcome(error=TimedOut())
    return Outcome(error=asyncio.CancelledError()) if future.cancelled() else future.result()


def _run_sync(call: Call) -> Outcome:
    if call.timeout > threading.TIMEOUT_MAX:
        return _settle_sync(call)
    if not is_main_thread():
        return _wait(call, in_thread(functools.partial(_settle_sync, call), THREAD), call.timeout)
    try:
        return limited(functools.partial(_settle_sync, call), call.timeout, _cannot_interrupt(call))
    except TimedOut as error:
        return Outcome(error=error)


def _cannot_interrupt(call: Call) -> str:
    return (
        f"reward {call.name!r} did not return within its timeout of {call.timeout:g} s, and nothing can interrupt it: "
        "it runs code that is not Python's, or that holds the interpreter's lock. A reward whose section has "
        f"process = true runs in a process of its own, which can be ended alone. Process {os.getpid()} is ended"
    )


def _settle_sync(call: Call) -> Outcome:
    # User code may raise anything, even SystemExit; the caller reports it. Only Ctrl-C passes, which is not an error of
    # the function.
    try:
        result = call.function()
        if inspect.isawaitable(result):
            result = _awaited(result)
        return Outcome(call.read(result))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _ctrl_c_raises():
            raise
        return Outcome(error=error)


def _awaited(result: Awaitable[Any]) -> Any:
    future = in_event_loop(lambda: result)
    try:
        return future.result()
    finally:
        future.cancel()  # if this thread was interrupted


def _ctrl_c_raises() -> bool:
    """Whether a KeyboardInterrupt here can come from Ctrl-C: in the main thread, with Python's own signal handler."""
    return is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _responsive_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, or a new one if a call that never awaits blocks it."""
    answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _event_loop())
    if not wait([answer], 1.0).done:
        _event_loop.cache_clear()
    return _event_loop()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the run: sessions and semaphores of async functions stay bound to the loop of their first use."""
    return event_loop(THREAD)
