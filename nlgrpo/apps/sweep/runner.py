"""Run the points of a sweep, each in its own process or job, and folder."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from nlgrpo.apps.sweep import grid
from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.apps.sweep.grid import Setting
from nlgrpo.apps.sweep.launchers import JOBS, Launcher, Running
from nlgrpo.apps.sweep.state import Point, State, SweepState
from nlgrpo.config.comparing import differences
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.errors import REPORT, UserError
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.file_lock import Busy, FileLock
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.training.run_folder import completed

LOCK = "sweep.lock"
FULL = (atomic_files.CANNOT, os.strerror(errno.ENOSPC))  # errors of a full disk; the second if the log itself fails


def _base(setting: Setting) -> dict[str, Any]:
    """The configuration as JSON values, without the varied keys and the run's folder."""
    base: dict[str, Any] = json.loads(json.dumps(to_dict(setting.config)))
    varied = ["train.out", *setting.overrides]
    if grid.OBJECTIVE in varied:
        varied.remove(grid.OBJECTIVE)
        varied += [f"rewards.{name}.objective" for name in base["rewards"]]
    for key in varied:
        *path, last = key.split(".")
        section = base
        for part in path:
            section = section[part]
        section.pop(last, None)
    return base


def check_usable(folder: Path) -> None:
    """Raise UserError if the folder holds anything but a sweep; files of a sweep that was killed early are allowed."""
    if not folder.exists() or (folder / sweep_state.SWEEP_FILE).exists():
        return
    early = (f"{sweep_state.SWEEP_FILE}.tmp", "logs", JOBS)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    foreign = [name for name in names if name not in early and not name.startswith(LOCK)]
    if foreign or not folder.is_dir():
        raise UserError(f"{folder} exists but holds no sweep; choose another folder with --out")


def merge(folder: Path, settings: Sequence[Setting]) -> tuple[SweepState, list[Point]]:
    """Return the folder's manifest, or a new one, with a point for each of ``settings``, and these points in order."""
    base = _base(settings[0])
    if (folder / sweep_state.SWEEP_FILE).exists():
        manifest = sweep_state.read_sweep(folder)
    else:
        manifest = SweepState(folder, base, [])
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
        elif point.job and point.state in ("queued", "running"):
            continue  # a job runs without the sweep
        elif point.state in ("queued", "running", "done"):
            point.state = "stopped" if point.folder.exists() else "waiting"
    return manifest, wanted


