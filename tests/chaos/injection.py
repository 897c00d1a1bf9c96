"""One injection: start a command, disturb it at one place, start it again if it has not finished, and check it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos import processes
from chaos.results import damage_newest, partial_files, results
from chaos.server import RewardServer

RANKS = 8  # as in faults.c
SHARED = struct.Struct(f"{RANKS + 1}qi4xq")  # counts of operations, fired, jump of the clock
SHARED_MEMORY = Path("/dev/shm")
ENDING = 60.0  # seconds in which all processes end after the first one

# What the library does in the process: an action and its amount.
INSIDE: dict[str, tuple[str, Callable[[random.Random], int]]] = {
    "process killed": ("kill", lambda rng: 0),
    "rank stopped": ("stop", lambda rng: 0),
    "rank lost": ("lost", lambda rng: 0),
    "disk full": ("full", lambda rng: 0),
    "I/O error": ("io", lambda rng: rng.choice((0, 1, 3))),  # operations; 0: all
    "slow disk": ("slow", lambda rng: rng.randint(5, 60)),  # milliseconds
    "clock jump": ("clock", lambda rng: rng.choice((-1, 1)) * rng.choice((3600, 86400, 40_000_000))),  # seconds
}
# What is done from outside, while a process is stopped at the place.
OUTSIDE = ("all killed", "launcher killed", "suspended", "SIGTERM", "SIGINT", "newest file damaged", "server down",
           "server hangs")  # fmt: skip
# Of these, nothing prints a traceback, and temporary files are removed.
GENTLE = ("disk full", "I/O error", "SIGTERM", "SIGINT", "clock jump", "slow disk", "suspended")


@dataclass(frozen=True)
class Workload:
    """A command: ``main(work, out)`` runs it, with results below ``out``."""

    name: str
    main: Callable[[Path, Path], int]
    kinds: tuple[str, ...]
    seconds: float = 120.0  # in which it ends
    target: str = "leader"  # of signals: the leader, or its child


@dataclass
class Undisturbed:
    """What an undisturbed run leaves, and its numbers of file operations, by rank (-1: of other processes)."""

    files: dict[str, str]
    operations: dict[int, int]


@dataclass
class Outcome:
    """How an injection ended; ``lost`` says what is wrong, "" if nothing is."""

    place: str
    lost: str = ""
    resumed: bool = False  # by a second start
    fired: bool = True
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Lost(Exception):
    """A check has failed."""


class Shared:
    """The file in which processes count their operations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(SHARED.size))

    def read(self) -> tuple[dict[int, int], bool]:
        """Return the number of operations by rank, and whether the fault has been injected."""
        *counts, fired, _ = SHARED.unpack(self.path.read_bytes())
        return {slot - 1: count for slot, count in enumerate(counts) if count}, bool(fired)


def environment(out: Path, shared: Shared, **fault: object) -> dict[str, str]:
    _temporary(out).mkdir(exist_ok=True)
    settings = {"FOLDER": out, "COUNTS": shared.path, "MEMORY": _memory(out)}
    settings |= {name.upper(): value for name, value in fault.items()}
    return {f"CHAOS_{name}": str(value) for name, value in settings.items()} | {"TMPDIR": str(_temporary(out))}


def undisturbed(workload: Workload, work: Path) -> Undisturbed:
    """Run the command to its end."""
    out = work / f"{workload.name}-undisturbed"
    shared = Shared(out.with_suffix(".counts"))
    run = processes.start(lambda: workload.main(work, out), out.with_suffix(".log"), environment(out, shared))
    if not run.wait(workload.seconds) or run.status:
        raise SystemExit(f"error: undisturbed, {workload.name} ended with status {run.status}; see {work}")
    return Undisturbed(results(out), shared.read()[0])


def inject(workload: Workload, kind: str, work: Path, name: str, truth: Undisturbed, server: RewardServer) -> Outcome:
    """Disturb one run of the command in a new folder ``name``, at a place that depends on the name."""
    rng = random.Random(name)
    rank = rng.choice(sorted(truth.operations))
    at = rng.randint(1, truth.operations[rank])
    outcome = Outcome(f"operation {at} of {'rank ' + str(rank) if rank >= 0 else 'the process'}")
    begun = time.monotonic()
    try:
        Injection(workload, kind, work, work / name, rng, server).run(rank, at, truth, outcome)
    except Lost as lost:
        outcome.lost = str(lost)
        processes.kill_all({server.pid})
    outcome.seconds = time.monotonic() - begun
    return outcome


