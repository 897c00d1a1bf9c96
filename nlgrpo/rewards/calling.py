"""Calls of user functions, sync or async, with timeouts; catches all they raise and collects what they log."""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from nlgrpo.runtime.supervision.threads import event_loop, in_thread

THREAD = "nlgrpo-reward"  # name of the threads that run user code

Call = Callable[[], Any]

# Arguments of a reward function besides the columns of the data.
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


class TimedOut(Exception):
    """The call did not finish within its timeout."""


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
            raise ValueError(
                f"log_extra takes a column name and {self.count} values, got {column!r} and {len(values)} values"
            )
        self.extra[column] = list(values)


def call_all(calls: Sequence[Call], timeouts: Sequence[float]) -> list[Outcome]:
    """Run all calls, each for at most its timeout (seconds, ``math.inf`` for no limit); return outcomes in their order.

    The async calls start first and run concurrently in one event loop, while the sync ones run one after another. A
    sync call runs in its own thread, and stays there after its timeout, because Python cannot stop threads; without a
    limit it runs in the caller's thread.
    """
    loop = _responsive_loop() if any(map(is_async, calls)) else None
    started = time.monotonic()
    futures = {
        i: asyncio.run_coroutine_threadsafe(_settle(call), loop)
        for i, call in enumerate(calls)
        if loop and is_async(call)
    }
    try:
        outcomes = {i: _run_sync(call, timeouts[i]) for i, call in enumerate(calls) if i not in futures}
        for i, future in futures.items():
            outcomes[i] = _wait(future, timeouts[i] - (time.monotonic() - started))
    finally:
        for future in futures.values():
            future.cancel()  # stops the running ones
    return [outcomes[i] for i in range(len(calls))]


def parameters(function: Callable[..., Any]) -> tuple[list[str], set[str], bool]:
    """Return the argument names of a function, the required ones, and whether it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in named], {p.name for p in named if p.default is p.empty}, takes_all


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: an async function, an object with an async ``__call__``, a partial of one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _settle(call: Callable[[], Awaitable[Any]]) -> Outcome:
    """Await a call and return its outcome, whatever it raises."""
    try:
        return Outcome(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Outcome(error=error)


def _wait(future: Future[Outcome], seconds: float) -> Outcome:
    # threading rejects timeouts above TIMEOUT_MAX, also infinity; None is no limit.
    wait([future], max(seconds, 0.0) if seconds <= threading.TIMEOUT_MAX else None)
    if not future.done():
        return Outcome(error=TimedOut())
    return Outcome(error=asyncio.CancelledError()) if future.cancelled() else future.result()


def _run_sync(call: Call, seconds: float) -> Outcome:
    if seconds > threading.TIMEOUT_MAX:
        return _settle_sync(call)
    return _wait(in_thread(lambda: _settle_sync(call), THREAD), seconds)


def _settle_sync(call: Call) -> Outcome:
    # User code may raise anything, even SystemExit; the caller reports it. Only Ctrl-C passes, which is not an error of
    # the function.
    try:
        result = call()
        if not inspect.isawaitable(result):
            return Outcome(result)
        return asyncio.run_coroutine_threadsafe(_settle(lambda: result), _responsive_loop()).result()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _ctrl_c_raises():
            raise
        return Outcome(error=error)


def _ctrl_c_raises() -> bool:
    """Whether a KeyboardInterrupt here can come from Ctrl-C: in the main thread, with Python's own signal handler."""
    here = threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _responsive_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, or a new one if a call that never awaits blocks it."""
    answer = asyncio.run_coroutine_threadsafe(_settle(functools.partial(asyncio.sleep, 0)), _event_loop())
    if isinstance(_wait(answer, 1.0).error, TimedOut):
        _event_loop.cache_clear()
    return _event_loop()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the run: sessions and semaphores of async functions stay bound to the loop of their first use."""
    return event_loop(THREAD)
