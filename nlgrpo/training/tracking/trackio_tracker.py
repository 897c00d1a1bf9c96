"""Trackio. TRACKIO_SPACE_ID logs to a Space, TRACKIO_SERVER_URL to a server, TRACKIO_DIR is the local database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trackio

from nlgrpo.errors import UserError
from nlgrpo.training.tracking.trackers import Memory, TrackedRun, in_trl


@dataclass
class Trackio:
    run: trackio.Run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(in_trl(metrics), step=step)

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.run.log({"completions": trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self) -> None:
        self.run.finish()


def begin(run: TrackedRun, memory: Memory) -> Trackio:
    """Start a run, or continue the one of the same folder. Records system metrics (with psutil, nvidia-ml-py).

    Trackio finds a run to continue by its name. Raises UserError if that is another run by now.
    """
    known = memory.get("trackio")
    resume = "never" if known is None else "must"
    started = trackio.init(project=run.project, name=run.name, config=dict(run.config), resume=resume, embed=False)
    if known is not None and started.id != known:
        raise UserError(
            f"another run of the project {run.project!r} has the name {run.name!r} by now, and would get the metrics; "
            "set train.run_name"
        )
    memory.set("trackio", started.id)
    return Trackio(started)
