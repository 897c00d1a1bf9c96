"""Runs a command that gets SIGTERM when its parent ends in any way: ``python ending_with_parent.py PID COMMAND ..``.

PID is the parent's. Linux only; the signal stays set for the command, which replaces this process. Imports the standard
library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def command(line: Sequence[str]) -> list[str]:
    """Return the command line that runs ``line`` in this way as a child of this process; ``line`` if not on Linux."""
    wrapper = [sys.executable, "-IS", __file__, str(os.getpid())] if sys.platform == "linux" else []
    return [*wrapper, *line]


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == int(sys.argv[1]):  # otherwise it has already ended
        os.execv(sys.argv[2], sys.argv[2:])  # nosec B606  # the sweep's command
