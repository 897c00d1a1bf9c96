"""Times, kernels and launches of a piece of code, on a GPU or, in a rehearsal, on a CPU."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_kit.child import Skip

TOP = 30  # kernels of a profile that the JSON keeps


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str, *, repeats: int = 5, warmup: int = 1) -> float:
    """Median wall time of ``run``, including the device's work, after ``warmup`` calls."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def in_turns(runs: list[Callable[[], object]], device: str, *, rounds: int = 3) -> float:
    """Median time of one of ``runs``, which do the same with other data.

    They take turns, so that none finds its data in the L2 cache. On a GPU the time is that between two events around
    each call: the launches are queued ahead of the device.
    """
    for run in runs:
        run()
    if device != "cuda":
        return statistics.median(seconds(run, device, repeats=1, warmup=0) for _ in range(rounds) for run in runs)
    marks = []
    for _ in range(rounds):
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in marks)


@dataclass
class Profile:
    """What ran on the device: seconds of all kernels, their number, the longest, and the seconds inside regions."""

    seconds: float = 0.0
    launches: int = 0
    regions: dict[str, float] = field(default_factory=dict)
    top: list[dict[str, Any]] = field(default_factory=list)


def profiled(run: Callable[[], object], device: str) -> Profile:
    """Profile ``run``. On a CPU, operators that run no other operator stand in for kernels."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as recorded:
        run()
        synchronize(device)
    found = Profile()
    by_name: dict[str, list[float]] = {}
    kernels: list[tuple[float, float]] = []  # start, and seconds
    spans: list[tuple[str, float, float]] = []  # region, start and end on the device
    for event in recorded.events():
        begin, end = event.time_range.start, event.time_range.end
        if event.name.startswith(REGION):
            if event.device_type == (DeviceType.CUDA if device == "cuda" else DeviceType.CPU):
                spans.append((event.name.removeprefix(REGION), begin, end))
            continue
        if device == "cuda":
            counted = event.device_type == DeviceType.CUDA and not event.is_user_annotation
            spent = event.self_device_time_total
        else:
            counted = not event.cpu_children
            spent = event.cpu_time_total
        if counted:
            by_name.setdefault(event.name, []).append(spent / 1e6)
            kernels.append((begin, spent / 1e6))
    # By time: the kernels of Triton belong to no operator, so the profiler adds them to no region.
    for name, begin, end in spans:
        inside = sum(spent for start, spent in kernels if begin <= start < end)
        found.regions[name] = found.regions.get(name, 0.0) + inside
    found.seconds = sum(map(sum, by_name.values()))
    found.launches = sum(map(len, by_name.values()))
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    found.top = [{"kernel": short(name), "seconds": sum(times), "launches": len(times)} for name, times in longest]
    return found


def short(name: str) -> str:
    """Name of a kernel without what all of PyTorch's have, so that its first characters say what it computes."""
    return re.sub(
        r"void |at::native::|\(anonymous namespace\)::|(gpu|elementwise)_kernel(_impl(_nocast)?)?<[0-9, ]*", "", name
    )[:120]


REGION = "nlgrpo kit: "


@contextmanager
def regions(**functions: tuple[Any, str]) -> Iterator[None]:
    """Context in which calls of functions are regions of a profile: ``attention=(module, "branch_attention")``.

    Raises AttributeError for a function that the module does not have.
    """
    before = {name: getattr(*place) for name, place in functions.items()}
    for name, (module, attribute) in functions.items():
        setattr(module, attribute, _marked(before[name], REGION + name))
    try:
        yield
    finally:
        for name, (module, attribute) in functions.items():
            setattr(module, attribute, before[name])


def _marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def marked(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return marked


def need(size: float, device: str) -> None:
    """Raise `Skip` if ``size`` bytes are not free on the GPU."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        if size > free:
            raise Skip(f"too little memory: needs {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


@contextmanager
def peak(device: str) -> Iterator[Callable[[], int | None]]:
    """Context with a function that returns the peak of allocated bytes since its start; None on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    yield lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None


def release(device: str) -> None:
    """Return cached memory to the device, for the next measurement."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
