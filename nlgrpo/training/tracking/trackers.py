"""The interface of trackers, and the thread that keeps them away from training."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nlgrpo.config.schema import LoopConfig
from nlgrpo.runtime import atomic_files, secrets
from nlgrpo.training.tracking.run_files import TRACKERS_FILE
from nlgrpo.training.tracking.terminal import Sample

WAITING = 1000  # calls that may wait for a slow tracker
FIRST_CALL = 10.0  # seconds that a run waits at its start for trackers, so that one that cannot write says so then
LAST_CALLS = 30.0  # seconds that a run waits at a checkpoint, and at its end, until a tracker has everything


class Tracker(Protocol):
    """A library that records runs. All methods may raise any exception, and may take any time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the finite metrics of a step, or of an evaluation after it ("eval_.."); TRL's names."""

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record sampled completions with their rewards and advantages. Columns and numbers as in `as_table`."""

    def close(self) -> None:
        """Record that the run has ended, or stopped."""


class RunConfig(Protocol):
    """The configuration of a command that trains; a dataclass."""

    @property
    def train(self) -> LoopConfig: ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it."""

    trackers: Sequence[str]
    """Names of modules ``NAME_tracker`` in this folder."""
    project: str
    name: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: RunConfig, folder: Path) -> TrackedRun:
        """Return the run of a configuration in ``folder``."""
        train = config.train
        return cls(
            trackers=train.track,
            project=train.project,
            name=train.run_name or folder.resolve().name,
            config=asdict(config),  # type: ignore[call-overload]
        )


@dataclass
class Memory:
    """What trackers must remember to continue a run after a restart, in ``trackers.json`` of the run's folder."""

    folder: Path
    resume_step: int
    values: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def read(cls, folder: Path, resume_step: int) -> Memory:
        """Read the file; what cannot be read counts as absent. A run that starts at step 0 remembers nothing."""
        try:
            values = json.loads((folder / TRACKERS_FILE).read_text("utf-8")) if resume_step > 0 else {}
        except (OSError, ValueError):
            values = {}
        known = values.items() if isinstance(values, dict) else ()
        return cls(folder, resume_step, {key: value for key, value in known if isinstance(value, str)})

    def get(self, tracker: str) -> str | None:
        """Return what the tracker remembers of the run; None for a run that is new to it."""
        return self.values.get(tracker)

    def set(self, tracker: str, value: str) -> None:
        with self.lock:
            self.values[tracker] = value
            atomic_files.atomic_write(self.folder / TRACKERS_FILE, json.dumps(self.values, indent=1) + "\n")


@dataclass
class BackgroundTracker:
    """Calls a tracker in a thread of its own, so that training neither waits for it nor ends with it.

    The first exception of the tracker, a call that finds `WAITING` others waiting, and calls left `LAST_CALLS` seconds
    after the end are one warning each; the tracker gets nothing more after an exception, and only the newest calls are
    dropped if it is slow. ``metrics.jsonl`` has everything.
    """

    name: str
    begin: Callable[[], Tracker]
    calls: queue.Queue[Callable[[Tracker], None] | None] = field(default_factory=lambda: queue.Queue(WAITING))
    begun: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)
    slow: bool = False
    behind: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True, name=f"nlgrpo-{self.name}")
        self.thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; those that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._call(lambda tracker: tracker.log(step, finite))

    def table(self, step: int, samples: Sequence[Sample]) -> None:
        """Record sampled completions."""
        columns, rows = as_table(step, samples)
        self._call(lambda tracker: tracker.table(step, columns, rows))

    def catch_up(self, deadline: float) -> None:
        """Wait until everything is recorded, or until ``deadline``; then warn, and do not wait again."""
        if self.behind:
            return
        recorded = threading.Event()
        self._call(lambda tracker: recorded.set())
        while not self.failed.is_set() and not recorded.wait(0.1):
            if time.monotonic() > deadline:
                self.behind = True
                self._warn(f"is more than {LAST_CALLS:g} s behind; if the run is killed, it lacks some metrics")
                return

    def close(self) -> None:
        """Wait until everything is recorded, for at most `LAST_CALLS` seconds; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + LAST_CALLS
        if not self.failed.is_set():
            with contextlib.suppress(queue.Full):
                self.calls.put(None, timeout=LAST_CALLS)
            self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive() and not self.failed.is_set():
            self._warn(f"did not take everything within {LAST_CALLS:g} s of the end of the run")

    def _call(self, call: Callable[[Tracker], None]) -> None:
        if self.failed.is_set() or self.closed:
            return
        try:
            self.calls.put_nowait(call)
        except queue.Full:
            if not self.slow:
                self._warn(f"is {WAITING} calls behind; what does not fit is left out")
            self.slow = True

    def _work(self) -> None:
        try:
            tracker = self.begin()
            self.begun.set()
            while (call := self.calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as error:  # libraries also raise SystemExit and KeyboardInterrupt in threads
            self.failed.set()
            self._warn(f"gets nothing more: {type(error).__name__}: {secrets.hide(_first_line(error))}")
        finally:
            self.begun.set()

    def _warn(self, text: str) -> None:
        warning = f"warning: train.track: {self.name} {text}. Training continues; metrics.jsonl is complete."
        print(warning, file=sys.stderr, flush=True)


def start(run: TrackedRun, folder: Path, resume_step: int) -> list[BackgroundTracker]:
    """Start the trackers of a run, in their threads. Wait until they have begun, for at most `FIRST_CALL` seconds."""
    memory = Memory.read(folder, resume_step)

    def begin(name: str) -> Tracker:
        module = importlib.import_module(f"nlgrpo.training.tracking.{name}_tracker")
        tracker: Tracker = module.begin(run, memory)
        return tracker

    started = [BackgroundTracker(name, partial(begin, name)) for name in dict.fromkeys(run.trackers)]
    deadline = time.monotonic() + FIRST_CALL
    for tracker in started:
        tracker.begun.wait(max(0.0, deadline - time.monotonic()))
    return started


def catch_up(trackers: Sequence[BackgroundTracker]) -> None:
    """Wait until the trackers have what was logged so far, for at most `LAST_CALLS` seconds.

    A run that was killed resumes from a checkpoint and logs only the steps after it, so a checkpoint waits.
    """
    deadline = time.monotonic() + LAST_CALLS
    for tracker in trackers:
        tracker.catch_up(deadline)


def as_table(step: int, samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table of completions, as TRL names them: step, prompt, completion, rewards, advantage.

    Linearized rewards are columns "linearized/NAME", because TRL has none. Numbers that are not finite are None.
    """
    if not samples:
        return [], []
    first = samples[0]
    linearized = [f"linearized/{name}" for name in first.linearized]
    columns = ["step", "prompt", "completion", *first.rewards, *linearized, "advantage", *first.extra]
    rows = []
    for one in samples:
        numbers = [*one.rewards.values(), *one.linearized.values(), one.advantage]
        finite = [x if math.isfinite(x) else None for x in numbers]
        extra = [str(value) for value in one.extra.values()]
        rows.append([step, one.prompt, one.completion, *finite, *extra])
    return columns, rows


def in_trl(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under the names of TRL's runs in W&B, trackio and TensorBoard: train/NAME and eval/NAME."""
    found = {}
    for name, value in metrics.items():
        evaluated = name.startswith("eval_")
        found[f"eval/{name.removeprefix('eval_')}" if evaluated else f"train/{name}"] = value
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
