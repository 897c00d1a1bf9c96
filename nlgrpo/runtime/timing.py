"""Wall time of the phases of a step, peak memory, and the signals that stop a run."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from nlgrpo.runtime import gpus


class Clock:
    """Wall times of the phases of one step, in seconds; on a GPU each lap waits for the queued work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Record the time since the last lap as ``name``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def metrics(self, generated: int) -> dict[str, float]:
        """Return ``time/*``, ``step_time`` and ``perf/tokens_per_s``, ``generated`` tokens by the step's time."""
        total = self.last - self.began
        laps = {f"time/{name}": seconds for name, seconds in self.laps.items()}
        return laps | {"step_time": total, "perf/tokens_per_s": generated / total}


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
    gpu = gpus.of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {} if gpu is None else {"perf/mfu": flops / (seconds * gpu.flops)}


class StopSignal:
    """Records the first SIGTERM or Ctrl-C, so that the current step is finished and saved; the second stops at once."""

    def __init__(self) -> None:
        self.received = False
        self.before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
