"""Memory of the machine and of this process, in bytes."""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
from pathlib import Path


def of_machine(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes of memory that this process may use, and those that are free; a container's limit counts. None: unknown."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        fields = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        total = fields["MemTotal:"]
        free = fields["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
        used = int((root / "sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


def of_process() -> int:
    """Resident memory of this process; on other systems than Linux, its peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


FREE_BYTES = 64 * 2**20  # that the C library may keep: returning fewer is not worth the time of mapping them again


def release() -> None:
    """Return freed memory to the system, if the C library keeps much of it (glibc; elsewhere it does nothing).

    glibc keeps freed blocks for later use, scattered between those in use. After a phase of a run that memory often
    does not serve the next phase, which needs blocks of other sizes, so that the peak is that of both.
    """
    glibc = _glibc()
    if glibc is not None and glibc.mallinfo2().fordblks > FREE_BYTES:
        glibc.malloc_trim(0)


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``. ``fordblks``: bytes in free blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc 2.33 or later."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None
    library.mallinfo2.restype = _MallInfo
    return library
