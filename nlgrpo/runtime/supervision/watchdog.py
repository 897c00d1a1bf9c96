"""The watchdog of a run with several ranks: finds a rank that is silent or hangs, names it, and ends all ranks.

Each rank reports to the store of the process group every few seconds: its phase, and for how long its main thread has
been in the same place of the program, with its stack. Each rank reads the reports of the others. The run ends if

- a rank does not report: its process is stopped, dead or waits for a disk, or a function holds the interpreter's lock;
- no rank makes progress: one hangs, and the others wait for it in a collective;
- the store does not answer: the launcher, or the rank that serves it, is gone.

The first rank that is alive says which rank is to blame, in which phase, since when, with its stack. Then every rank
exits with status 1, so that the launcher ends those that cannot, and restarts the run from its last checkpoint.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from nlgrpo.runtime.supervision import phases
from nlgrpo.runtime.supervision.phases import TimeLimits
from nlgrpo.runtime.supervision.rendezvous import Rendezvous


def boot() -> str:
    """Name this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def namespace() -> str:
    """Name the set of processes that this one can see: on this boot, in this container."""
    try:
        return f"{boot()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state(pid: int) -> str:
    """Return the state of a process, as ps: "T" for a stopped one; "Z" also if there is none."""
    return _status(pid)[0]


def begun(pid: int) -> str:
    """Return when a process began, in ticks since the boot."""
    found = _status(pid)
    return found[19] if len(found) > 19 else ""


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ["Z"]


EVERY = 2.0  # seconds between reports
SILENT = 30.0  # seconds without a report of a process that cannot run, or without an answer of the store
LAST = 5.0  # seconds that the other ranks wait before they exit, while one prints
FRAMES = 16  # of a stack, the innermost ones
_reading = threading.Lock()
CANNOT_RUN = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk", "Z": "dead"}


@dataclass(frozen=True)
class Report:
    """What a rank says about itself, in 300 bytes: each rank reads those of all. ``number`` counts its reports."""

    number: int
    pid: int
    host: str
    pids: str
    """Process namespace, in which ``pid`` is valid."""
    phase: str
    idle: float
    """Seconds that the main thread has been in the same place."""
    limit: float
    """Seconds that it may be there; the largest JSON number for no limit."""
    waits: bool
    """The main thread is in a collective."""
    left: bool
    """The rank has finished."""


@dataclass(frozen=True)
class RankFault:
    """Why the run ends. ``silent``: ranks that cannot print it; ``blamed``: lines about ranks, before their stacks."""

    message: str
    blamed: Mapping[int, str] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()


