"""Memory of the machine and of this process, in bytes."""

from __future__ import annotations

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


def of_process(key: str = "VmRSS") -> int | None:
    """Resident memory of this process: now ("VmRSS") or at most so far ("VmHWM"). None: not Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
