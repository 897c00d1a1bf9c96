"""Run the points of a sweep, each in its own process and folder."""

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
from nlgrpo.config.schema import Config, differences, to_dict
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.timing import StopSignal
from nlgrpo.training.run_folder import completed
from nlgrpo.training.sweeps import state as sweep_state
from nlgrpo.training.sweeps.state import Point, State, SweepState

LOCK = "sweep.lock"
FULL = (atomic_files.CANNOT, os.strerror(errno.ENOSPC))  # errors of a full disk; the second if the log itself fails


def _base(setting: Setting) -> dict[str, Any]:
    """The configuration as JSON values, without the varied keys and the run's folder."""
    base = json.loads(json.dumps(to_dict(setting.config)))
    objectives = [f"rewards.{name}.objective" for name in base["rewards"]]
    for key in ["train.out", *setting.overrides]:
        for name in objectives if key == grid.OBJECTIVE else [key]:
            *path, last = name.split(".")
            section = base
            for part in path:
                section = section[part]
            section.pop(last, None)
    return base


def check_usable(folder: Path) -> None:
    """Raise ValueError if the folder holds anything but a sweep; files of a sweep that was killed early are allowed."""
    if folder.exists() and not (folder / sweep_state.FILE).exists():
        empty = {LOCK, f"{sweep_state.FILE}.tmp", "logs"}
        if not (folder.is_dir() and {path.name for path in folder.iterdir()} <= empty):
            raise ValueError(f"{folder} exists but holds no sweep; choose another folder with --out")


def merge(folder: Path, settings: Sequence[Setting]) -> tuple[SweepState, list[Point]]:
    """Return the folder's manifest, or a new one, with a point for each of ``settings``, and these points in order."""
    base = _base(settings[0])
    manifest = sweep_state.read(folder) if (folder / sweep_state.FILE).exists() else SweepState(folder, base, [])
    _same_sweep(manifest, base, settings[0].overrides)
    keys = list((manifest.points or settings)[0].overrides)  # the order that folder names use
    wanted = []
    for setting in settings:
        overrides = {key: setting.overrides[key] for key in keys}
        point = next((point for point in manifest.points if point.overrides == overrides), None)
        if point is None:
            taken = [point.name for point in manifest.points]
            point = Point(overrides, folder / grid.folder_name(overrides, taken))
            manifest.points.append(point)
        wanted.append(point)
    for point in manifest.points:  # a run's folder is more recent than the manifest
        if point.finished():
            point.state = "done"
        elif point.state in ("running", "done"):
            point.state = "stopped" if point.folder.exists() else "waiting"
    return manifest, wanted


def _same_sweep(manifest: SweepState, base: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    known = manifest.points[0].overrides if manifest.points else overrides
    if set(known) != set(overrides):
        raise ValueError(
            f"{manifest.folder} holds a sweep over {', '.join(known)}, but this one is over {', '.join(overrides)}; "
            "pass all options of the saved sweep, even with one value, or choose another folder with --out"
        )
    changed = differences(completed(manifest.base, base, Config), base)
    if changed:
        lines = [f"{manifest.folder} holds a sweep with a different configuration:", *(f"  {line}" for line in changed)]
        raise ValueError("\n".join([*lines, "  Choose another folder with --out"]))


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Create and lock the folder; yields the lock's descriptor. Runs inherit it and may hold the lock longer."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another sweep, or a run that it started, is using {folder}; wait until it ends"
            ) from None
        yield file.fileno()


