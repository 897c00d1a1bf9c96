"""What the fake device counts: kernel launches, synchronizations and copies from the host, with their lines."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

HERE = str(Path(__file__).resolve().parent)
REPOSITORY = str(Path(__file__).resolve().parents[3])


@dataclass(eq=False)
class Counts:
    """Events on the device while `FakeCuda.counting` is active.

    A line is "file:line" of the innermost caller inside this repository, relative to its root.
    """

    launches: Counter[str] = field(default_factory=Counter)
    """Kernel launches by the name of the op or kernel: "aten::mm", "triton::_draw", "nlgrpo::sample"."""
    launched_at: Counter[str] = field(default_factory=Counter)
    """Kernel launches by line."""
    custom_ops: Counter[str] = field(default_factory=Counter)
    """Calls of custom ops. What they launch is in ``launches``."""
    synchronizations: Counter[str] = field(default_factory=Counter)
    """Places where the host waits for the device, by line and cause."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Blocking copies of host memory to the device, by line. PyTorch waits for these too, but not for others' work."""

    def __sub__(self, other: Counts) -> Counts:
        """Differences of all counts, without zeros."""
        result = Counts()
        for name, counter in vars(self).items():
            difference = Counter(counter)
            difference.subtract(getattr(other, name))
            setattr(result, name, Counter({key: n for key, n in difference.items() if n}))
        return result

    def synchronizations_in(self, *files: str) -> int:
        """Number of synchronizations at lines of these files."""
        return sum(n for place, n in self.synchronizations.items() if place.startswith(files))


def place() -> str:
    """File and line of the innermost caller that belongs to the repository and not to the fake device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(REPOSITORY) and not name.startswith(HERE) and "/site-packages/" not in name:
            return f"{name[len(REPOSITORY) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the repository"
