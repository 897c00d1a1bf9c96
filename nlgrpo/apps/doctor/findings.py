"""Results of the checks of `nlgrpo doctor`."""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """What one check, or one ``part`` of it, found. ``advice`` says what to do; it is empty if there is nothing to do.

    ``numbers`` are measured values for the JSON file. `run` sets ``check`` and ``seconds``.
    """

    status: Status
    detail: str
    advice: str = ""
    part: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    check: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.check}/{self.part}" if self.part else self.check

    def as_json(self) -> dict[str, Any]:
        """JSON data, in which texts name no folder of the user."""
        texts = {"name": self.name, "status": self.status, "detail": self.detail, "advice": self.advice}
        found = {name: without_folders(text) for name, text in texts.items()}
        return found | {"seconds": round(self.seconds, 3), "numbers": dict(self.numbers)}


@dataclass(frozen=True)
class Check:
    """A check: its name for ``--only``, and the generator of its results. ``advice`` is for a check that raises."""

    name: str
    about: str
    find: Callable[[], Iterator[Result]]
    advice: str = "report it, with the file that --json writes"


def run(check: Check) -> Iterator[Result]:
    """Yield the results of a check with their times. One that raises ends with a failed result and its message."""
    found = check.find()
    while True:
        start = time.perf_counter()
        try:
            result = next(found, None)
        except Exception as error:  # a check may fail in any way, and the others still run
            result = Result("failed", message(error), check.advice)
            found = iter(())
        if result is None:
            return
        yield replace(result, check=check.name, seconds=result.seconds or time.perf_counter() - start)


def attempt(part: str, work: Callable[[], Result], advice: str) -> Result:
    """Return the result of ``work`` under the name ``part``; failed, with its message and ``advice``, if it raises."""
    try:
        return replace(work(), part=part)
    except Exception as error:  # as in `run`
        return Result("failed", message(error), advice, part)


def message(error: BaseException) -> str:
    """Type and first line of the message of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def without_folders(text: str) -> str:
    """Replace folders of this machine, and the user's name in paths, which do not belong into a public issue."""
    folders = {os.getcwd(): ".", sys.prefix: "<python>", tempfile.gettempdir(): "<tmp>", str(Path.home()): "~"}
    folders[str(Path(__file__).parents[3])] = "<nlgrpo>"
    for folder in sorted(folders, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(folder, folders[folder])
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, as in some containers
        return text
    return text.replace(f"/{user}/", "/<user>/")