@dataclass
class SweepRunner:
    """Runs the points of a manifest, ``jobs`` at a time, with one thread per running process."""

    manifest: SweepState
    ranks: int
    jobs: int
    lock: int  # descriptor of the folder's lock, which every run inherits
    stop: StopSignal = field(default_factory=StopSignal)
    insisted: bool = False  # a second Ctrl-C was received
    broken: bool = False  # an error that ends the whole sweep
    writes: threading.Lock = field(default_factory=threading.Lock)

    def run_all(self, points: Sequence[tuple[Setting, Point]], retry: bool) -> bool:
        """Run the unfinished points in this order. Returns whether a signal stopped the sweep early."""
        todo = to_run([point for _, point in points], retry)
        say(f"{self.manifest.folder}: {len(points)} points, {len(todo)} to run")
        slots, ended = SimpleQueue[int](), list[Point]()
        for slot in range(self.jobs):
            slots.put(slot)

        def run(number: int, point: Point) -> None:
            if self.stop.received or self.broken:
                return
            slot, label = slots.get(), f"[{number}/{len(todo)}] {point.name}"
            try:
                say(f"{label}: {'resumes' if point.folder.exists() else 'starts'}")
                self._run(next(setting for setting, other in points if other is point), point, slot)
                ended.append(point)
                result = f"{point.state} after {clock_time(point.seconds)}"
                result += f": {point.error}" if point.error else ""
                say(f"{label}: {result}{_time_left(self.manifest, (len(todo) - len(ended)) / self.jobs)}")
            except BaseException:
                self.broken = True
                raise
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(self.jobs) as pool:
            runs = [pool.submit(run, i, point) for i, point in enumerate(todo, 1)]
            while True:
                try:
                    wait(runs)
                    break
                except KeyboardInterrupt:  # the second Ctrl-C
                    self.insisted = True
        self.stop.restore()
        for future in runs:
            future.result()
        return self.stop.received and bool(to_run(todo, retry=False))

    def _run(self, setting: Setting, point: Point, slot: int) -> None:
        """Run one point to its end, or until it has saved a checkpoint after a signal."""
        self._note(point, "running")
        start = time.monotonic()
        line = command(["train", *setting.arguments, f"--train.out={point.folder}"], self.ranks)
        with point.log.open("ab") as log:
            log.write(f"$ {shlex.join(line)}\n".encode())
            log.flush()
            first = log.tell()
            status = self._wait(line, log.fileno(), _environment(slot, self.ranks, self.jobs))
        point.seconds = round(point.seconds + time.monotonic() - start, 1)
        if point.finished():
            self._note(point, "done", status)
        elif self.stop.received or (self.broken and status == -signal.SIGTERM) or status == 0:  # stopped on purpose
            self._note(point, "stopped", status)
        else:
            error = _error(point, status, first)
            full = any(text in error for text in FULL)
            self._note(point, "stopped" if full else "failed", status, error)
            if full:
                raise ValueError(f"{point.name}: {error.removeprefix('error: ')}")

    def _note(self, point: Point, state: State, status: int | None = None, error: str = "") -> None:
        with self.writes:
            point.state, point.status, point.error = state, status, error
            self.manifest.write()

    def _wait(self, line: Sequence[str], log: int, environment: Mapping[str, str]) -> int:
        """Run a process and return its exit status. Sends it SIGTERM when the sweep stops, and again if insisted.

        The process has its own session: a Ctrl-C goes to the terminal's whole process group, and the ranks of a
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
        signals_sent = 0
        while child.poll() is None:
            if signals_sent < (self.stop.received or self.broken) + self.insisted:
                child.terminate()
                signals_sent += 1
            time.sleep(0.05)
        return child.wait()


def to_run(points: Sequence[Point], retry: bool) -> list[Point]:
    passed = ("done",) if retry else ("done", "failed")
    return [point for point in points if point.state not in passed]


def command(arguments: Sequence[str], ranks: int) -> list[str]:
    """Command line that runs `nlgrpo` with these arguments, under torchrun if there are several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "nlgrpo.cli", *arguments]


def _environment(slot: int, ranks: int, jobs: int) -> dict[str, str]:
    """Environment of the run in one of ``jobs`` slots; several slots get their own GPUs and a share of the cores."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # keeps output and errors in order in the log
    if not {"", os.getcwd()} & set(sys.path):  # else `python -m` would put this folder on the path
        environment["PYTHONSAFEPATH"] = "1"
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // (jobs * ranks)))
        if gpus := visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * ranks : (slot + 1) * ranks])
    return environment


def visible_gpus() -> list[str]:
    """Names of the visible GPUs, as in CUDA_VISIBLE_DEVICES."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (named.split(",") if named else [str(i) for i in range(count)])[:count]


def _error(point: Point, status: int, first: int) -> str:
    """The last line of a failed run's log after byte ``first``; lines that start with "error:" take precedence."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    with point.log.open("rb") as log:
        log.seek(first)
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error:")]
    return (named or lines or [f"exit status {status} without output"])[-1]


def say(line: str) -> None:
    print(line, flush=True)


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _time_left(manifest: SweepState, points: float) -> str:
    """Text with the time left for ``points`` points in sequence, from the mean time of the finished ones."""
    times = [point.seconds for point in manifest.points if point.state == "done" and point.seconds > 0]
    return f"; about {clock_time(points * sum(times) / len(times))} left" if times and points else ""
