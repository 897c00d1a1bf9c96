"""Processes of this machine, as /proc shows them; everything is empty where the system does not say."""

from __future__ import annotations

import os
from pathlib import Path


def boot() -> str:
    """Name this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def namespace() -> str:
    """Name the set of processes that this one can see: on this boot, in this container."""
    try:
        return f"{boot()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state(pid: int) -> str:
    """Return the state of a process, as ps: "T" for a stopped one; "Z" also if there is none."""
    return _status(pid)[0]


def begun(pid: int) -> str:
    """Return when a process began, in ticks since the boot."""
    found = _status(pid)
    return found[19] if len(found) > 19 else ""


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ["Z"]
