"""Runs steps one after another, each in a process group of its own, and writes one JSON file after every step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_kit import plan
from gpu_kit.plan import Step
from nlgrpo.runtime.atomic_files import atomic_write

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
LEAST = 5.0  # a step that would get fewer seconds is skipped
TAIL = 4000  # characters of a failed step's output that the JSON keeps


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception: no handler of errors may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which SIGINT and SIGTERM raise `Interrupted`."""

    def raise_it(number: int, _: Any) -> None:
        for known in before:  # a second signal must not interrupt the writing of the file
            signal.signal(known, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, raise_it)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Runner:
    """Runs steps and keeps ``record``, the content of the JSON file at ``path``."""

    path: Path
    record: dict[str, Any]
    environment: Callable[[], dict[str, str]]
    """Returns the environment of the next step; the step `build` changes it."""
    rehearse: bool = False
    group_seconds: dict[str, float] = field(default_factory=lambda: dict(plan.GROUP_SECONDS))
    command: Callable[[Step, Path, float], list[str]] | None = None
    """Command of a step that writes its values to a file; tests replace it."""

    def run(self, steps: Sequence[Step]) -> int:
        """Run ``steps``. Returns 0, 1 if one failed, or 128 and the number of the signal that stopped them."""
        self.write()
        left = dict.fromkeys(self.group_seconds, math.inf) if self.rehearse else dict(self.group_seconds)
        try:
            with interruptible():
                for together in started_together(steps):
                    begin = time.perf_counter()
                    self.run_together(together, left)
                    left[together[0].group] -= time.perf_counter() - begin
        except Interrupted as stop:
            self.write()
            print(f"stopped by {stop}; finished steps are in {self.path}", file=sys.stderr)
            return 128 + stop.number
        return int(any(entry["status"] == "failed" for entry in self.record["steps"].values()))

    def run_together(self, steps: Sequence[Step], left: dict[str, float]) -> None:
        """Start ``steps``, and wait for one after another. ``left``: seconds that each group has left."""
        running: list[Running] = []
        try:
            for step in steps:
                limit = min(self.limit(step), left[step.group])
                if limit < LEAST:
                    error = f"no time left of the group's seconds: {step.group}"
                    self.end(step, {"status": "skipped", "seconds": 0.0, "error": error})
                else:
                    self.record["steps"][step.name] = {"status": "stopped", "group": step.group, "seconds": 0.0}
                    running.append(self.start(step, limit))
            while running:
                self.end(running[0].step, self.wait(running[0]))
                running.pop(0).close()
        except Interrupted:
            for one in running:
                stop(one.process)
                self.record["steps"][one.step.name] |= read(one.out) | {"status": "stopped", "seconds": one.seconds}
            raise
        finally:
            for one in running:
                one.close()

    def limit(self, step: Step) -> float:
        return plan.REHEARSAL_SECONDS if self.rehearse else step.seconds

    def start(self, step: Step, limit: float) -> Running:
        """Start the process of a step."""
        folder = tempfile.TemporaryDirectory(prefix="nlgrpo-gpu-")
        one = Running(step, limit, folder)
        one.inside.mkdir()
        command = self.command or self._command
        with one.log.open("wb") as file:
            one.process = subprocess.Popen(
                command(step, one.out, limit), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=self.environment() | {"TMPDIR": str(one.inside)}, cwd=plan.ROOT, start_new_session=True,
            )  # fmt: skip
        return one

    def wait(self, one: Running) -> dict[str, Any]:
        """Wait for a step until its limit; return its entry in the JSON."""
        error = None
        try:
            one.process.wait(max(0.0, one.limit - one.seconds))
        except subprocess.TimeoutExpired:
            error = f"stopped at its time limit of {one.limit:.0f} s"
        seconds = one.seconds
        stop(one.process)
        entry = {"seconds": seconds} | read(one.out)
        if "status" not in entry:
            error = error or f"the process ended with status {one.process.returncode}"
            entry |= {"status": "failed", "error": error}
        if entry["status"] == "failed":
            text = one.log.read_text("utf-8", "replace")[-TAIL:]
            entry["output"] = plan.tidy(text)
            print(text, file=sys.stderr)
        return entry

    def end(self, step: Step, entry: dict[str, Any]) -> None:
        """Put the entry of a step that has ended into the JSON, and print a line."""
        self.record["steps"][step.name] = {"group": step.group} | entry
        self.write()
        error = f"  {entry['error']}" if "error" in entry else ""
        print(f"{entry['status']:<8} {step.name:<10} {entry['seconds']:6.1f} s{error}", flush=True)

    def write(self) -> None:
        atomic_write(self.path, json.dumps(self.record, indent=1) + "\n")

    def _command(self, step: Step, out: Path, limit: float) -> list[str]:
        options = ["--out", str(out), "--seconds", str(limit), *(["--rehearse"] if self.rehearse else [])]
        return [sys.executable, "-m", "gpu_kit.child", step.name, *options]


@dataclass
class Running:
    """A step that runs, with a temporary folder for its values, its output, and its own temporary files."""

    step: Step
    limit: float
    folder: tempfile.TemporaryDirectory[str]
    begin: float = field(default_factory=time.perf_counter)
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def out(self) -> Path:
        return Path(self.folder.name) / "values.json"

    @property
    def log(self) -> Path:
        return Path(self.folder.name) / "log"

    @property
    def inside(self) -> Path:
        return Path(self.folder.name) / "folder"

    @property
    def seconds(self) -> float:
        """Since its start."""
        return round(time.perf_counter() - self.begin, 2)

    def close(self) -> None:
        self.folder.cleanup()


def started_together(steps: Sequence[Step]) -> list[list[Step]]:
    """Put steps that start with the step before them together."""
    found: list[list[Step]] = []
    for step in steps:
        if step.beside and found and found[-1][-1].group == step.group:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def read(path: Path) -> dict[str, Any]:
    """Read what a step has written; {} if it has written nothing."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a step: its process group, and descendants that have a group of their own (torchrun's)."""
    others = descendants(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    others |= descendants(process.pid)
    _signal_group(process.pid, signal.SIGKILL)
    for number in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def descendants(process: int) -> set[int]:
    """Numbers of the living processes below ``process``, by /proc; empty on other systems than Linux."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(after_name[1])
    found: set[int] = set()
    fresh = {process}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found
