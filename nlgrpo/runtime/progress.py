"""The progress of long work: a live bar in a terminal, a line every 30 seconds in a log file.

What is in a pipe is for another program, so the lines go to the standard error there, as those of tqdm.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nlgrpo.runtime.console import can_be_live
from nlgrpo.runtime.timing import as_clock

Item = TypeVar("Item")

QUIET = Console(quiet=True)  # shows nothing
LINE_EVERY = 30.0  # seconds between progress lines in a log file


@contextmanager
def progress(what: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """Context that yields ``show(done)``, which shows ``WHAT  DONE/TOTAL  1:20 left  0.5/s`` on ``console``.

    A quiet console shows nothing. One display can be live at a time.
    """
    if _in_pipe(console):
        console = Console(stderr=True, width=console.width, quiet=console.quiet, force_terminal=False)
    lines = _Lines(console, what, total)
    if console.quiet or not total:
        yield lambda done: None
        return
    if not can_be_live(console):
        yield lines.print
        return
    columns = (TextColumn(what, markup=False), BarColumn(bar_width=16), TextColumn("{task.fields[shown]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, shown=f"0/{total}")
        yield lambda done: bar.update(task, completed=done, shown=lines.shown(done, time.monotonic()))


def track(items: Iterable[Item], what: str, total: int, console: Console) -> Generator[Item]:
    """Iterate over ``total`` items, and show how many are done. The display ends with the iteration."""
    with progress(what, total, console) as show:
        for done, item in enumerate(items, 1):
            yield item
            show(done)


class _Lines:
    """Progress as text: at most one line every `LINE_EVERY` seconds."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self.console = console
        self.what = what
        self.total = total
        self.began = self.last = time.monotonic()

    def print(self, done: int) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_EVERY and done < self.total:
            self.console.print(f"{self.what}  {self.shown(done, now)}", highlight=False, markup=False)
            self.last = now

    def shown(self, done: int, now: float) -> str:
        """Return what is done, the time left and the rate, as `nlgrpo train` shows them."""
        if not done:
            return f"0/{self.total}"
        rate = done / max(now - self.began, 1e-6)
        left = f"  {as_clock((self.total - done) / rate)} left" if done < self.total else ""
        return f"{done}/{self.total}{left}  {rate:.3g}/s"


def _in_pipe(console: Console) -> bool:
    """Whether another program reads the output."""
    try:
        return console.file is sys.stdout and stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # not a file of the system
        return False
