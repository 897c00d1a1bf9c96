"""A time limit for a function in the main thread, which holds whatever the function does.

A process of its own keeps the time (`terminator.keep_time`), because no thread can run while a function holds the
interpreter's lock. Over the limit it sends a signal, whose handler raises an exception in the function: this ends
loops, sleeps, locks, system calls, regular expressions and the arithmetic of large integers. A function that catches
the exception is interrupted again, then also at the next line of its code, so that a loop of ``try`` and ``except``
ends. If nothing helps, as in C code that does not return, the process is ended with the stacks of its threads.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar, cast

from nlgrpo.runtime.supervision import terminator

Result = TypeVar("Result")

LIBRARY = os.path.dirname(os.__file__)  # of Python


class TimedOut(Exception):
    """A call did not return within its limit. ``place``: where it was interrupted, if that is known."""

    def __init__(self, place: str = "") -> None:
        super().__init__(place)
        self.place = place


class _Interrupted(BaseException):
    """Raised in a function that has exceeded its limit."""


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def limited(work: Callable[[], Result], seconds: float, why: str) -> Result:
    """Return ``work()``, which runs here, in the main thread; raise TimedOut if it takes more than ``seconds``.

    A call that was interrupted has timed out, also if it catches the exception and returns or raises another one. Only
    KeyboardInterrupt passes. The time in which this process is stopped, as by Ctrl-Z, does not count.
    ``why``: what to print if it cannot be interrupted for `terminator.GRACE` seconds, and this process is ended.

    Within another limited call the limit of that one counts alone.
    """
    with _kept(seconds, why) as interrupts:
        tracing = sys.gettrace()
        try:
            result = _call(work)
        except BaseException as error:
            if interrupts.count and not isinstance(error, KeyboardInterrupt):
                raise TimedOut(interrupts.place) from None
            raise
        finally:
            if sys.gettrace() is not tracing:
                sys.settrace(tracing)
    if interrupts.count:
        raise TimedOut(interrupts.place)
    return result


@contextlib.contextmanager
def ended_after(seconds: float, why: str) -> Iterator[None]:
    """Context of the main thread that ends this process if it is not left within ``seconds`` and the grace period.

    It interrupts nothing: for code that waits, with a limit of its own, for a thread that may hold the interpreter's
    lock.
    """
    with _kept(seconds, why):
        yield


def _call(work: Callable[[], Result]) -> Result:
    """Call ``work``. Only here and in what it calls does an interrupt raise."""
    return work()


class _Interrupts:
    """The handler of the signal during one call."""

    def __init__(self) -> None:
        self.count = 0
        self.place = ""

    def handle(self, number: int, frame: FrameType | None) -> None:
        inside = []
        while frame is not None and frame.f_code is not _call.__code__:
            inside.append(frame)
            frame = frame.f_back
        if frame is None:  # the call has not begun, or it has returned
            return
        own = [one for one in inside if not _of_library(one.f_code.co_filename)]
        if self.count == 0:
            at = (own or inside or [frame])[0]
            self.place = f"{at.f_code.co_filename}, line {at.f_lineno}, in {at.f_code.co_name}"
        else:  # the function has caught the exception
            for one in own:
                one.f_trace = _raise_at_line
            sys.settrace(_trace_no_more)
        self.count += 1
        raise _Interrupted


def _of_library(file: str) -> bool:
    """Whether a file belongs to Python or an installed package, whose locks must not be left by force."""
    return file.startswith((LIBRARY, "<frozen ")) or "site-packages" in file


def _raise_at_line(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        raise _Interrupted
    return _raise_at_line


def _trace_no_more(frame: FrameType, event: str, argument: Any) -> None:
    """Trace no functions besides those that run already."""


# --- the process that keeps the time ----------------------------------------------------------------------------------

_keeper: subprocess.Popen[bytes] | None = None
_keeping = False


@contextlib.contextmanager
def _kept(seconds: float, why: str) -> Iterator[_Interrupts]:
    """Context of a call whose time is kept, with the handler of its interrupts."""
    global _keeping
    interrupts = _Interrupts()
    if _keeping:
        yield interrupts
        return
    terminator.print_stacks_on_abort()
    keeper = _started()
    before = signal.signal(terminator.INTERRUPT, interrupts.handle)
    _keeping = True
    try:
        _tell(keeper, json.dumps([time.monotonic() + seconds, why]).encode())
        yield interrupts
    finally:
        answer = b""
        try:
            with contextlib.suppress(OSError):
                _tell(keeper, b"")
                answer = cast(IO[bytes], keeper.stdout).readline()  # no signal follows it
        finally:
            if not answer:  # the process was killed, or Ctrl-C came here
                _stop()
            signal.signal(terminator.INTERRUPT, signal.SIG_DFL if before is None else before)
            _keeping = False


def _started() -> subprocess.Popen[bytes]:
    """Return the process that keeps the time, which is started when it is needed first."""
    global _keeper
    if _keeper is None or _keeper.poll() is not None:
        # -I -S: starts within 20 ms, and imports nothing from the folder of the user.
        command = [sys.executable, "-I", "-S", str(Path(terminator.__file__)), str(os.getpid())]
        _keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    return _keeper


def _tell(keeper: subprocess.Popen[bytes], line: bytes) -> None:
    stream = cast(IO[bytes], keeper.stdin)
    stream.write(line + b"\n")
    stream.flush()


def _stop() -> None:
    """End the process that keeps the time."""
    global _keeper
    if _keeper is not None:
        _keeper.kill()
        with contextlib.suppress(BrokenPipeError):  # what was not sent
            _keeper.communicate()
        _keeper = None


def _forget() -> None:
    """In a forked process: the one that keeps the time belongs to the parent."""
    global _keeper, _keeping
    _keeper = None
    _keeping = False


atexit.register(_stop)
os.register_at_fork(after_in_child=_forget)
