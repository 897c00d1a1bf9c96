"""The commands ``nlgrpo report`` and ``nlgrpo compare``: the HTML page of runs, and one picture of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional


@dataclass
class Report:
    """Write an HTML report, with its pictures next to it, about runs, evaluations and sweeps."""

    folders: Positional[tuple[str, ...]]
    """Folders written by `nlgrpo train`, `nlgrpo evaluate` or `nlgrpo sweep`; LABEL=PATH gives a name. Runs that differ
    in the seed only are one model, with intervals over seeds and prompts."""
    out: Path | None = None
    """The HTML file. None: report.html in the folder, or for several folders in the current one."""


def write_report(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    from nlgrpo.apps.report import report  # imports matplotlib, which is slow

    options = tyro.cli(Report, args=list(arguments), prog="nlgrpo report")
    print(report.write_report(options.folders, options.out))
    return 0


@dataclass
class Compare:
    """Draw the lengths, or the solved prompts, and the best-of-N curves of several runs into one picture."""

    runs: Positional[tuple[str, ...]]
    """Folders of runs, or of sweeps for all their runs; LABEL=PATH gives a name. Runs that differ in the seed only are
    one setting, with intervals over seeds and prompts."""
    out: Path = Path("compare.png")
    """The picture."""


def compare(arguments: Sequence[str]) -> int:
    """Draw the picture and print its path."""
    from nlgrpo.apps.report import compare as comparison

    options = tyro.cli(Compare, args=list(arguments), prog="nlgrpo compare")
    print(comparison.compare(options.runs, options.out))
    return 0
