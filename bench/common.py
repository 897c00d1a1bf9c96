"""What all benchmarks share: facts about the machine, memory of a process, and where results are kept."""

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
    """The processor's name; the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed(package: str) -> bool:
    """Whether pip knows the package here."""
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
    """The machine as a benchmark prints it under its table."""
    return f"{threads} threads, {facts['gpu'] or facts['cpu']}, torch {facts['torch']}, load {facts['load_1_minute']}"


def resident() -> int:
    """Bytes of memory that this process holds now (Linux; elsewhere its peak so far)."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text("ascii").split()[1]) * resource.getpagesize()
    return peak_resident()


def peak_resident() -> int:
    """Bytes of memory that this process held at most, since its start or the last `forget_peak`.

    ``ru_maxrss`` is the second choice: where a program is started by another, Linux lets it begin with what that held.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Let `peak_resident` begin anew from what is held now, memory that was freed and kept by malloc returned first."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if malloc_trim is not None:
        malloc_trim(0)
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5", "ascii")


def save(name: str, result: dict[str, Any], device: str = "cpu") -> Path:
    """Write ``results/DEVICE/NAME.json``, with the day."""
    path = RESULTS / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **result}, indent=2) + "\n", encoding="utf-8")
    return path
