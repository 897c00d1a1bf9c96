"""Work items that the ranks share in rounds: finished items are skipped, and an error on one rank ends all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.timing import StopSignal, as_clock

Item = TypeVar("Item")

LINE_EVERY = 30.0  # seconds between the lines of progress that a log file gets


@dataclass(frozen=True)
class WorkQueue:
    """The ranks at work, where the first of them shows how far they are, and the signal that asks them to stop."""

    ranks: Ranks
    console: Console
    stop: StopSignal | None = None

    def missing(self, pieces: Sequence[Item], there: Callable[[Item], bool]) -> list[Item]:
        """Those that are not ``there``, the same on every rank, each of which looks for its share; collective."""
        mine = [i for i in range(self.ranks.rank, len(pieces), self.ranks.world) if not there(pieces[i])]
        return [pieces[i] for i in sorted(i for found in self.ranks.gather_objects(mine) for i in found)]

    def work(self, what: str, missing: Sequence[Item], do: Callable[[Item], object]) -> bool:
        """``do`` the pieces, as many at a time as there are ranks; collective.

        Returns False where a signal on any rank ended it early. Raises ValueError on every rank for one that ``do``
        raised on any: nobody waits for a rank that is gone, or works on after it.
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
        own = round_[self.ranks.rank : self.ranks.rank + 1]  # none is left for some in the last round
        self.ranks.agree(lambda: [do(piece) for piece in own])

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A function that shows how many pieces are done: a live line, or in a log file a line now and then."""
        if not self.console.is_terminal or not self.ranks.first or not total:
            yield _Lines(self.console, what, total)
            return
        columns = (TextColumn(what, markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda done: progress.update(task, completed=done)


class _Lines:
    """``completions: 12/50, 1:20 left``, not more often than every `LINE_EVERY` seconds."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self.console, self.what, self.total = console, what, total
        self.began = self.last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_EVERY and done < self.total:
            left = as_clock((self.total - done) * (now - self.began) / done)
            self.console.print(f"{self.what}: {done}/{self.total}, {left} left", highlight=False, markup=False)
            self.last = now
