"""Distribute work items over the ranks in rounds: finished items are skipped, an error on one rank stops all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.timing import as_clock

Item = TypeVar("Item")

LINE_EVERY = 30.0  # seconds between progress lines in a log file


@dataclass(frozen=True)
class WorkQueue:
    """Distributes items over ``ranks``. Rank 0 shows the progress on ``console``; ``stop`` ends the work early."""

    ranks: Ranks
    console: Console
    stop: StopSignal | None = None

    def missing(self, pieces: Sequence[Item], there: Callable[[Item], bool]) -> list[Item]:
        """Return the pieces for which ``there`` is false, on every rank; each rank checks its share. Collective."""
        mine = []
        for number in range(self.ranks.rank, len(pieces), self.ranks.world):
            if not there(pieces[number]):
                mine.append(number)
        missing: list[int] = []
        for numbers in self.ranks.gather_objects(mine):
            missing += numbers
        return [pieces[number] for number in sorted(missing)]

    def work(self, what: str, missing: Sequence[Item], do: Callable[[Item], object]) -> bool:
        """Call ``do`` for each missing piece, one piece per rank at a time. Collective.

        ``what`` names the pieces in the progress. Returns False if a signal on any rank stopped the work early. If
        ``do`` raises a UserError on one rank, all ranks raise UserError, so none waits for another.
        """
        with self._progress(what, len(missing)) as show:
            for begun in range(0, len(missing), self.ranks.world):
                self._do(missing[begun : begun + self.ranks.world], do)
                done = min(begun + self.ranks.world, len(missing))
                show(done)
                if self.stop is not None and done < len(missing) and self.ranks.any(self.stop.received):
                    return False
        return True

    def _do(self, round_: Sequence[Item], do: Callable[[Item], object]) -> None:
        mine = round_[self.ranks.rank : self.ranks.rank + 1]  # may be empty in the last round
        self.ranks.agree(lambda: [do(piece) for piece in mine])

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that shows the number of finished pieces: a live bar, or lines in a log file."""
        redirected = self.console.file is sys.stdout and not sys.stdout.isatty()  # a terminal to rich with FORCE_COLOR
        if redirected or not self.console.is_terminal or not self.ranks.first or not total:
            yield _Lines(self.console, what, total)
            return
        columns = (TextColumn(what, markup=False), BarColumn(bar_width=16), TextColumn("{task.fields[shown]}"))
        lines = _Lines(self.console, what, total)
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=total, shown=f"0/{total}")
            yield lambda done: progress.update(task, completed=done, shown=lines.shown(done, time.monotonic()))


class _Lines:
    """Prints ``completions  12/50  1:20 left  0.5/s``, at most every `LINE_EVERY` seconds."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self.console = console
        self.what = what
        self.total = total
        self.began = self.last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_EVERY and done < self.total:
            self.console.print(f"{self.what}  {self.shown(done, now)}", highlight=False, markup=False)
            self.last = now

    def shown(self, done: int, now: float) -> str:
        """Return what is done, the time left and the rate, as `nlgrpo train` shows them."""
        rate = done / max(now - self.began, 1e-6)
        return f"{done}/{self.total}  {as_clock((self.total - done) / rate)} left  {rate:.3g}/s"