class Watchdog:
    """Watches the ranks of a ``store`` in a thread of its own. ``end`` is called once, with a message or None.

    Its clock stands still while this process is stopped, so that suspending and resuming all ranks is no fault.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        limits: TimeLimits,
        *,
        end: Callable[[str | None], None] | None = None,
        every: float = EVERY,
        silent: float = SILENT,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self.limits = limits
        self.every = every
        self.silent = silent
        self.end = end or _exit
        self.main = threading.get_ident()
        self.number = 0
        self.clock = 0.0  # seconds that this thread has watched
        self.place = (0, 0.0)  # of the main thread, and the clock when it came there
        self.heard = [(-1, 0.0)] * world  # number of the last report of each rank, and the clock when it arrived
        self.reports: list[Report] = []  # the last ones; none until all ranks have reported
        self.closing = threading.Event()
        self.exchanges = ThreadPoolExecutor(1, thread_name_prefix="nlgrpo-watchdog-store")
        self.thread = threading.Thread(target=self._watch, daemon=True, name="nlgrpo-watchdog")
        self.thread.start()

    def close(self) -> None:
        """Stop watching; the others no longer expect reports."""
        self.closing.set()
        self.thread.join(self.silent + LAST)
        self.exchanges.shutdown(wait=False)

    def _watch(self) -> None:
        leaving = False
        last = time.monotonic()
        while True:  # the first report is written at once: a rank without one may be loading a library for minutes
            answer = self.exchanges.submit(self._exchange, leaving)
            asked = self.clock
            while not _done(answer, self.every) and self.clock - asked < self.silent:
                last = self._advance(last)
            if leaving:
                return
            answered = answer.done() and answer.exception() is None
            fault = self._fault() if answered else self._without_store(answer)
            if fault is not None:
                return self._end(fault)
            leaving = self.closing.wait(self.every)
            last = self._advance(last)

    def _advance(self, last: float) -> float:
        """Advance the clock by the time since ``last``, at most that of two reports: more means a stopped process."""
        now = time.monotonic()
        self.clock += min(now - last, 2 * self.every)
        return now

    def _exchange(self, leaving: bool) -> None:
        """Write the report of this rank, and read those of all ranks."""
        frames = _frames(self.main)
        if self._moved(frames):
            self.store.set(f"stack {self.rank}", _text(frames))
        self.store.set(str(self.rank), json.dumps(asdict(self._report(frames, leaving))))
        keys = [str(rank) for rank in range(self.world)]
        if not leaving and self.store.check(keys):
            self.reports = [Report(**json.loads(text)) for text in self.store.multi_get(keys)]

    def _moved(self, frames: list[FrameType]) -> bool:
        """Whether the main thread is at another place than in the last report: other calls, or other instructions."""
        place = hash(tuple((id(frame), id(frame.f_code), frame.f_lasti) for frame in frames))
        moved = place != self.place[0]
        if moved:
            self.place = (place, self.clock)
        return moved

    def _report(self, frames: list[FrameType], leaving: bool) -> Report:
        phase = phases.current()
        self.number += 1
        return Report(
            number=self.number,
            pid=os.getpid(),
            host=socket.gethostname(),
            pids=namespace(),
            phase=str(phase),
            idle=self.clock - self.place[1],
            limit=min(self.limits.of(phase.name), sys.float_info.max),
            waits=any("/torch/distributed/" in frame.f_code.co_filename for frame in frames[:FRAMES]),
            left=leaving,
        )

    def _without_store(self, answer: Future[None]) -> RankFault | None:
        """Return the fault that the store does not answer; None if the rank that serves it may have finished."""
        if any(report.left for report in self.reports):
            return None
        why = f"({answer.exception()})" if answer.done() else f"for {self.silent:.0f} s"
        return RankFault(
            f"rank {self.rank}: the store of the process group does not answer {why}; the launcher, or the rank that "
            "serves the store, is gone or stopped",
            silent=frozenset(range(self.world)) - {self.rank},
        )

    def _fault(self) -> RankFault | None:
        """Return what the newest reports show: a rank that is silent, or that no rank makes progress."""
        if not self.reports:
            late = self.clock > self.limits.of("start")
            return RankFault(f"not all ranks have started within {self.clock:.0f} s (train.timeout)") if late else None
        for rank, report in enumerate(self.reports):
            if report.number != self.heard[rank][0]:
                self.heard[rank] = (report.number, self.clock)
        waited = [self.clock - clock for _, clock in self.heard]
        here = {rank: report for rank, report in enumerate(self.reports) if not report.left}
        silent = {}
        for rank in here:
            state = _state(here[rank]) if rank != self.rank and waited[rank] > self.silent else ""
            if state in CANNOT_RUN or waited[rank] > self.limits.silence:  # it may be in a later phase by now
                silent[rank] = _silent(rank, here[rank], waited[rank], state)
        if silent:
            return RankFault("", silent, frozenset(silent))
        idle = {rank: report.idle + waited[rank] for rank, report in here.items()}
        if len(here) == 1 or any(idle[rank] <= report.limit for rank, report in here.items()):
            return None  # the last rank has nobody who waits for it
        blamed = {rank: _stuck(rank, here[rank]) for rank in sorted(here, key=lambda rank: here[rank].waits)}
        return RankFault(f"no rank has made progress for {min(idle.values()):.0f} s (train.timeout)", blamed)

    def _end(self, fault: RankFault) -> None:
        finished = {rank for rank, report in enumerate(self.reports) if report.left}
        alive = sorted(set(range(self.world)) - fault.silent - finished)
        if self.rank == min(alive, default=self.rank):
            lines = [fault.message] if fault.message else []
            self.end("\n".join([*lines, *(f"{line}\n{self._stack(rank)}" for rank, line in fault.blamed.items())]))
        else:
            self.closing.wait(LAST)
            self.end(None)

    def _stack(self, rank: int) -> str:
        """Return the last stack of a rank."""
        answer = self.exchanges.submit(self.store.get, f"stack {rank}")
        try:
            return answer.result(timeout=LAST / 2).decode()
        except (TimeoutError, RuntimeError) as error:
            return f"  unknown: {error!r}"


def _silent(rank: int, report: Report, seconds: float, state: str) -> str:
    how = f", {CANNOT_RUN[state]}" if state in CANNOT_RUN else ""
    return (
        f"rank {rank} (process {report.pid} on {report.host}{how}) has been silent for {seconds:.0f} s. It was "
        f"{report.phase}; its stack was"
    )


def _stuck(rank: int, report: Report) -> str:
    does = "waits for the others" if report.waits else "hangs"
    return f"rank {rank} (process {report.pid} on {report.host}) {does} {report.phase}; its stack is"


def _frames(thread: int) -> list[FrameType]:
    """Return the calls of a thread, the innermost first.

    CPython 3.11 deadlocks if `sys._current_frames` collects garbage while another thread starts (gh-106883).
    """
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _text(frames: list[FrameType]) -> str:
    """Format the innermost calls as Python does in a traceback."""
    calls = ((frame, frame.f_lineno) for frame in reversed(frames[:FRAMES]))
    return "".join(traceback.StackSummary.extract(iter(calls)).format()).rstrip()


def _state(report: Report) -> str:
    """Return the state of a rank's process, as in ps; empty if this process cannot see it."""
    seen = report.pids and report.pids == namespace()
    return state(report.pid) if seen else ""


def _done(answer: Future[None], seconds: float) -> bool:
    """Wait for at most ``seconds``."""
    try:
        answer.exception(timeout=seconds)
    except TimeoutError:
        return False
    return True


def _exit(message: str | None) -> None:
    try:
        if message is not None:
            ends = "All ranks end. Complete checkpoints stay: run the same command again to resume."
            print(f"error: {message}\n{ends}", file=sys.stderr, flush=True)
    finally:  # the terminal may be gone
        os._exit(1)


@contextmanager
def watching(rendezvous: Rendezvous | None, limits: TimeLimits) -> Iterator[None]:
    """Context in which the ranks watch each other; does nothing for one rank or without a limit."""
    if rendezvous is None or rendezvous.world == 1 or math.isinf(limits.seconds):
        yield
        return
    store = rendezvous.connect("watchdog", timedelta(seconds=SILENT))
    watchdog = Watchdog(store, rendezvous.rank, rendezvous.world, limits)
    try:
        yield
    finally:
        watchdog.close()