def _same_sweep(manifest: SweepState, base: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    known = manifest.points[0].overrides if manifest.points else overrides
    if set(known) != set(overrides):
        raise UserError(
            f"{manifest.folder} holds a sweep over {', '.join(known)}, but this one is over {', '.join(overrides)}; "
            "pass all options of the saved sweep, even with one value, or choose another folder with --out"
        )
    changed = differences(completed(manifest.base, base, Config), base)
    if changed:
        lines = [f"{manifest.folder} holds a sweep with a different configuration:", *(f"  {line}" for line in changed)]
        raise UserError("\n".join([*lines, "  Choose another folder with --out"]))


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Create and lock the folder; yields the lock's descriptor. Runs inherit it and may hold the lock longer."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / LOCK)
    except Busy as busy:
        raise UserError(f"{folder} is used by {busy}, a sweep or a run that it started; wait until it ends") from None
    try:
        yield lock.file.fileno()
    finally:
        lock.release()


@dataclass
class SweepRunner:
    """Runs the points of a manifest, ``jobs`` at a time, with one thread per running one."""

    manifest: SweepState
    launcher: Launcher
    jobs: int
    stop: StopSignal = field(default_factory=partial(StopSignal, math.inf))  # the runs have limits of their own
    insisted: bool = False  # a second Ctrl-C was received
    broken: bool = False  # an error that ends the whole sweep
    writes: threading.Lock = field(default_factory=threading.Lock)

    def run_all(self, points: Sequence[tuple[Setting, Point]], retry: bool) -> bool:
        """Run the unfinished points in this order. Returns whether a signal stopped the sweep early."""
        todo = to_run([point for _, point in points], retry)
        settings = {point.name: setting for setting, point in points}
        say(f"{self.manifest.folder}: {len(points)} points, {len(todo)} to run")
        slots = SimpleQueue[int]()
        ended = list[Point]()
        for slot in range(self.jobs):
            slots.put(slot)

        def run(number: int, point: Point) -> None:
            if self.stop.received or self.broken:
                return
            slot = slots.get()
            label = f"[{number}/{len(todo)}] {point.name}"
            try:
                say(f"{label}: {'resumes' if point.folder.exists() else 'starts'}")
                self._run(settings[point.name], point, slot)
                ended.append(point)
                result = f"{point.state} after {clock_time(point.seconds)}"
                if point.error:
                    result += f": {point.error}"
                ahead = len(todo) - len(ended)
                say(f"{label}: {result}{_time_left(self.manifest, ahead / self.jobs)}")
            except BaseException:
                self.broken = True
                raise
            finally:
                slots.put(slot)

        with self.stop, ThreadPoolExecutor(self.jobs) as pool:
            runs = [pool.submit(run, i, point) for i, point in enumerate(todo, 1)]
            while True:
                try:
                    wait(runs)
                    break
                except KeyboardInterrupt:  # the second Ctrl-C
                    self.insisted = True
        for future in runs:
            future.result()
        return self.stop.received and bool(to_run(todo, retry=False))

    def _run(self, setting: Setting, point: Point, slot: int) -> None:
        """Run one point to its end, or until it has saved a checkpoint after a signal."""
        arguments = ["train", *setting.arguments, f"--train.out={point.folder}"]
        start = time.monotonic()
        again = True
        while again:
            first = point.log.stat().st_size if point.log.exists() else 0
            run = self.launcher.start(arguments, point, slot)
            point.job = run.job
            status = self._wait(run, point)
            preempted = status == -signal.SIGTERM and not (self.stop.received or self.broken)
            again = self.launcher.resubmits and preempted and not point.finished()
            if again:
                self._note(point, "stopped", status)
                say(f"{point.name}: job {run.job} was stopped from outside; submitted again")
        point.seconds = round(point.seconds + time.monotonic() - start, 1)
        if point.finished():
            self._note(point, "done", status)
            return
        on_purpose = self.stop.received or (self.broken and status == -signal.SIGTERM)
        if on_purpose or status == 0:
            self._note(point, "stopped", status)
            return
        error = run.failure() or _error(point, status, first)
        if any(text in error for text in FULL):
            self._note(point, "stopped", status, error)
            raise UserError(f"{point.name}: {error.removeprefix('error: ')}")
        self._note(point, "failed", status, error)

    def _note(self, point: Point, state: State, status: int | None = None, error: str = "") -> None:
        with self.writes:
            point.state = state
            point.status = status
            point.error = error
            self.manifest.write()

    def _wait(self, run: Running, point: Point) -> int:
        """Return the exit status of a run at its end. Stops it when the sweep stops, and again if insisted."""
        stops = 0
        self._note(point, run.state())
        while (status := run.poll()) is None:
            told = int(self.stop.received or self.broken) + int(self.insisted)
            if stops < told:
                run.stop()
                stops += 1
            if run.state() != point.state:
                self._note(point, run.state())
            time.sleep(self.launcher.interval)
        return status


def to_run(points: Sequence[Point], retry: bool) -> list[Point]:
    passed = ("done",) if retry else ("done", "failed")
    return [point for point in points if point.state not in passed]


def _error(point: Point, status: int, first: int) -> str:
    """The last line of a failed run's log after byte ``first``; lines that start with "error:" take precedence."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    with point.log.open("rb") as log:
        log.seek(first)
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line not in ("", REPORT)]  # the line before is the exception of a bug
    named = [line for line in lines if line.startswith("error:")]
    if named:
        return named[-1]
    return lines[-1] if lines else f"exit status {status} without output"


def last_lines(point: Point, count: int = 5) -> list[str]:
    """The last lines of a point's log that are not empty."""
    if not point.log.exists():
        return []
    lines = point.log.read_bytes()[-10_000:].decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def say(line: str) -> None:
    print(line, flush=True)


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _time_left(manifest: SweepState, points: float) -> str:
    """Text with the time left for ``points`` points in sequence, from the mean time of the finished ones."""
    times = [point.seconds for point in manifest.points if point.state == "done" and point.seconds > 0]
    if not times or not points:
        return ""
    return f"; about {clock_time(points * sum(times) / len(times))} left"
