"""Processes that end their parent if it does not stop, or interrupt it if a call of a function takes too long.

    python terminator.py PID GRACE AGAIN      after a signal
    python terminator.py PID                  after the time limit of a call

Both work while a function holds the parent's interpreter lock, when none of its threads can run Python.

After a signal: the parent writes the numbers of the signals that it receives to standard input, by
`signal.set_wakeup_fd`. After GRACE seconds from the first one, or AGAIN from the second SIGTERM or SIGINT, it is ended.

After a time limit: see `keep_time`. A parent that is ended gets SIGABRT, so that `faulthandler` prints the stacks of
its threads, and then SIGKILL. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import select
import signal
import sys
import time

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CHECK = 5.0  # seconds between checks that the parent is alive
PRINTING = 5.0  # seconds between SIGABRT and SIGKILL

# Interrupts a call: a real-time signal, which programs rarely use. macOS has none.
INTERRUPT = int(signal.SIGRTMAX) - 3 if sys.platform == "linux" else int(signal.SIGVTALRM)
GRACE = 10.0  # seconds after its limit in which a call can still be interrupted
SECOND = 0.5  # seconds from the first interrupt to the second: the function may clean up
LATER = 0.1  # seconds between later ones


def watch(parent: int, grace: float, again: float) -> None:
    """Wait for the end of the parent or of the pipe; end the parent if it does not stop in time."""
    received = 0
    insisted = 0
    deadline = math.inf
    while os.getppid() == parent:
        left = deadline - time.monotonic()
        if left <= 0:
            signals = "a signal" if received == 1 else f"{received} signals"
            return end(parent, f"process {parent} received {signals} and did not stop in time. It is ended")
        if select.select([0], [], [], min(left, CHECK))[0]:
            numbers = os.read(0, 4096)
            if not numbers:
                return
            for number in numbers:
                if number in STOPPING:
                    received += 1
                    insisted += number != signal.SIGUSR1
                    deadline = min(deadline, time.monotonic() + (again if insisted > 1 else grace))


def keep_time(parent: int) -> None:
    """Interrupt each call of the parent that exceeds its limit; end the parent if that does not help for `GRACE` s.

    Standard input has two lines for each call. At its beginning: a JSON list of the time at which it must have returned
    (of `time.monotonic`, which all processes share), and of a text for the case that the parent is ended. At its end:
    an empty line, which is answered by one; no signal is sent after it. The time in which the parent is stopped, as by
    Ctrl-Z, does not count, up to `CHECK` s before it goes on.
    """
    deadline = math.inf
    following = math.inf
    why = ""
    received = b""
    now = time.monotonic()
    while os.getppid() == parent:
        before = now
        now = time.monotonic()
        if _is_stopped(parent):
            deadline += now - before
            following += now - before
        if now >= deadline + GRACE:
            return end(parent, why)
        if now >= following:
            os.kill(parent, INTERRUPT)
            following = now + (SECOND if now < deadline + SECOND else LATER)
        left = min(following, deadline + GRACE) - time.monotonic()
        if not select.select([0], [], [], max(0.0, min(left, CHECK)))[0]:
            continue
        more = os.read(0, 65536)
        if not more:
            return
        *lines, received = (received + more).split(b"\n")
        for line in lines:
            if line:
                deadline, why = json.loads(line)
                following = deadline
            else:
                deadline = following = math.inf
                os.write(1, b"\n")


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def end(parent: int, why: str) -> None:
    """End the parent: SIGABRT, then SIGKILL."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"error: {why}; its threads are:", file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGABRT)
    deadline = time.monotonic() + PRINTING
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.1)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def print_stacks_on_abort() -> None:
    """In the parent: let SIGABRT print the stacks of all threads."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # for the parent, not for this process
    if len(sys.argv) == 2:
        keep_time(int(sys.argv[1]))
    else:
        watch(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
