"""The command ``nlgrpo sweep``: a grid of runs, one or a few at a time, that goes on where it was stopped.

Every point is a run of `nlgrpo train` in a process of its own. The sweep's folder holds a folder and a log of each, and
``sweep.json``: the configuration that all share, and what has become of every point.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
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
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo.config import grid, validate
from nlgrpo.config.grid import Setting
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import differences, to_dict
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.evaluation.summary import Row, format_interval, summarize
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.timing import StopSignal
from nlgrpo.training import metrics
from nlgrpo.training import sweep_state as manifests
from nlgrpo.training.sweep_state import Point, State, SweepState

LOCK = "sweep.lock"
FULL = (atomic_files.CANNOT, os.strerror(errno.ENOSPC))  # the latter of a log that has no room for more
ABOUT = """Train a grid: nlgrpo sweep [recipe] [file.toml] --loss.beta 1e-2,1e-1 --objective mean,bon:4 --seed 0,1,2

Keys are those of `nlgrpo train`, --objective is that of all rewards, --seed is --train.seed. An option with several
values, parted by commas, is an axis of the grid. Commas inside of brackets and quotes part nothing:
'length(target=25, scale=128)' is one value, and quotes around a value, as in "'distortion:0,1,2',mean", are taken off.
A key that is a list has each of several values in brackets: --evaluation.ns [1,4],[1,8].

The same command goes on: finished points are passed over and stopped ones resume. More values add points."""


@dataclass
class Options:
    """What a sweep takes besides the keys of a configuration."""

    out: Path | None = None
    """Folder of the sweep; none: runs/<recipe>-sweep."""
    retry: bool = False
    """Run failed points again, from their checkpoints."""
    dry_run: bool = False
    """Check all points and list them; run nothing."""
    nproc_per_node: int = 1
    """Ranks of each run, which torchrun starts if they are several."""
    jobs: int = 1
    """Points that run at a time, each on cores and GPUs of its own."""


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 when all points are done, or when stopped by a signal; 1 if one failed, or with a message."""
    options, rest = tyro.cli(
        Options, args=list(arguments), prog="nlgrpo sweep", description=ABOUT, return_unknown_args=True
    )
    command = grid.read(rest)
    folder = options.out or Path(f"runs/{from_arguments(command.start)[0].recipe}-sweep")
    known = manifests.read(folder).points[0].overrides if (folder / manifests.FILE).exists() else ()
    axes = command.axes(known)
    if not axes:
        raise ValueError("no option has several values; write them with commas, such as --loss.beta 1e-2,1e-1")
    return run(
        command.start,
        command.rows(),
        folder,
        axes=axes,
        retry=options.retry,
        dry_run=options.dry_run,
        ranks=options.nproc_per_node,
        jobs=options.jobs,
    )


def run(
    start: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    axes: Sequence[str] | None = None,
    retry: bool = False,
    dry_run: bool = False,
    ranks: int = 1,
    jobs: int = 1,
) -> int:
    """Run the points that are not done, ``jobs`` at a time, and print the table of all; the exit status as in `main`.

    ``start`` are arguments of `nlgrpo train` for every point, and each of ``rows`` the options of one, by their names
    without dashes; ``axes`` are those by which points differ and are named, by default all. Raises ValueError for a
    configuration that cannot be run, before any point begins, and for a folder that is not this sweep's.
    """
    settings = grid.settings(start, rows, list(rows[0]) if axes is None else axes)
    _check(settings, ranks, jobs)
    _usable(folder)
    if dry_run:
        manifest, points = _merge(folder, settings)
        _show(manifest)
        _say(f"{folder}: {len(points)} points, {len(_to_run(points, retry))} to run; this dry run began none")
        return 0
    try:
        with _locked(folder) as lock:
            manifest, points = _merge(folder, settings)
            (folder / "logs").mkdir(exist_ok=True)
            manifest.write()
            work = Work(manifest, ranks, jobs, lock)
            stopped = work.run_all(list(zip(settings, points, strict=True)), retry)
    except BrokenPipeError:  # of what reads its output
        raise
    except OSError as error:
        raise ValueError(f"the sweep cannot use {folder}: {error}; the same command goes on once it can") from error
    _show(manifest)
    failed = [point for point in points if point.state == "failed"]
    for point in failed:
        print(f"failed: {point.name}: {point.error}\n  its log is {point.log}; --retry runs it again")
    if stopped:
        print("stopped; the same command goes on from there")
    return 1 if failed and not stopped else 0


def _check(settings: Sequence[Setting], ranks: int, jobs: int) -> None:
    """Refuse what no run can begin with, all points and all faults at once."""
    for option, number in (("nproc-per-node", ranks), ("jobs", jobs)):
        if number < 1:
            raise ValueError(f"--{option} = {number}: allowed is >= 1")
    if jobs > 1 and 0 < len(_gpus()) < jobs * ranks:
        raise ValueError(f"--jobs {jobs} of {ranks} ranks each need {jobs * ranks} GPUs, and there are {len(_gpus())}")
    faults: dict[str, list[str]] = {}
    for setting in settings:
        for fault in _faults(setting, ranks):
            faults.setdefault(fault, []).append(grid.folder_name(setting.overrides))
    if faults:
        whose = {fault: "all" if len(names) == len(settings) else "; ".join(names) for fault, names in faults.items()}
        count = len({name for names in faults.values() for name in names})
        lines = [f"{count} of {len(settings)} points cannot be run:", *(f"  {f} ({whose[f]})" for f in faults)]
        raise ValueError("\n".join(lines))


