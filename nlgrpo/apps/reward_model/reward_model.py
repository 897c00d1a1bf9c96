"""The command ``nlgrpo reward-model train``: train a reward model on preference pairs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nlgrpo.apps.reward_model.config import from_arguments
from nlgrpo.apps.reward_model.training import build_reward_model_trainer
from nlgrpo.training import scalar_heads, trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """``reward-model train ...``; see `scalar_heads.command`."""
    return scalar_heads.command(sys.argv[1:] if arguments is None else arguments, "reward-model", {"train": _train})


def _train(arguments: Sequence[str], dry_run: bool) -> None:
    cfg = from_arguments(arguments)
    trainer.launch(cfg, build_reward_model_trainer, limits=cfg.train.limits(), dry_run=dry_run)
