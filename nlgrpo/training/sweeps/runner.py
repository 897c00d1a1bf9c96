"""Runs the points of a sweep, each in a process and a folder of its own."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from nlgrpo.config import grid
from nlgrpo.config.grid import Setting
from nlgrpo.config.schema import differences, to_dict
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.timing import StopSignal
from nlgrpo.training.sweeps import state as sweep_state
from nlgrpo.training.sweeps.state import Point, State, SweepState

LOCK = "sweep.lock"


FULL = (atomic_files.CANNOT, os.strerror(errno.ENOSPC))  # the latter of a log that has no room for more


def _base(setting: Setting) -> dict[str, Any]:
    """The configuration without the values that vary and without the run's folder, as JSON has it."""
    base = json.loads(json.dumps(to_dict(setting.config)))
    of_all = [f"rewards.{name}.objective" for name in base["rewards"]]
    for key in ["train.out", *setting.overrides]:
        for name in of_all if key == grid.OBJECTIVE else [key]:
            *path, last = name.split(".")
            section = base
            for part in path:
                section = section[part]
            section.pop(last, None)
    return base


def check_usable(folder: Path) -> None:
    """Refuse a folder that holds something else; what a sweep that was killed at once leaves is nothing."""
    if folder.exists() and not (folder / sweep_state.FILE).exists():
        empty = {LOCK, f"{sweep_state.FILE}.tmp", "logs"}
        if not (folder.is_dir() and {path.name for path in folder.iterdir()} <= empty):
            raise ValueError(f"{folder} exists and holds no sweep; choose another folder with --out")


def merge(folder: Path, settings: Sequence[Setting]) -> tuple[SweepState, list[Point]]:
    """The folder's manifest, or a new one, with these points in it; and the points in the order of ``settings``."""
    base = _base(settings[0])
    manifest = sweep_state.read(folder) if (folder / sweep_state.FILE).exists() else SweepState(folder, base, [])
    _same_sweep(manifest, base, settings[0].overrides)
    keys = list((manifest.points or settings)[0].overrides)  # in the order in which names have them
    wanted = []
    for setting in settings:
        overrides = {key: setting.overrides[key] for key in keys}
        point = next((point for point in manifest.points if point.overrides == overrides), None)
        if point is None:
            taken = [point.name for point in manifest.points]
            point = Point(overrides, folder / grid.folder_name(overrides, taken))
            manifest.points.append(point)
        wanted.append(point)
    for point in manifest.points:  # what its folder says is newer than what was last written here
        if point.finished():
            point.state = "done"
        elif point.state in ("running", "done"):
            point.state = "stopped" if point.folder.exists() else "waiting"
    return manifest, wanted


