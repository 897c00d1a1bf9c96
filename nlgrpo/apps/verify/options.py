"""Options of ``nlgrpo verify``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class Verify:
    """Check the mathematics against exact answers. Exit status 1 if a claim fails."""

    out: Path = Path("runs/verify")
    """Folder of verify.json and the pictures."""
    quick: bool = False
    """Run smaller cases, in seconds."""


def read_options(arguments: Sequence[str]) -> Verify:
    return tyro.cli(Verify, args=list(arguments), prog="nlgrpo verify")
