"""Runs a command that gets a signal when its parent ends in any way: ``ending_with_parent.py PID SIGNAL COMMAND ..``.

PID is the parent's, and SIGNAL the number of the signal. The command replaces this process; a second one waits for
the end of either and sends the signal.
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


def command(line: Sequence[str], number: int = signal.SIGTERM) -> list[str]:
    """Return the command line that runs ``line`` in this way as a child of this process; ``line`` on other systems.

    ``number``: the signal that the command gets.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or an older one
        return list(line)
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(int(number)), *line]


def main(pid: int, number: int, line: list[str]) -> None:
    try:
        parent = os.pidfd_open(pid)
        run = os.pidfd_open(os.getpid())
    except ProcessLookupError:
        return
    if os.getppid() != pid:  # it has ended, and another process has its number
        return
    if (child := os.fork()) == 0:
        try:
            if os.fork() == 0:  # not a child of the command, which may wait for all of its children
                _watch(parent, run, number)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.execv(line[0], line)  # nosec B606  # the sweep's command


def _watch(parent: int, run: int, number: int) -> None:
    """Wait until one of the two processes (pidfds) ends, and send the signal to the run if it is the parent."""
    for file in map(int, os.listdir("/proc/self/fd")):  # the run's output, and the locks that it has inherited
        if file not in (parent, run):
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(file)
    ended, _, _ = select.select([parent, run], [], [])
    if run not in ended:
        signal.pidfd_send_signal(run, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
