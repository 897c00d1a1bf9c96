"""The best policy of a run by an evaluation (train.keep_best), and when evaluations have stopped improving.

``RUN/best`` has the model and ``best.json``, which names its step and value. A policy is exported if its evaluation is
better than that, or at first than the one of the initial policy, so a run that resumes goes on as it would have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime import atomic_files

FOLDER = "best"
UNFINISHED = "best.unfinished"
RECORD = "best.json"
SMALLER = "min:"


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    step: int
    metric: str
    """As in train.keep_best, such as "objective/solved" or "min:completions/mean_length"."""
    value: float

    def text(self, run: Path) -> str:
        """``"runs/x/best: objective/solved = 0.7123 after step 40"``."""
        if self.step == 0:
            return f"none: no evaluation was better than the initial policy's, {self.metric} = {self.value:.4f}"
        return f"{run / FOLDER}: {self.metric} = {self.value:.4f} after step {self.step}"


@dataclass(frozen=True)
class Selection:
    """Which metric decides. ``metric``: its name in the rows; ``smaller``: whether smaller is better."""

    metric: str
    smaller: bool

    @classmethod
    def of(cls, keep_best: str) -> Selection:
        return cls(keep_best.removeprefix(SMALLER), keep_best.startswith(SMALLER))

    def value(self, values: Mapping[str, Sequence[float | None]], when: str) -> float:
        """The metric of an evaluation. Raises UserError if the evaluation lacks it, or for NaN."""
        if self.metric not in values:
            guesses = nearest(self.metric, values, n=3)
            known = ", ".join(values)
            raise UserError(
                f"train.keep_best: evaluations have no metric {self.metric!r}{did_you_mean(guesses)} They have: {known}"
            )
        number = values[self.metric][0]
        if number is None or math.isnan(number):
            raise UserError(
                f"train.keep_best: {self.metric} has no value {when}, as no evaluation prompt has enough samples with "
                "a reward; choose another metric"
            )
        return float(number)

    def better(self, value: float, than: float) -> bool:
        return value < than if self.smaller else value > than


def exhausted(rows: Sequence[Mapping[str, Any]], best: Best, patience: int) -> bool:
    """Whether there have been ``patience`` evaluations since the best one; never for 0."""
    return patience > 0 and sum(row["step"] > best.step for row in rows) >= patience


def read_exported(run: Path, keep_best: str) -> Best | None:
    """Read which policy is in ``RUN/best``; None if there is none, or one that is the best by another metric."""
    path = run / FOLDER / RECORD
    if not path.is_file():
        return None
    try:
        found = Best(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError):
        return None
    return found if found.metric == keep_best else None


def publish(run: Path, exported: Path, best: Best) -> None:
    """Make ``exported`` the folder ``RUN/best``; with the run's configuration, commands read it like a run."""
    atomic_files.atomic_write(exported / "config.json", (run / "config.json").read_text("utf-8"))
    atomic_files.atomic_write(exported / RECORD, json.dumps(asdict(best)) + "\n")
    atomic_files.remove(run / FOLDER)
    exported.rename(run / FOLDER)


def recover(run: Path) -> None:
    """Complete a `publish` that was killed, and remove an export that was not complete."""
    exported = run / UNFINISHED
    if (exported / RECORD).is_file() and not (run / FOLDER / RECORD).is_file():
        atomic_files.remove(run / FOLDER)
        exported.rename(run / FOLDER)
    atomic_files.remove(exported)