def _same_sweep(manifest: SweepState, base: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    known = manifest.points[0].overrides if manifest.points else overrides
    if set(known) != set(overrides):
        raise ValueError(
            f"{manifest.folder} holds a sweep over {', '.join(known)}, and this one is over {', '.join(overrides)}; "
            "give every one of its options, if only one value, or choose another folder with --out"
        )
    changed = differences(manifest.base, base)
    if changed:
        lines = [f"{manifest.folder} holds a sweep of another configuration:", *(f"  {line}" for line in changed)]
        raise ValueError("\n".join([*lines, "  Choose another folder with --out"]))


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """The folder, made where there is none, for this sweep alone: a lock that a run which outlives it holds as well."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another sweep, or a run that one left behind, is at work in {folder}; wait for it"
            ) from None
        yield file.fileno()


@dataclass
class SweepRunner:
    """Runs the points of a manifest, ``jobs`` at a time; a thread waits for the process of each."""

    manifest: SweepState
    ranks: int
    jobs: int
    lock: int  # the folder's, which every run holds as well
    stop: StopSignal = field(default_factory=StopSignal)
    insisted: bool = False  # by a second Ctrl-C
    broken: bool = False  # by what ends the other points too
    writes: threading.Lock = field(default_factory=threading.Lock)

    def run_all(self, points: Sequence[tuple[Setting, Point]], retry: bool) -> bool:
        """Run what is to be run, in this order. Returns whether a signal ended it early."""
        todo = to_run([point for _, point in points], retry)
        say(f"{self.manifest.folder}: {len(points)} points, {len(todo)} to run")
        free, ended = SimpleQueue[int](), list[Point]()
        for place in range(self.jobs):
            free.put(place)

        def run(number: int, point: Point) -> None:
            if self.stop.received or self.broken:
                return
            place, where = free.get(), f"[{number}/{len(todo)}] {point.name}"
            try:
                say(f"{where}: {'goes on' if point.folder.exists() else 'begins'}")
                self._run(next(setting for setting, its in points if its is point), point, place)
                ended.append(point)
                how = f"{point.state} after {clock_time(point.seconds)}" + (f": {point.error}" if point.error else "")
                say(f"{where}: {how}{_time_left(self.manifest, (len(todo) - len(ended)) / self.jobs)}")
            except BaseException:
                self.broken = True
                raise
            finally:
                free.put(place)

        with ThreadPoolExecutor(self.jobs) as pool:
            runs = [pool.submit(run, i, point) for i, point in enumerate(todo, 1)]
            while True:
                try:
                    wait(runs)
                    break
                except KeyboardInterrupt:  # the second Ctrl-C
                    self.insisted = True
        self.stop.restore()
        for each in runs:
            each.result()
        return self.stop.received and bool(to_run(todo, retry=False))

    def _run(self, setting: Setting, point: Point, place: int) -> None:
        """Run one point to its end, or to the checkpoint that it writes when it is stopped."""
        self._note(point, "running")
        began = time.monotonic()
        line = command(["train", *setting.arguments, f"--train.out={point.folder}"], self.ranks)
        with point.log.open("ab") as log:
            log.write(f"$ {shlex.join(line)}\n".encode())
            log.flush()
            first = log.tell()
            status = self._wait(line, log.fileno(), _environment(place, self.ranks, self.jobs))
        point.seconds = round(point.seconds + time.monotonic() - began, 1)
        if point.finished():
            self._note(point, "done", status)
        elif self.stop.received or (self.broken and status == -signal.SIGTERM) or status == 0:  # stopped on purpose
            self._note(point, "stopped", status)
        else:
            error = _error(point, status, first)
            full = any(said in error for said in FULL)
            self._note(point, "stopped" if full else "failed", status, error)
            if full:
                raise ValueError(f"{point.name}: {error.removeprefix('error: ')}")

    def _note(self, point: Point, state: State, status: int | None = None, error: str = "") -> None:
        with self.writes:
            point.state, point.status, point.error = state, status, error
            self.manifest.write()

    def _wait(self, line: Sequence[str], log: int, environment: Mapping[str, str]) -> int:
        """Return the exit status of a process. A stop of the sweep is passed on once, and a second one again.

        It leads a session of its own, because a Ctrl-C goes to the whole group of the terminal, and the ranks of a
        torchrun would get it twice.
        """
        child = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[self.lock],
            start_new_session=True,
        )
        told = 0
        while child.poll() is None:
            if told < (self.stop.received or self.broken) + self.insisted:
                child.terminate()
                told += 1
            time.sleep(0.05)
        return child.wait()


def to_run(points: Sequence[Point], retry: bool) -> list[Point]:
    passed = ("done",) if retry else ("done", "failed")
    return [point for point in points if point.state not in passed]


def command(arguments: Sequence[str], ranks: int) -> list[str]:
    """What starts `nlgrpo` with these arguments in a process of its own, by torchrun where the ranks are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "nlgrpo.cli", *arguments]


def _environment(place: int, ranks: int, jobs: int) -> dict[str, str]:
    """Of a run at one of the ``jobs`` places: of several, each has GPUs and its share of the cores to itself."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # what it prints comes before the error that ends it
    if not {"", os.getcwd()} & set(sys.path):  # `python -m` would look into this folder first, as the sweep did not
        environment["PYTHONSAFEPATH"] = "1"
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // (jobs * ranks)))
        if gpus := visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place * ranks : (place + 1) * ranks])
    return environment


def visible_gpus() -> list[str]:
    """By the names that CUDA_VISIBLE_DEVICES gives them."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (named.split(",") if named else [str(i) for i in range(count)])[:count]


def _error(point: Point, status: int, first: int) -> str:
    """The last line that a failed run wrote behind byte ``first`` of its log, of those that name an error if any do."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    with point.log.open("rb") as log:
        log.seek(first)
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error:")]
    return (named or lines or [f"exit status {status} without a word"])[-1]


def say(line: str) -> None:
    print(line, flush=True)


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _time_left(manifest: SweepState, points: float) -> str:
    """For so many points, one after another, by the mean of those that are done."""
    took = [point.seconds for point in manifest.points if point.state == "done" and point.seconds > 0]
    return f"; about {clock_time(points * sum(took) / len(took))} left" if took and points else ""
