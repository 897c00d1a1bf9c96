"""Memory of the machine and of this process, in bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def of_machine(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes of memory that this process may use, and those that are free; a container's limit counts. None: unknown."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        fields = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        total, free = fields["MemTotal:"], fields["MemAvailable:"]
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