def _faults(setting: Setting, ranks: int) -> list[str]:
    faults = []
    try:
        validate.check(setting.config, world=ranks)
    except ValueError as error:
        faults = [line.strip() for line in str(error).splitlines()[1:]]
    if setting.config.evaluation.prompts == 0:
        faults.append("evaluation.prompts = 0: points are compared, and known to be done, by their evaluation")
    if setting.config.train.restart:
        faults.append(f"train.restart = True: {grid.NOT_SWEPT['train.restart']}")
    return faults


# --- the folder -------------------------------------------------------------------------------------------------------


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


def _usable(folder: Path) -> None:
    """Refuse a folder that holds something else; what a sweep that was killed at once leaves is nothing."""
    if folder.exists() and not (folder / manifests.FILE).exists():
        empty = {LOCK, f"{manifests.FILE}.tmp", "logs"}
        if not (folder.is_dir() and {path.name for path in folder.iterdir()} <= empty):
            raise ValueError(f"{folder} exists and holds no sweep; choose another folder with --out")


def _merge(folder: Path, settings: Sequence[Setting]) -> tuple[SweepState, list[Point]]:
    """The folder's manifest, or a new one, with these points in it; and the points in the order of ``settings``."""
    base = _base(settings[0])
    manifest = manifests.read(folder) if (folder / manifests.FILE).exists() else SweepState(folder, base, [])
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
def _locked(folder: Path) -> Iterator[int]:
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


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Work:
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
        todo = _to_run([point for _, point in points], retry)
        _say(f"{self.manifest.folder}: {len(points)} points, {len(todo)} to run")
        free, ended = SimpleQueue[int](), list[Point]()
        for place in range(self.jobs):
            free.put(place)

        def run(number: int, point: Point) -> None:
            if self.stop.received or self.broken:
                return
            place, where = free.get(), f"[{number}/{len(todo)}] {point.name}"
            try:
                _say(f"{where}: {'goes on' if point.folder.exists() else 'begins'}")
                self._run(next(setting for setting, its in points if its is point), point, place)
                ended.append(point)
                how = f"{point.state} after {_time(point.seconds)}" + (f": {point.error}" if point.error else "")
                _say(f"{where}: {how}{_time_left(self.manifest, (len(todo) - len(ended)) / self.jobs)}")
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
        return self.stop.received and bool(_to_run(todo, retry=False))

    def _run(self, setting: Setting, point: Point, place: int) -> None:
        """Run one point to its end, or to the checkpoint that it writes when it is told to stop."""
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
        elif self.stop.received or (self.broken and status == -signal.SIGTERM) or status == 0:  # it was told to
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
        """The exit status of a process that is told of a stop once, however the sweep was, and again if it was.

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


def _to_run(points: Sequence[Point], retry: bool) -> list[Point]:
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
        if gpus := _gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place * ranks : (place + 1) * ranks])
    return environment


def _gpus() -> list[str]:
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


def _say(line: str) -> None:
    print(line, flush=True)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _time_left(manifest: SweepState, points: float) -> str:
    """For so many points, one after another, by the mean of those that are done."""
    took = [point.seconds for point in manifest.points if point.state == "done" and point.seconds > 0]
    return f"; about {_time(points * sum(took) / len(took))} left" if took and points else ""


# --- the table --------------------------------------------------------------------------------------------------------


def _show(manifest: SweepState) -> None:
    results = [_results(manifest, point) for point in manifest.points]
    procedures = {row.procedure for rows in results for row in rows[1:]}
    one = next(iter(procedures)) if len(procedures) == 1 else ""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in grid.short_names(list(manifest.points[0].overrides)):
        table.add_column(Text(heading))
    for heading in ("mean", one or "best of N", "KL", "time", "state"):
        table.add_column(heading, no_wrap=True)
    for point, rows in zip(manifest.points, results, strict=True):
        values = [
            format_interval(row, "\n") + ("" if one or not i else f"\n{row.procedure}") for i, row in enumerate(rows)
        ]
        cells = [*map(grid.shown, point.overrides.values()), *values, *["-"] * (2 - len(rows)), _kl(point)]
        table.add_row(*map(Text, cells), _time(point.seconds) if point.seconds else "-", point.state)
    console = Console(width=None if sys.stdout.isatty() else metrics.PLAIN_WIDTH)
    console.print(table)


def _results(manifest: SweepState, point: Point) -> list[Row]:
    """Mean and best-of-N of the trained model, of the weighted sum of several rewards; N is the largest asked for."""
    ns = point.overrides.get("evaluation.ns") or manifest.base["evaluation"]["ns"]
    try:
        rows = summarize(read_evaluation(point.folder)["after"], list(dict.fromkeys((1, max(ns)))))
    except (ValueError, KeyError):  # there is none yet
        return []
    return [row for row in rows if row.reward == rows[-1].reward]


def _kl(point: Point) -> str:
    """Per token, in the last step; a dash without a reference."""
    steps = metrics.read_jsonl(point.folder / metrics.FILE)
    value = steps[-1].get("kl") if steps else None
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "-"
