"""Threads of PyTorch on a CPU: one for each idle core when a run begins, and the same number when it resumes.

The threads of a product wait for each other by spinning. If another process uses the core of one of them, all wait for
it: with two threads on two cores, a step then takes four times as long, and with one thread twice as long. A sum over
threads rounds by their number, so a run keeps the number that it began with.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.runtime.distributed import Ranks

THREADS_FILE = "threads.json"  # in the folder of a run
SET_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STAT = Path("/proc/stat")
SHORT = 0.2  # seconds of the first look at the load
LONG = 0.8  # seconds of the second one, if cores are busy in the first: a short burst is no load


@dataclass(frozen=True)
class Threads:
    """Number of threads, and what to tell the user about it; an empty ``note`` if it is the usual number."""

    count: int
    note: str = ""


def use(folder: Path, ranks: Ranks, *, restart: bool = False) -> str:
    """Set the number of threads for the run in ``folder``; return a note for the user, or an empty string.

    A number that the user has set (OMP_NUM_THREADS, which torchrun sets for several ranks) stays. A run that resumes
    takes the number that it began with. Else it is that of the idle cores. Several ranks and GPUs keep PyTorch's.
    """
    if ranks.device.type != "cpu":
        return ""
    saved = None if restart else saved_count(folder)
    threads = choose(torch.get_num_threads(), saved, alone=ranks.world == 1)
    torch.set_num_threads(threads.count)
    return threads.note


def record(folder: Path, ranks: Ranks) -> None:
    """Save the number of threads in the folder of a run that begins."""
    if ranks.first and ranks.device.type == "cpu" and saved_count(folder) is None:
        atomic_write(folder / THREADS_FILE, json.dumps({"threads": torch.get_num_threads()}) + "\n")


def choose(usual: int, saved: int | None, *, alone: bool = True) -> Threads:
    """Choose the number of threads. ``usual``: PyTorch's number; ``saved``: that of the run, if it resumes."""
    given = next((name for name in SET_BY_USER if os.environ.get(name)), None)
    if given is not None:
        note = f"{shown(usual)} ({given}); this run began with {shown(saved)}" if saved not in (None, usual) else ""
        return Threads(usual, f"{note}: its numbers may round differently" if note else "")
    if saved is not None and saved <= usual:
        return Threads(saved, f"{shown(saved)}, as when this run began" if saved != usual else "")
    if saved is not None:
        note = f"{shown(usual)}: this machine has no {saved} cores, with which this run began"
        return Threads(usual, f"{note}; its numbers may round differently")
    if not alone or usual == 1:
        return Threads(usual)
    busy = busy_cores(SHORT)
    if busy:
        busy = min(busy, busy_cores(LONG))
    if not busy:
        return Threads(usual)
    cores = len(usable())
    count = max(1, min(usual, cores - busy))
    if count == usual:
        return Threads(usual)
    others = "another process uses a core" if busy == 1 else f"other processes use {min(busy, cores)} of {cores} cores"
    return Threads(count, f"{shown(count)}: {others}")


def shown(count: int | None) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def busy_cores(seconds: float) -> int:
    """Number of cores, of those that this process may use, that others use in the next ``seconds``; 0 if unknown.

    This process must be idle meanwhile: it sleeps.
    """
    before = times()
    time.sleep(seconds)
    after = times()
    busy = 0.0
    for core, (used, total) in after.items():
        used_before, total_before = before.get(core, (used, total))
        if total > total_before:
            busy += (used - used_before) / (total - total_before)
    return round(busy)


def times() -> dict[int, tuple[int, int]]:
    """Ticks that each usable core has worked, and all its ticks, since the machine started; {} without /proc/stat."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return {}
    cores = usable()
    found = {}
    for line in lines:
        name, *numbers = line.split()
        if name[:3] != "cpu" or not name[3:].isdigit() or int(name[3:]) not in cores:
            continue
        # user, nice, system, idle, iowait, irq, softirq, steal. What follows is part of user and nice.
        ticks = [int(number) for number in numbers[:8]]
        idle = ticks[3] + ticks[4]
        found[int(name[3:])] = (sum(ticks) - idle, sum(ticks))
    return found


def usable() -> set[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def saved_count(folder: Path) -> int | None:
    """Return the number of threads with which the run in ``folder`` began; None for a new run, or an old one."""
    try:
        count = json.loads((folder / THREADS_FILE).read_text("utf-8"))["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return count if isinstance(count, int) and count > 0 else None
