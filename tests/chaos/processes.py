"""Processes that are started, counted and ended: each command is a tree of processes in a process group of its own."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

from support.helpers import children

from nlgrpo.runtime import file_lock
from nlgrpo.runtime.supervision import time_limit

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make orphans of descendants children of this process, so that `descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forget_exit_functions() -> None:
    """In a forked process: drop the parent's exit functions but for nlgrpo's. W&B's would remove the parent's files."""
    atexit._clear()
    weakref.finalize._registry.clear()
    atexit.register(weakref.finalize._exitfunc)  # weakref registers it only once
    atexit.register(file_lock._beats.release)
    atexit.register(time_limit._stop)


def leave(main: Callable[[], int]) -> None:
    """End a forked process as the interpreter ends, with the exit status ``main()``."""
    forget_exit_functions()
    status = 70
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def descendants(pid: int | None = None) -> list[int]:
    """Process ids of all descendants of a process, by default of this one."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def describe(pid: int) -> str:
    """Process id, name, state and the beginning of the command line of a process."""
    with contextlib.suppress(OSError, IndexError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").partition("(")[2].rpartition(")")
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        return f"{pid} {name} ({rest.split()[0]}) {line[:120]}"
    return f"{pid} (ended)"


def continue_last_ranks(leader: int) -> None:
    """Let stopped ranks continue if no other rank is left: nobody waits for them, as for a command without ranks."""
    ranks = [pid for pid in descendants(leader) if describe(pid).split(" ")[1].startswith("rank-")]
    if ranks and all("(T)" in describe(pid) for pid in ranks):
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)


def entitle(name: str) -> None:
    """Set the name of this process in /proc, of at most 15 characters."""
    Path("/proc/self/comm").write_text(name[:15], "utf-8")


class Forked:
    """``main()`` in a process forked from this one, which saves the imports."""

    def __init__(self, main: Callable[[], int]) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            leave(main)

    def ended(self) -> bool:
        """Whether the process has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the end; returns False if it takes longer."""
        until = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < until:
            time.sleep(0.02)
        return self.ended()


def start(main: Callable[[], int], log: Path, environment: dict[str, str]) -> Forked:
    """Start a command in a process group of its own, with its output in a file, and with the environment's faults."""

    def run() -> int:
        os.setsid()
        os.environ |= environment
        ctypes.CDLL(os.environ["LD_PRELOAD"]).chaos_configure()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        entitle("leader")
        return main()

    return Forked(run)


def kill_all(spared: set[int]) -> None:
    """SIGKILL for all descendants except ``spared`` at once, as in a power cut."""
    found = set(descendants()) - spared
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees the end of another
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def wait_for_orphans(seconds: float, spared: set[int]) -> list[int]:
    """Wait until there are no descendants except ``spared``; returns those that are left."""
    until = time.monotonic() + seconds
    while True:
        left = [pid for pid in descendants() if pid not in spared]
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # not a child: its parent is left too
                os.waitpid(pid, os.WNOHANG)
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)
