"""Processes that answer questions for a reward, each within a time limit that holds whatever the code does."""

from __future__ import annotations

import json
import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast


class NoAnswer(Exception):
    """A worker did not answer in time, or ended."""


@dataclass
class Worker:
    """A process that runs a script. It reads a line of JSON for each question and writes one for each answer.

    It ends when its input does, so none is left behind when the trainer is killed.
    """

    script: Path
    process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer. Raises NoAnswer; the process is then replaced at the next question."""
        try:
            if self.process is None:
                self.start()
            output = cast(IO[bytes], cast("subprocess.Popen[bytes]", self.process).stdin)
            output.write(json.dumps(question).encode() + b"\n")
            output.flush()
            return json.loads(self._line(seconds))
        except (OSError, ValueError, NoAnswer) as error:
            self.stop()
            raise NoAnswer(str(error) or type(error).__name__) from error

    def start(self) -> None:
        """Start the process and wait until it is ready, which takes longer than a question. Raises NoAnswer."""
        command = [sys.executable, "-P", str(self.script)]  # -P: without the script's folder on the path
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        if self._line(120.0).strip() != b'"ready"':
            raise NoAnswer(f"{self.script.name} did not start")

    def _line(self, seconds: float) -> bytes:
        source = cast(IO[bytes], cast("subprocess.Popen[bytes]", self.process).stdout)
        line, deadline = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not select.select([source], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise NoAnswer(f"no answer within {seconds:g} s")
            more = source.read1(65536)  # type: ignore[attr-defined]
            if not more:
                raise NoAnswer("the process has ended")
            line += more
        return line

    def stop(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@dataclass
class Workers:
    """A pool of ``count`` workers, started when they are needed first."""

    script: Path
    count: int
    seconds: float
    """Limit of one answer."""
    idle: queue.SimpleQueue[Worker] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        for _ in range(self.count):
            self.idle.put(Worker(self.script))

    def ask(self, questions: Sequence[Any]) -> list[Any | None]:
        """Return the answer of each question; None without one in time."""

        def one(question: Any) -> Any | None:
            worker = self.idle.get()
            try:
                return worker.ask(question, self.seconds)
            except NoAnswer:
                return None
            finally:
                self.idle.put(worker)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, questions))
