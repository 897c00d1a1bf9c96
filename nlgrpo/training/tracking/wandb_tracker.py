"""Weights & Biases. Its environment variables apply: WANDB_MODE=offline, WANDB_ENTITY, WANDB_TAGS and others."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import wandb

from nlgrpo.errors import UserError
from nlgrpo.training.tracking.trackers import Memory, TrackedRun, in_trl

STEP = "train/global_step"  # the x axis, as in runs of TRL


@dataclass
class WandB:
    """W&B takes the steps of a run in increasing order; those that run again after a kill are the same to it."""

    run: wandb.Run
    known: int
    """Number of steps that it has already."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, in_trl(metrics))

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._log(step, {"completions": table})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self.known:
            self.run.log({**values, STEP: step}, step=step)

    def close(self) -> None:
        self.run.finish()


def begin(run: TrackedRun, memory: Memory) -> WandB:
    """Start a run, or continue the one of the same folder by its id. Also records system metrics.

    Raises UserError without an API key and without WANDB_MODE=offline; W&B itself would ask for one in the terminal.
    """
    mode = wandb.setup().settings.mode  # also from the environment and W&B's files
    if mode not in ("offline", "dryrun", "disabled") and not wandb.api.api_key:
        raise UserError("no API key; run wandb login, or set WANDB_MODE=offline")
    own = memory.get("wandb") or secrets.token_hex(4)
    memory.set("wandb", own)  # before it starts: a kill must not make two runs of one
    started = wandb.init(
        project=run.project, name=run.name, id=own, resume="allow", dir=str(memory.folder), config=dict(run.config)
    )
    started.define_metric(STEP)
    started.define_metric("*", step_metric=STEP)
    return WandB(started, known=started.step)
