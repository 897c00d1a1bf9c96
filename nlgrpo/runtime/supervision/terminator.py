"""A process that ends its parent if that does not stop: ``python terminator.py PID GRACE AGAIN``.

The parent writes the numbers of the signals that it receives to standard input, by `signal.set_wakeup_fd`: this works
while a function holds the parent's interpreter lock, for example in a regular expression that takes for ever. After
GRACE seconds from the first signal, or AGAIN from the second SIGTERM or SIGINT, the parent gets SIGABRT, so that
`faulthandler` prints the stacks of its threads, and then SIGKILL.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CHECK = 5.0  # seconds between checks that the parent is alive
PRINTING = 5.0  # seconds between SIGABRT and SIGKILL


def watch(parent: int, grace: float, again: float) -> None:
    """Wait for the end of the parent or of the pipe; end the parent if it does not stop in time."""
    received, insisted, deadline = 0, 0, math.inf
    while os.getppid() == parent:
        left = deadline - time.monotonic()
        if left <= 0:
            return end(parent, received)
        if select.select([0], [], [], min(left, CHECK))[0]:
            numbers = os.read(0, 4096)
            if not numbers:
                return
            for number in numbers:
                if number in STOPPING:
                    received += 1
                    insisted += number != signal.SIGUSR1
                    deadline = min(deadline, time.monotonic() + (again if insisted > 1 else grace))


def end(parent: int, received: int) -> None:
    """End the parent: SIGABRT, then SIGKILL."""
    signals = "a signal" if received == 1 else f"{received} signals"
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"error: process {parent} received {signals} and did not stop in time. It is ended; its threads are:",
              file=sys.stderr, flush=True)  # fmt: skip
    os.kill(parent, signal.SIGABRT)
    deadline = time.monotonic() + PRINTING
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.1)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # for the parent, not for this process
    watch(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
