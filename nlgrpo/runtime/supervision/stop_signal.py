"""The signals that stop a run: it finishes its step and saves, or is ended if that takes too long."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import ClassVar

from nlgrpo.runtime.supervision import terminator

GRACE = 600.0  # seconds


class StopSignal:
    """Context that records the first SIGTERM, SIGINT (Ctrl-C) or SIGUSR1, so that the work is finished and saved.

    A second SIGTERM or SIGINT stops at once; SIGUSR1 is a notice, for example of a preemption, and does not count. A
    process that still runs ``grace`` seconds after the first signal (inf: no limit), or `AGAIN` seconds after the
    second, is ended, and the stacks of its threads are printed. This does not depend on what it does: no handler of a
    signal can run while a function holds the interpreter's lock.
    """

    AGAIN: ClassVar[float] = 5.0
    _current: ClassVar[StopSignal | None] = None

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self.received = False

    def __enter__(self) -> StopSignal:
        self._outer = StopSignal._current
        StopSignal._current = self
        self._before = {number: signal.signal(number, self._remember) for number in terminator.STOPPING}
        self._pipe: int | None = None
        if math.isfinite(self.grace):
            self._start_terminator()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        if self._pipe is not None:
            os.close(self._pipe)  # the terminator ends
            self._terminator.wait()

    def _leave(self) -> None:
        """Restore the handlers of signals from before."""
        StopSignal._current = self._outer
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before, warn_on_full_buffer=False)

    def _start_terminator(self) -> None:
        terminator.print_stacks_on_abort()
        reading, self._pipe = os.pipe()
        arguments = [str(os.getpid()), str(self.grace), str(self.AGAIN)]
        # -I -S: starts within 20 ms, and imports nothing from the folder of the user.
        command = [sys.executable, "-I", "-S", str(Path(terminator.__file__)), *arguments]
        self._terminator = subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(reading)
        os.set_blocking(self._pipe, False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if not self.received and os.environ.get("RANK", "0") == "0":
            limit = f" within {self.grace:g} s" if math.isfinite(self.grace) else ""
            text = f"{signal.Signals(number).name}: saving and stopping{limit}; a second signal stops at once\n"
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, text.encode())  # print() is not safe in a handler
        self.received = True
        if number != signal.SIGUSR1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- forked processes, such as the workers of a data loader: their signals are their own ------------------------------

_forking = threading.local()


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, terminator.STOPPING)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    while StopSignal._current is not None:
        StopSignal._current._leave()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
