"""Wall time of a step's parts, and the signal that asks a run to stop."""

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


class StopSignal:
    """Remembers a first SIGTERM or Ctrl-C, so that the step in hand is finished and saved; a second one ends at once."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
