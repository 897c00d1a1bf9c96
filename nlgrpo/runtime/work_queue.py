"""Distribute work items over the ranks in rounds: finished items are skipped, an error on one rank stops all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.progress import progress
from nlgrpo.runtime.supervision.stop_signal import StopSignal

Item = TypeVar("Item")


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
        with progress(what, len(missing), self.console) as show:
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
