"""The manifest of a sweep, ``sweep.json``: the state of every point of the grid."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from nlgrpo import __version__
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.errors import UserError
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.training.tracking.run_files import REPORT_FILE

SWEEP_FILE = "sweep.json"
State = Literal["waiting", "queued", "running", "done", "failed", "stopped"]


@dataclass
class Point:
    """One run of a sweep: its values of the varied keys, its folder and its state."""

    overrides: dict[str, Any]
    folder: Path
    state: State = "waiting"
    status: int | None = None  # exit status, negative for the signal that killed it
    seconds: float = 0.0  # total time of the processes whose end the sweep saw
    error: str = ""  # last line of the error message
    job: str = ""  # id of its latest job on a cluster

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder.parent / "logs" / f"{self.name}.log"

    def finished(self) -> bool:
        """Whether its folder holds the final evaluation and the report, which is written last."""
        try:
            return "after" in read_evaluation(self.folder) and (self.folder / REPORT_FILE).is_file()
        except ValueError:
            return False


@dataclass
class SweepState:
    """Content of ``sweep.json``; ``base`` is the configuration without the varied keys."""

    folder: Path
    base: dict[str, Any]
    points: list[Point]

    def write(self) -> None:
        points = [{**vars(point), "folder": point.name} for point in self.points]
        manifest = {"nlgrpo": __version__, "base": self.base, "points": points}
        atomic_write(self.folder / SWEEP_FILE, json.dumps(manifest, indent=1) + "\n")


def read_sweep_state(folder: Path) -> list[Point]:
    """Load the points of the sweep in ``folder``. Raises UserError if its sweep.json is missing or damaged."""
    return read_sweep(Path(folder)).points


def read_sweep(folder: Path) -> SweepState:
    """Load the manifest of the sweep in ``folder``; raises like `read_sweep_state`."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing; give the folder that `nlgrpo sweep` wrote")
    try:
        data = json.loads(path.read_text("utf-8"))
        points = [_point(folder, values) for values in data["points"]]
        if not points or not isinstance(data["base"], dict):
            raise UserError("it has no points or no base")
        return SweepState(folder, data["base"], points)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); choose another folder with --out") from error


def _point(folder: Path, values: Mapping[str, Any]) -> Point:
    name = values["folder"]
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
        raise UserError(f"{name!r} is not a folder name")
    point = Point(**{**values, "folder": folder / name})
    if point.state not in get_args(State) or not isinstance(point.overrides, dict):
        raise UserError(f"{name} has an invalid state {point.state!r} or invalid values {point.overrides!r}")
    texts = (point.error, point.job)
    if not isinstance(point.seconds, int | float) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{name} has invalid seconds {point.seconds!r} or an invalid error {point.error!r}")
    return point
