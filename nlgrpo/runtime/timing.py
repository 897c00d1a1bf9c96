"""Wall time of the phases of a step, and peak memory."""

from __future__ import annotations

import time

import torch
from torch.profiler import record_function

from nlgrpo.runtime.device import gpu_of_device
from nlgrpo.runtime.supervision import phases


class Clock:
    """Wall times of the phases of one step, in seconds; on a GPU each phase ends when the queued work is done."""

    def __init__(self, device: torch.device, step: int) -> None:
        self.device = device
        self.step = step
        self.began = self.last = time.perf_counter()
        self.current = ""
        self.times: dict[str, float] = {}
        self.range: record_function | None = None  # of the current phase in a profile

    def phase(self, name: str) -> None:
        """End the phase before, if any, and begin ``name``."""
        self.stop()
        self.current = name
        self.range = record_function(name)
        self.range.__enter__()
        phases.enter(name, self.step)

    def stop(self) -> None:
        """End the current phase."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.range is not None:
            self.times[self.current] = now - self.last
            self.range.__exit__(None, None, None)
            self.range = None
        self.last = now

    def metrics(self, generated: int) -> dict[str, float]:
        """Return ``time/*``, ``step_time`` and ``perf/tokens_per_s``, ``generated`` tokens by the step's time."""
        total = self.last - self.began
        times = {f"time/{name}": seconds for name, seconds in self.times.items()}
        return times | {"step_time": total, "perf/tokens_per_s": generated / total}


class PeakMemory:
    """Peak GPU memory of all of this process's allocations since the object was created."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int | None:
        """Return the peak in bytes; None on a CPU, where it is not measured."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def every(interval: int, step: int) -> bool:
    """Whether something that happens every ``interval`` steps (0: never) happens at ``step``."""
    return interval > 0 and step % interval == 0


def machine(device: torch.device) -> str:
    """Describe the hardware of timings: the name of a GPU, or the number of threads on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def as_clock(seconds: float) -> str:
    """Format a duration as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def flops_utilisation(device: torch.device, flops: float, seconds: float) -> dict[str, float]:
    """Return ``perf/mfu``: ``flops`` per second as a fraction of the device's peak (a multiply-add is 2 FLOPs).

    Callers count 6 FLOPs per parameter and trained token (a prompt once per group) and 2 per parameter and generated
    token, without recomputation, attention and the reference model. Empty if the peak of the device is unknown, as on
    a CPU.
    """
    gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {} if gpu is None else {"perf/mfu": flops / (seconds * gpu.flops)}
