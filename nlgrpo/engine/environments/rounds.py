"""Rounds: concurrent conversations wait for the policy, which answers all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from nlgrpo.engine.backends.base import EngineError
from nlgrpo.errors import UserCodeError, UserError
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.supervision.threads import event_loop

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

PATIENCE = 0.2  # seconds after the last request, before those that wait are answered without the others


@dataclass(frozen=True)
class Job(Generic[Asked, Answer]):
    """A coroutine that asks the policy, ``conversations`` times at once at most."""

    run: Callable[[Callable[[Asked], Awaitable[Answer]]], Awaitable[Any]]
    conversations: int = 1


class Rounds:
    """Runs coroutines in a thread with an event loop, and answers their requests in the calling thread.

    A round begins when all conversations wait for an answer, so what is answered together does not depend on the speed
    of the machine; conversations whose environment is slower than `PATIENCE` join a later round. With several ranks,
    each round is one of all of them, because a sharded model samples on all ranks together.

    ``timeout``: seconds without a request or an end after which the environment counts as hung.
    """

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self,
        jobs: Sequence[Job[Asked, Answer]],
        answer: Callable[[list[Asked]], list[Answer]],
        *,
        together: bool = True,
    ) -> list[Any]:
        """Run all jobs and return their results; collective with ``together``.

        ``answer`` gets the requests of one round. If a job fails on any rank, all ranks raise EngineError, and the
        other jobs are cancelled.
        """
        together = together and self.ranks.world > 1
        run = _Run(jobs, self._started(), self.timeout)
        failed = None
        try:
            while True:
                waiting, failure = ([], failed) if failed else run.next_round()
                if self.ranks.any(failure is not None) if together else failure is not None:
                    raise failure or EngineError("the environment failed on another rank")
                if not (self.ranks.any(bool(waiting)) if together else waiting):
                    return [task.result() for task in run.tasks]
                try:
                    replies = answer([request for request, _ in waiting])
                except UserError as error:  # all ranks raise before the next round
                    failed = error
                    continue
                for (_, future), reply in zip(waiting, replies, strict=True):
                    run.reply(future, reply)
        finally:
            run.cancel()

    def close(self) -> None:
        """End the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = event_loop("nlgrpo-environment")
        return self._loop


class EnvironmentFailed(EngineError, UserCodeError):
    """An environment, which is code of the user, raised ``__cause__``."""


class _Run(Generic[Asked, Answer]):
    """The jobs of one call, and what they ask for."""

    def __init__(self, jobs: Sequence[Job[Asked, Answer]], loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.jobs = jobs
        self.loop = loop
        self.timeout = timeout
        self.events: SimpleQueue[tuple[Asked, asyncio.Future[Answer]] | int] = SimpleQueue()
        self.live = dict(enumerate(jobs))
        self.tasks: list[Future[Any]] = [asyncio.run_coroutine_threadsafe(self._work(job), loop) for job in jobs]
        for i, task in enumerate(self.tasks):
            task.add_done_callback(partial(self._ended, i))

    def _ended(self, number: int, _: Future[Any]) -> None:
        self.events.put(number)

    async def _work(self, job: Job[Asked, Answer]) -> Any:
        try:
            return await job.run(self._ask)
        except (KeyboardInterrupt, SystemExit) as error:  # they would end the thread of the loop
            raise EnvironmentFailed(f"the environment raised {type(error).__name__}") from error

    async def _ask(self, asked: Asked) -> Answer:
        future: asyncio.Future[Answer] = self.loop.create_future()
        self.events.put((asked, future))
        return await future

    def next_round(self) -> tuple[list[tuple[Asked, asyncio.Future[Answer]]], Exception | None]:
        """Return the requests of the next round, none if all jobs have ended; and the error of a job that failed."""
        waiting: list[tuple[Asked, asyncio.Future[Answer]]] = []
        while len(waiting) < sum(job.conversations for job in self.live.values()):
            try:
                event = self.events.get(timeout=PATIENCE if waiting else self.timeout)
            except Empty:
                if waiting:
                    break
                return [], EngineError(
                    f"the environment did nothing for {self.timeout:g} s; it hangs, or environment.timeout is too short"
                )
            if isinstance(event, int):
                del self.live[event]
                if (error := self.tasks[event].exception()) is not None:
                    return [], _as_engine_error(error)
            else:
                waiting.append(event)
        return waiting, None

    def reply(self, future: asyncio.Future[Answer], answer: Answer) -> None:
        def give() -> None:
            if not future.done():  # it was cancelled
                future.set_result(answer)

        self.loop.call_soon_threadsafe(give)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


def _as_engine_error(error: BaseException) -> Exception:
    if isinstance(error, EngineError):
        return error
    found = EnvironmentFailed(f"the environment failed, {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
