"""The phase that this process is in, such as "update", and how long it may stay in one place there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    """What the main thread is doing, in which training step, and since when (seconds since the epoch)."""

    name: str
    step: int | None = None
    since: float = field(default_factory=time.time)

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"in the phase {self.name!r}{step} since {time.strftime('%H:%M:%S', time.localtime(self.since))}"


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that a rank may be in the same place of the program: ``seconds``, or more in the phases in ``longer``."""

    seconds: float = 600.0
    longer: Mapping[str, float] = field(default_factory=dict)

    def of(self, phase: str) -> float:
        return max(self.seconds, self.longer.get(phase, 0.0))

    @property
    def silence(self) -> float:
        """Seconds that a rank may be silent: functions of the user can hold the interpreter's lock."""
        return max(self.of("rewards"), self.of("generate"))

    @property
    def largest(self) -> float:
        return max([self.seconds, *self.longer.values()])


_current = Phase("start")


def current() -> Phase:
    return _current


def enter(name: str, step: int | None = None) -> None:
    """Begin a phase, in ``step`` or in that of the phase before; from other threads than the main one, do nothing."""
    global _current
    if threading.current_thread() is threading.main_thread():
        _current = Phase(name, _current.step if step is None else step)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Context, or decorator, that is a phase within the phase before."""
    global _current
    before = _current
    enter(name)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            _current = before
