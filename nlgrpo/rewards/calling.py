"""Calling functions that are not ours: sync or async, each bounded in time, whatever they raise; what they log."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]


class TimedOut(Exception):
    """The call had not finished when its time was over."""


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or the error that it ended in."""

    result: Any = None
    error: BaseException | None = None


class Log:
    """What one call logs, by the functions that TRL hands to rewards; they raise in the caller for what is no such log.

    ``count``: the completions, for each of which a column has a value.
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
            raise ValueError(f"log_extra takes a name and {self.count} values, got {column!r} and {len(values)} values")
        self.extra[column] = list(values)


def call_all(calls: Sequence[Call], timeouts: Sequence[float]) -> list[Outcome]:
    """Run every call for at most its timeout (seconds, ``math.inf`` for no limit); outcomes in the order of the calls.

    The async ones start first and run together in one event loop, while the sync ones run one by one.
    A sync call has a thread of its own, and is left behind in it when its time is over: Python can end no thread.
    Without a limit it runs in the caller's thread.
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
            future.cancel()  # ends those that are still running
    return [outcomes[i] for i in range(len(calls))]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: an async function, an object with an async ``__call__``, a partial of one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _settle(call: Callable[[], Awaitable[Any]]) -> Outcome:
    """The outcome as a value: a SystemExit that left the coroutine would end the event loop."""
    try:
        return Outcome(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Outcome(error=error)


def _wait(future: Future[Outcome], seconds: float) -> Outcome:
    # threading refuses waits beyond some centuries, infinity among them, and takes None for no limit.
    wait([future], max(seconds, 0.0) if seconds <= threading.TIMEOUT_MAX else None)
    if not future.done():
        return Outcome(error=TimedOut())
    return Outcome(error=asyncio.CancelledError()) if future.cancelled() else future.result()


def _run_sync(call: Call, seconds: float) -> Outcome:
    if seconds > threading.TIMEOUT_MAX:
        return _settle_sync(call)
    future: Future[Outcome] = Future()
    _start_thread(lambda: future.set_result(_settle_sync(call)))
    return _wait(future, seconds)


def _settle_sync(call: Call) -> Outcome:
    # Foreign code may raise anything, sys.exit() included, and whoever waits reports it.
    # Only Ctrl-C goes through: it arrives in the main thread alone and is not the function's doing.
    try:
        result = call()
        if not inspect.isawaitable(result):
            return Outcome(result)
        return asyncio.run_coroutine_threadsafe(_settle(lambda: result), _responsive_loop()).result()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(error=error)


def _start_thread(target: Callable[[], None]) -> None:
    """Start a daemon thread, so that a hung call cannot keep the process alive.

    It has the caller's GPU, which PyTorch remembers per thread.
    """
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        target()

    threading.Thread(target=run, daemon=True, name="nlgrpo-reward").start()


def _responsive_loop() -> asyncio.AbstractEventLoop:
    """The event loop, or a new one when a call that never awaits has blocked the old one."""
    answer = asyncio.run_coroutine_threadsafe(_settle(functools.partial(asyncio.sleep, 0)), _event_loop())
    if isinstance(_wait(answer, 1.0).error, TimedOut):
        _event_loop.cache_clear()
    return _event_loop()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole run: sessions and semaphores of async functions stay bound to the first that they meet."""
    loop = asyncio.new_event_loop()
    _start_thread(loop.run_forever)
    return loop
