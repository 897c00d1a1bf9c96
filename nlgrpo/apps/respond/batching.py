"""The queue of a server: requests wait here, and a thread responds to those that fit together in a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nlgrpo.apps.respond.responder import Responder, Response
from nlgrpo.data.conversations import Prompt
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError

log = logging.getLogger(__name__)

Answer = list[Response]
SLOW = 5.0  # seconds in which a reward scores a batch, after which the next batch begins
MOST = 8  # batches at the same time, of which one uses the model and the others are being scored
PATIENCE = 60.0  # seconds of a batch that failed, above which its jobs do not run again: its reward may hang


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

    One thread responds to one batch after another. Where the reward takes longer than `SLOW` seconds, another thread
    takes over: the first one only finishes its batch, so that a reward that hangs does not block the other requests.
    """

    def __init__(self, responder: Responder, seed: int = 0, max_queue: int = 256) -> None:
        if isinstance(responder, Responder):
            responder = replace(responder, scoring=self._scoring)
        self.responder = responder
        self.seed = seed
        self.max_queue = max_queue
        self.model = threading.Lock()  # held by the thread that uses the model
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.threads: list[threading.Thread] = []  # the last one takes the jobs
        self._start()

    def _start(self) -> None:
        self.threads.append(threading.Thread(target=self._run, name="nlgrpo-serve", daemon=True))
        self.threads[-1].start()

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
        """Refuse new jobs, fail the waiting ones with `Closed`, and return whether the running batches have ended."""
        with self.changed:
            self.closed = True
            jobs = list(self.waiting)
            self.waiting = deque()
            self.changed.notify_all()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Closed())
        end = None if timeout is None else time.monotonic() + timeout
        for thread in self.threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _run(self) -> None:
        while self.threads[-1] is threading.current_thread() and (jobs := self._next()):
            running = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if not running:
                continue
            start = time.monotonic()
            with self.model:
                try:
                    self._respond(running)
                except BaseException as error:  # of user code; libraries in Rust panic with a BaseException
                    slow = time.monotonic() - start > PATIENCE
                    self._respond_alone(running, error, retry=len(running) > 1 and not slow)

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Context in which the reward scores a batch: the model is free, and the next batch begins if it takes long."""
        late = threading.Timer(SLOW, self._take_over, [threading.current_thread()])
        late.daemon = True
        late.start()
        self.model.release()
        try:
            yield
        finally:
            late.cancel()
            self.model.acquire()

    def _take_over(self, slow: threading.Thread) -> None:
        """Start a thread for the next batches, unless there are enough, or one has been started."""
        with self.changed:
            self.threads = [thread for thread in self.threads if thread.is_alive()]
            if self.threads and self.threads[-1] is slow and len(self.threads) < MOST:
                self._start()

    def _respond_alone(self, jobs: Sequence[Job], error: BaseException, *, retry: bool) -> None:
        """Respond to the jobs of a failed batch one by one, or fail them all with its error."""
        for job in jobs:
            if not retry:
                self._fail(job, error)
                continue
            try:
                self._respond([job])
            except BaseException as own:
                self._fail(job, own)

    def _next(self) -> list[Job]:
        """Wait for jobs and take those of the next batch. Returns an empty list when the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.waiting)
            if not self.waiting:
                return []
            first = self.waiting[0]
            chosen = list[Job]()
            rows = 0
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
        responses, _ = self.responder.respond(batch, seed=self.seed, sampling=jobs[0].sampling, stop=jobs[0].stop)
        rest = iter(responses)
        for job in jobs:
            job.future.set_result([next(rest) for _ in job.ids])

    def _fail(self, job: Job, error: BaseException) -> None:
        log.error(
            "request failed: %s: %s",
            type(error).__name__,
            error,
            exc_info=error.__cause__ if isinstance(error, UserError) else error,
        )
        job.future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def _joined(parts: Any) -> list[Any]:
    return [item for part in parts for item in part]
