"""Comet. COMET_API_KEY logs to its server; COMET_MODE=offline writes archives into the folder ``comet`` of the run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # read at import: Comet would change PyTorch and others

import comet_ml

from nlgrpo.config.comparing import flat
from nlgrpo.errors import UserError
from nlgrpo.training.tracking.trackers import Memory, TrackedRun, in_trl


@dataclass
class Comet:
    experiment: comet_ml.CometExperiment

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.experiment.log_metrics(in_trl(metrics), step=step)

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = [list(row) for row in rows]
        if self.experiment.log_table(f"completions-{step}.csv", table, headers=list(columns)) is None:
            raise RuntimeError("Comet did not take the table of completions")  # it prints why

    def close(self) -> None:
        self.experiment.end()


def begin(run: TrackedRun, memory: Memory) -> Comet:
    """Start an experiment, or continue the one of the same folder by its key. Also records system metrics.

    Raises UserError without an API key and without COMET_MODE=offline; Comet itself would ask for one in the terminal.
    """
    offline = os.environ.get("COMET_MODE", "").lower() == "offline"
    if not offline and not comet_ml.get_config("comet.api_key"):
        raise UserError("no API key; set COMET_API_KEY, run comet login, or set COMET_MODE=offline")
    known = memory.get("comet")
    own = known or secrets.token_hex(16)
    memory.set("comet", own)  # before it starts: a kill must not make two experiments of one
    settings = comet_ml.ExperimentConfig(
        name=run.name,
        offline_directory=str(memory.folder / "comet"),
        display_summary_level=0,
        auto_output_logging=False,  # type: ignore[arg-type]  # documented, as "off"
        log_code=False,
        log_git_metadata=False,
        log_git_patch=False,
        parse_args=False,
    )
    mode = "create" if known is None else "get_or_create"
    if offline and known is not None:
        mode = "get"  # there is no server to ask
    started = comet_ml.start(
        project_name=run.project, experiment_key=own, online=not offline, mode=mode, experiment_config=settings
    )
    if known is None:
        started.log_parameters({key: str(value) for key, value in flat(run.config).items()})
    return Comet(started)
