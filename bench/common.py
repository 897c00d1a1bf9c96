"""Shared by all benchmarks: facts about the machine, memory of a process, and saving of results."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


def cpu_name() -> str:
    """Name of the processor, or the architecture if the system does not report a name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed(package: str) -> bool:
    """Whether the package is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, load and versions of Python, torch and ``packages``, for a result file."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "load_1_minute": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    } | {name: version(name) for name in packages}


def one_line(facts: dict[str, Any], threads: int) -> str:
    """One line about the machine, printed below the table."""
    return f"{threads} threads, {facts['gpu'] or facts['cpu']}, torch {facts['torch']}, load {facts['load_1_minute']}"


def resident() -> int:
    """Current resident memory of this process in bytes (on Linux; elsewhere its peak so far)."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text("ascii").split()[1]) * resource.getpagesize()
    return peak_resident()


def peak_resident() -> int:
    """Peak resident memory of this process in bytes, since its start or the last `forget_peak`.

    ``ru_maxrss`` is only the fallback: on Linux a child process starts with the peak of its parent.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Return freed memory to the system, then reset the peak of `peak_resident` to the current memory."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if malloc_trim is not None:
        malloc_trim(0)
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5", "ascii")


def save(name: str, result: dict[str, Any], device: str = "cpu") -> Path:
    """Write ``results/DEVICE/NAME.json`` with the date."""
    path = RESULTS / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **result}, indent=2) + "\n", encoding="utf-8")
    return path
