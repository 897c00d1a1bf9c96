"""The command ``nlgrpo value``: fit a value model to rollouts (``train``) or a sum of value models (``compress``)."""

from __future__ import annotations

from collections.abc import Sequence

from nlgrpo.apps.guided.value_config import from_arguments
from nlgrpo.apps.guided.value_training import build_value_trainer
from nlgrpo.training import scalar_heads, trainer


def main(arguments: Sequence[str]) -> int:
    """``value train ...``, ``value compress ...``; see `scalar_heads.command`."""

    def launch(rest: Sequence[str], dry_run: bool, *, compress: bool) -> None:
        cfg = from_arguments(rest, compress=compress)
        trainer.launch(cfg, build_value_trainer, limits=cfg.train.limits(), dry_run=dry_run)

    modes = {
        "train": lambda rest, dry_run: launch(rest, dry_run, compress=False),
        "compress": lambda rest, dry_run: launch(rest, dry_run, compress=True),
    }
    return scalar_heads.command(arguments, "value", modes)
