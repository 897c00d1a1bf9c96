"""Runs a command that gets SIGTERM when its parent ends in any way: ``python ending_with_parent.py PID COMMAND ..``.

PID is the parent's. The command replaces this process; a second one waits for the end of either and sends the signal.
PR_SET_PDEATHSIG needs no second process, but Linux sends that signal for each thread of a parent that is killed, and a
run that has a second SIGTERM stops without saving. Linux >= 5.3 only. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence


def command(line: Sequence[str]) -> list[str]:
    """Return the command line that runs ``line`` in this way as a child of this process; ``line`` on other systems."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or an older one
        return list(line)
    return [sys.executable, "-IS", __file__, str(os.getpid()), *line]


def main(pid: int, line: list[str]) -> None:
    try:
        parent, run = os.pidfd_open(pid), os.pidfd_open(os.getpid())
    except ProcessLookupError:
        return
    if os.getppid() != pid:  # it has ended, and another process has its number
        return
    if (child := os.fork()) == 0:
        try:
            if os.fork() == 0:  # not a child of the command, which may wait for all of its children
                _watch(parent, run)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.execv(line[0], line)  # nosec B606  # the sweep's command


def _watch(parent: int, run: int) -> None:
    """Wait until one of the two processes ends, and send SIGTERM to the run if it is the parent. Arguments: pidfds."""
    for number in map(int, os.listdir("/proc/self/fd")):  # the run's output, and the locks that it has inherited
        if number not in (parent, run):
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(number)
    ended, _, _ = select.select([parent, run], [], [])
    if run not in ended:
        signal.pidfd_send_signal(run, signal.SIGTERM)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
