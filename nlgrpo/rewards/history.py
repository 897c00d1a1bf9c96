"""What a reward has returned so far, for warnings about one that may be broken. Each is given once per process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

log = logging.getLogger(__name__)

FIRST = 5  # calls after which a reward whose values are all the same is named
SHOWN = 3  # completions in that warning


@dataclass
class History:
    """Values of the reward ``name`` in its first calls: those of training steps, and of parts of an evaluation."""

    name: str
    calls: int = 0
    count: int = 0
    seen: list[float] = field(default_factory=list)
    """Different values, at most two; None and NaN are none."""
    warned: set[str] = field(default_factory=set)

    def add(self, values: Tensor, count: int, shown: Sequence[str]) -> None:
        """Count the values (P, M) of a call with ``count`` completions; after `FIRST`, warn if none differs.

        ``shown``: the first `SHOWN` completions, for the warning.
        """
        if self.calls == FIRST or not count:
            return
        self.calls += 1
        self.count += count
        flat = values.flatten()
        self.seen = sorted({*self.seen, *flat[~flat.isnan()].tolist()})[:2]
        if len(self.seen) > 1:
            self.calls = FIRST
        elif self.calls == FIRST and os.environ.get("RANK", "0") == "0":
            self._warn_of_constant(flat.tolist()[:SHOWN], shown)

    def _warn_of_constant(self, values: Sequence[float], shown: Sequence[str]) -> None:
        what = f"is {self.seen[0]:g}" if self.seen else "has no value (None, NaN, or it failed)"
        lines = [
            f"  {'no value' if value != value else format(value, 'g')} for {text}"
            for value, text in zip(values, shown, strict=True)
        ]
        self._warn(
            "constant",
            f"reward {self.name!r} {what} for all {self.count:,} completions of its first {self.calls} calls, so it "
            "does not tell them apart. The task may be hard, or easy. If it is not: does the function catch an error "
            "and return a default, or look for another format or column?\n" + "\n".join(lines),
        )

    def add_nans(self, nans: int, count: int) -> None:
        """Warn of ``nans`` NaN among the ``count`` values of a call."""
        self._warn(
            "nan",
            f"reward {self.name!r} returned NaN for {nans} of {count} completions ({nans / count:.0%}). They abstain, "
            "as None does. A NaN is often an error of the function, such as 0 / 0; return None to abstain without "
            "this warning.",
        )

    def is_first(self, error: BaseException) -> bool:
        """Whether the reward has raised no error of this type before."""
        kind = f"raised {type(error).__name__}"
        first = kind not in self.warned
        self.warned.add(kind)
        return first

    def add_thread(self) -> None:
        """Warn that a function of the user runs outside the main thread."""
        self._warn(
            "thread",
            f"reward {self.name!r} runs in the thread {threading.current_thread().name!r}. It cannot be interrupted "
            "there, and signal.alarm and all else that needs the main thread fails. Score in the main thread, or let "
            "the reward have a process of its own: process = true in its section, Reward(.., process=True) in Python.",
        )

    def _warn(self, what: str, message: str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            log.warning("%s", message)