@dataclass
class Injection:
    workload: Workload
    kind: str
    work: Path
    out: Path
    rng: random.Random
    server: RewardServer

    def run(self, rank: int, at: int, truth: Undisturbed, outcome: Outcome) -> None:
        shared = Shared(self.out.with_suffix(".counts"))
        action, amount = INSIDE.get(self.kind, ("stop", lambda rng: 0))
        fault = {"action": action, "amount": amount(self.rng), "at": at, "rank": rank}
        run = self.start(environment(self.out, shared, **fault))
        if self.kind in OUTSIDE:
            self.disturb(run, shared, outcome)
        finished = self.end(run)
        if not (fired := shared.read()[1]):
            outcome.fired = False
        if not finished:
            if self.kind == "newest file damaged":
                outcome.notes.append(damage_newest(self.out, self.rng))
            outcome.resumed = True
            again = self.start(environment(self.out, shared))
            if not self.end(again):
                raise Lost(f"started again, it ended with status {again.status}")
        self.compare(truth)
        if fired and self.kind in GENTLE:
            self.check_manners()

    def start(self, settings: dict[str, str]) -> processes.Forked:
        return processes.start(lambda: self.workload.main(self.work, self.out), self.out.with_suffix(".log"), settings)

    @property
    def log(self) -> str:
        path = self.out.with_suffix(".log")
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def disturb(self, run: processes.Forked, shared: Shared, outcome: Outcome) -> None:
        """Wait until a process has stopped at the place, act from outside, and continue the process."""
        until = time.monotonic() + self.workload.seconds
        while not shared.read()[1]:
            if run.ended() or time.monotonic() > until:
                return
            time.sleep(0.002)
        time.sleep(0.01)  # until it has stopped
        tree, children = [run.pid, *processes.descendants(run.pid)], processes.children(run.pid)
        target = children[0] if self.workload.target == "child" and children else run.pid
        if self.kind in ("all killed", "newest file damaged"):
            processes.kill_all({self.server.pid})
        elif self.kind == "launcher killed":
            os.kill(target, signal.SIGKILL)
        elif self.kind == "suspended":
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(target, number)
                time.sleep(self.rng.uniform(0.2, 3.0))
        elif self.kind.startswith("SIG"):
            os.kill(target, getattr(signal, self.kind))
        else:
            outcome.notes.append(self.server.disturb(self.kind, self.rng))
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def end(self, run: processes.Forked) -> bool:
        """Wait for the end of all processes; returns whether the command has finished its work."""
        known = {self.server.pid}
        if not run.wait(0.75 * self.workload.seconds):
            processes.continue_last_ranks(run.pid)
            run.wait(0.25 * self.workload.seconds)
        if not run.ended():
            raise Lost(f"it has not ended after {self.workload.seconds:.0f} s")
        if left := processes.wait_for_orphans(ENDING, known):
            raise Lost(f"processes are left: {', '.join(map(processes.describe, left))}")
        self.server.recover()
        return run.status == 0 and not self.log.rstrip().endswith("run the same command again to resume")

    def compare(self, truth: Undisturbed) -> None:
        """Check what is left. Raises Lost."""
        found = results(self.out)
        names = sorted(found.keys() | truth.files.keys())
        if unequal := [name for name in names if found.get(name) != truth.files.get(name)]:
            raise Lost(f"not equal to the undisturbed run: {', '.join(unequal)}")
        if files := partial_files(self.out):
            raise Lost(f"partial files are left: {', '.join(files)}")
        if leaked := _shared_memory(self.out):
            raise Lost(f"shared memory is left: {', '.join(leaked)}")

    def check_manners(self) -> None:
        """Check what is printed, and temporary files. Raises Lost."""
        if any(line.startswith("Traceback") for line in self.log.splitlines()):
            raise Lost("a traceback was printed")
        if files := sorted(path.name for path in _temporary(self.out).iterdir()):
            raise Lost(f"temporary files are left: {', '.join(files)}")


def _temporary(out: Path) -> Path:
    return out.with_name(f"{out.name}.tmp")


def _memory(out: Path) -> Path:
    return out.with_suffix(".memory")


def _shared_memory(out: Path) -> list[str]:
    """Names of the shared memory that the run has made and not removed; other processes have memory of their own."""
    noted = _memory(out)
    if not noted.exists():
        return []
    return sorted(name for name in set(noted.read_text("utf-8").splitlines()) if (SHARED_MEMORY / name).exists())
