"""A profile of some steps of training: a trace for Perfetto or chrome://tracing, and on a GPU a memory snapshot."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from nlgrpo.runtime.atomic_files import into

FOLDER = "profile"  # in the folder of the run


def steps_of(text: str) -> range:
    """Return the steps of "FIRST:LAST", without LAST, as a slice: "10:13" is 10, 11 and 12. "" is none.

    Raises ValueError for other texts, and for a range without a step.
    """
    if not text:
        return range(0)
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"{text!r}: expected FIRST:LAST, such as 10:13 for the steps 10, 11 and 12")
    return range(int(first), int(last))


class StepProfiler:
    """Context of a training loop that profiles ``steps`` on this rank, and writes into ``folder`` when they end.

    The files are ``profile/rank-0.json.gz``, with the phases of a step as ranges, shapes and memory, and on a GPU
    ``profile/rank-0-memory.pickle`` for https://pytorch.org/memory_viz. Steps are profiled from the first one of
    ``steps`` that the loop comes to; the profile ends early if the loop does.
    """

    def __init__(self, steps: range, folder: Path, rank: int) -> None:
        self.steps = steps
        self.trace = folder / FOLDER / f"rank-{rank}.json.gz"
        self.snapshot = folder / FOLDER / f"rank-{rank}-memory.pickle"
        self.running: profile | None = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(keep=error is None)

    def begin(self, step: int) -> None:
        """Profile from here on if ``step`` is one of the steps. Ends the profile after the last of them."""
        if step not in self.steps:
            self.end()
        elif self.running is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history()
            self.running = profile(activities=activities, record_shapes=True, profile_memory=True)
            self.running.start()

    def end(self, *, keep: bool = True) -> None:
        """End the profile, if it is running, and write its files unless ``keep`` is false."""
        if self.running is None:
            return
        finished = self.running
        self.running = None
        on_gpu = torch.cuda.is_available()
        try:
            if on_gpu:
                torch.cuda.synchronize()
            finished.stop()
            if keep:
                with into(self.trace.parent):
                    self.trace.parent.mkdir(parents=True, exist_ok=True)
                    finished.export_chrome_trace(str(self.trace))
                    if on_gpu:
                        torch.cuda.memory._dump_snapshot(str(self.snapshot))
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
