"""Processes that answer questions for a reward, each within a time limit that holds whatever the code does."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from nlgrpo.runtime.supervision import ending_with_parent


class NoAnswer(Exception):
    """A worker did not answer in time, or ended."""


class TooLate(NoAnswer):
    """A worker did not answer in time."""


@dataclass
class Worker:
    """A process that runs a script. It reads a line of JSON for each question and writes one for each answer.

    It ends when this process does, also if it is in the middle of an answer then.
    """

    script: Path
    process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer. Raises NoAnswer; the process is then replaced at the next question."""
        try:
            if self.process is not None and self.process.poll() is not None:
                self.stop()  # it ended by itself
            if self.process is None:
                self.start()
            return self.exchange(question, seconds)
        except NoAnswer:
            self.stop()
            raise
        except (OSError, ValueError) as error:
            self.stop()
            raise NoAnswer(str(error) or type(error).__name__) from error
        except BaseException:  # such as Ctrl-C: the answer would be taken for that of the next question
            self.stop()
            raise

    def exchange(self, question: Any, seconds: float) -> Any:
        """Ask a process that has started. Raises NoAnswer, OSError and ValueError."""
        output = cast(IO[bytes], cast("subprocess.Popen[bytes]", self.process).stdin)
        output.write(self.encode(question) + b"\n")
        output.flush()
        return self.decode(self._line(seconds))

    def encode(self, question: Any) -> bytes:
        return json.dumps(question).encode()

    def decode(self, line: bytes) -> Any:
        return json.loads(line)

    def start(self) -> None:
        """Start the process and wait until it is ready, which takes longer than a question. Raises NoAnswer."""
        printed = _standard_output()
        # -P: without the script's folder on the path
        command = ending_with_parent.command([sys.executable, "-P", str(self.script), str(printed)], signal.SIGKILL)
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, pass_fds=[printed]
            )
        finally:
            os.close(printed)
        if self._line(120.0).strip() != b'"ready"':
            raise NoAnswer(f"{self.script.name} did not start")

    def _line(self, seconds: float) -> bytes:
        source = cast(IO[bytes], cast("subprocess.Popen[bytes]", self.process).stdout)
        line = bytearray()
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)  # it may be infinite
            if not select.select([source], [], [], left)[0]:
                raise TooLate(f"no answer within {seconds:g} s")
            more = source.read1(65536)  # type: ignore[attr-defined]
            if not more:
                raise NoAnswer(f"the process has ended{self._status()}")
            line += more
        return bytes(line)

    def _status(self) -> str:
        """Say how the process has ended."""
        try:
            status = cast("subprocess.Popen[bytes]", self.process).wait(5.0)
        except subprocess.TimeoutExpired:  # it has closed its output
            return ""
        return f" by {signal.Signals(-status).name}" if status < 0 else f" with exit status {status}"

    def stop(self) -> None:
        """Kill the process, and those that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(BrokenPipeError):  # what was not sent
                self.process.communicate()
            self.process = None


def _standard_output() -> int:
    """Return a file descriptor for what a worker prints: the output of this process, if it has one."""
    try:
        return os.dup(1)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


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
