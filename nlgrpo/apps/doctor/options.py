"""Options of ``nlgrpo doctor``; without PyTorch, so that ``--help`` takes no seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro


@dataclass
class Doctor:
    """Check this machine, and whether nlgrpo computes on it what it should. Exit status 1 if a check fails."""

    only: tuple[str, ...] = ()
    """Names of the checks to run; all by default."""
    json: str = ""
    """File for the results in JSON, to attach to an issue; - for stdout, with the table on stderr."""
    list: bool = False
    """List the checks instead of running them."""


def read_options(arguments: Sequence[str]) -> Doctor:
    return tyro.cli(Doctor, args=list(arguments), prog="nlgrpo doctor")
