"""The reward ``code``: whether a program passes tests, in a sandbox."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlgrpo.data.conversations import text_of
from nlgrpo.errors import UserError
from nlgrpo.rewards.processes.sandbox import NOT_ISOLATED

SCRIPT = Path(__file__).with_name("sandbox.py")
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
KEPT = 4096  # bytes of output


@dataclass(frozen=True)
class Run:
    """How a program ended: "passed", "failed", "timeout", or "not isolated"; and the end of its output."""

    status: str
    output: str = ""


class Code:
    """1.0 if the Python program in a completion passes the tests of ``column``, else 0.0.

    The program is the last fenced block of the completion, or all of it; with ``continue_prompt`` the prompt and the
    completion together (HumanEval). Tests are Python code that raises if one fails, in one text or in a list; ``entry``
    is a column with the name that the function ``check`` of HumanEval's tests is called with. ``partial``: the share of
    the tests of a list that pass, each in a process of its own.

    Each program runs in a sandbox: a new folder, which is the only place where it can write; no network; one process,
    with threads; at most ``seconds`` of time and ``memory`` MiB. This needs Linux with user namespaces, Landlock and
    seccomp. ``isolated=False`` keeps the limits of time and memory only: for machines that isolate the
    trainer themselves. A program that ends before its last test has not passed.

    ``workers`` programs run at a time (0: one per core, at most 16). Metrics: ``code/timeouts``.

    Raises UserError for invalid arguments and where a program cannot be isolated; RuntimeError if it cannot later.
    """

    def __init__(
        self,
        column: str = "test",
        entry: str = "",
        continue_prompt: bool = False,
        partial: bool = False,
        seconds: float = 10.0,
        memory: int = 1024,
        isolated: bool = True,
        workers: int = 0,
    ) -> None:
        if not 0 < seconds < 2**31:
            raise UserError(f"seconds must be above 0, got {seconds!r}")
        for name, value, least in (("memory", memory, 64), ("workers", workers, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self.column = column
        self.entry = entry
        self.continue_prompt = continue_prompt
        self.partial = partial
        self.seconds = seconds
        self.memory = memory
        self.isolated = isolated
        self.workers = workers or max(1, min(16, os.cpu_count() or 1))
        self.data_columns = (column, *([entry] if entry else []))
        if isolated and (first := self.run("pass", "")).status == "not isolated":
            raise UserError(
                f"a program cannot be isolated on this machine ({first.output.strip()}); code(isolated=False) runs it "
                "with limits of time and memory only"
            )

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        jobs = list[tuple[str, str]]()
        owners = list[int]()
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            program = program_of(text_of(completion), text_of(prompt) if self.continue_prompt else "")
            tests = columns[self.column][i]
            parts = [tests] if isinstance(tests, str) else list(tests)
            calls = f"\ncheck({columns[self.entry][i]})" if self.entry else ""
            groups = [[part] for part in parts] if self.partial else [parts]
            for group in groups:
                jobs.append((program, "\n".join(map(str, group)) + calls))
                owners.append(i)
        with ThreadPoolExecutor(self.workers) as pool:
            runs = list(pool.map(lambda job: self.run(*job), jobs))
        if fault := next((run for run in runs if run.status == "not isolated"), None):
            raise RuntimeError(f"a program could not be isolated: {fault.output.strip()}")
        if log_metric is not None:
            log_metric("code/timeouts", float(sum(run.status == "timeout" for run in runs)))
        passed: list[list[float]] = [[] for _ in completions]
        for owner, run in zip(owners, runs, strict=True):
            passed[owner].append(float(run.status == "passed"))
        return [sum(own) / len(own) if own else None for own in passed]

    def run(self, program: str, tests: str) -> Run:
        """Run a program and then its tests."""
        token = secrets.token_hex(8)  # shows that the last line was reached
        with tempfile.TemporaryDirectory(prefix="nlgrpo-code-") as folder:
            path = Path(folder) / "program.py"
            path.write_text(f"{program}\n\n{tests}\n\nprint({token!r})\n", "utf-8", errors="replace")
            options = {"seconds": math.ceil(self.seconds), "memory": self.memory * 2**20, "isolated": self.isolated}
            with (Path(folder) / "output").open("w+b") as output:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SCRIPT), json.dumps(options), str(path)],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
                    env={"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    start_new_session=True,
                )  # fmt: skip
                try:
                    status: int | None = process.wait(self.seconds)
                except subprocess.TimeoutExpired:
                    status = None
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # also what it has started
                    process.wait()
                output.seek(max(0, output.seek(0, os.SEEK_END) - KEPT))
                text = output.read().decode("utf-8", "replace")
        if status is None:
            return Run("timeout", text)
        if status == NOT_ISOLATED:
            return Run("not isolated", text)
        return Run("passed" if status == 0 and token in text else "failed", text)


def program_of(completion: str, prompt: str = "") -> str:
    """Return the program in a completion: the last fenced block, or all of it after the ``prompt``."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else prompt + completion
