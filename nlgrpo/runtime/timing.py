"""Wall time of a step's parts, memory at its largest, and the signal that asks a run to stop."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch


class Clock:
    """Laps of one step, in seconds; on a GPU each lap waits for the work that was queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def metrics(self, generated: int) -> dict[str, float]:
        """``time/*``, ``step_time`` and, for so many tokens ``generated``, their rate over the whole step."""
        total = self.last - self.began
        laps = {f"time/{name}": seconds for name, seconds in self.laps.items()}
        return laps | {"step_time": total, "perf/tokens_per_s": generated / total}


class PeakMemory:
    """Most that a GPU held at a time since it was made, of everything that this process has on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int | None:
        """None on a CPU, where nothing counts it."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def machine(device: torch.device) -> str:
    """What times depend on: the device's name, or of a CPU how many threads work on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def as_clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


# Dense bfloat16 multiply-adds count twice; the vendor's figures, by a part of the device's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def flops_utilisation(device: torch.device, flops: float, seconds: float) -> dict[str, float]:
    """``perf/mfu``: the share of the device's peak that ``flops`` in ``seconds`` are.

    6 a parameter and trained token, 2 a generated one; recomputation, attention and the reference are not counted.
    Empty where the device's peak is not known, as on a CPU.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    return {} if peak is None else {"perf/mfu": flops / (seconds * peak)}


class StopSignal:
    """Remembers a first SIGTERM or Ctrl-C, so that the step at hand is finished and saved; a second ends at once."""

    def __init__(self) -> None:
        self.received = False
        self.before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore(self) -> None:
        """Signals do again what they did."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
