"""The queue of a server: requests wait here, and one thread responds to those that fit together in a batch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nlgrpo.data.prompt_dataset import Batch, Prompt
from nlgrpo.engine.guided_search import Cost
from nlgrpo.engine.inference.responder import Responder, Response
from nlgrpo.engine.sampling import Sampling

log = logging.getLogger(__name__)

Answer = tuple[list[Response], Cost]


class QueueFull(Exception):
    """The queue has no place for another request."""


class Closed(Exception):
    """The server is stopping."""


@dataclass
class Job:
    """Request in the queue. ``keys`` seed the noise of its prompts."""

    ids: list[list[int]]
    prompts: list[Prompt]
    keys: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    future: Future[Answer] = field(default_factory=Future)


class Batcher:
    """Responds to jobs in the order of their arrival; jobs with the same sampling options share a batch.

    A batch has at most ``responder.max_rows`` candidates, or one job. A job that is cancelled before its batch starts
    is never run. If a batch fails, its jobs run again one by one, so that a job fails alone. ``close`` ends the thread.
    """

    def __init__(self, responder: Responder, seed: int = 0, max_queue: int = 256) -> None:
        self.responder, self.seed, self.max_queue = responder, seed, max_queue
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="nlgrpo-serve", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> Future[Answer]:
        """Append a job to the queue. Raises QueueFull or Closed."""
        with self.changed:
            if self.closed:
                raise Closed
            if len(self.waiting) >= self.max_queue:
                raise QueueFull
            self.waiting.append(job)
            self.changed.notify()
        return job.future

    def __len__(self) -> int:
        return len(self.waiting)

    def close(self, timeout: float | None = None) -> bool:
        """Refuse new jobs, fail the waiting ones with `Closed`, and return whether the running batch has ended."""
        with self.changed:
            self.closed = True
            jobs, self.waiting = list(self.waiting), deque()
            self.changed.notify_all()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Closed())
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def _run(self) -> None:
        while jobs := self._next():
            running = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if not running:
                continue
            try:
                self._respond(running)
            except Exception as error:  # rewards are user code
                if len(running) == 1:
                    self._fail(running[0], error)
                    continue
                for job in running:
                    try:
                        self._respond([job])
                    except Exception as own:
                        self._fail(job, own)

    def _next(self) -> list[Job]:
        """Wait for jobs and take those of the next batch. Returns an empty list when the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.waiting)
            if not self.waiting:
                return []
            first = self.waiting[0]
            chosen, rows = list[Job](), 0
            for job in self.waiting:
                if (job.sampling, job.stop) != (first.sampling, first.stop):
                    continue
                rows += len(job.ids) * self.responder.candidates
                if chosen and rows > self.responder.max_rows:
                    break
                chosen.append(job)
            taken = set(map(id, chosen))
            self.waiting = deque(job for job in self.waiting if id(job) not in taken)
            return chosen

    def _respond(self, jobs: Sequence[Job]) -> None:
        batch = Batch(
            index=_joined(job.keys for job in jobs),
            ids=_joined(job.ids for job in jobs),
            prompts=_joined(job.prompts for job in jobs),
            columns={},
        )
        responses, cost = self.responder.respond(batch, seed=self.seed, sampling=jobs[0].sampling, stop=jobs[0].stop)
        rest, shared = iter(responses), len(jobs) == 1
        for job in jobs:
            own = [next(rest) for _ in job.ids]
            tokens = cost.tokens if shared else sum(len(one.tokens) for r in own for one in r.candidates)
            job.future.set_result((own, Cost(tokens=tokens)))

    def _fail(self, job: Job, error: Exception) -> None:
        log.error("request failed: %s: %s", type(error).__name__, error, exc_info=not isinstance(error, ValueError))
        job.future.set_exception(error)


def _joined(parts: Any) -> list[Any]:
    return [item for part in parts for item in part]
