"""Load the newest complete checkpoint, on any number of ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nlgrpo.errors import UserError
from nlgrpo.runtime.checkpoint import folders, tensors
from nlgrpo.runtime.checkpoint.group import Group
from nlgrpo.runtime.seeding import set_random_state

log = logging.getLogger("nlgrpo")


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the newest complete checkpoint into ``model``, ``optimizer`` and the random generators. Every rank calls it.

    Returns the saved state, or None if the folder has no checkpoint. The number of ranks may differ from that of the
    save; ranks without saved random generators keep their own. Gradients are dropped. Raises UserError if all
    checkpoints are damaged, and if the newest complete one does not fit; the model is then unchanged.
    """
    path = newest(folder)
    group = Group.all()
    if path is None:
        return None
    saved = json.loads((path / "state.json").read_text("utf-8"))
    only = saved.get("trained_only", False)
    tensors.restore(path, model, optimizer, saved["param_groups"], trained_only=only, alone=group.world == 1)
    _restore_random_state(path, group.rank)
    state: dict[str, Any] = saved["state"]
    return state


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None without any; damaged ones are logged. Every rank calls it.

    Raises UserError if all are damaged.
    """
    folder = Path(folder)
    group = Group.all()
    first = group.rank == 0
    if first and folder.is_dir():
        folders.tidy(folder)
    paths = [folders.named(folder, step) for step in group.gather(folders.steps(folder) if first else [])[0]]
    damages = []
    for path in reversed(paths):  # each rank hashes its share of the files
        damage = next(filter(None, group.gather(folders.verify(path, group.rank, group.world))), None)
        if damage is None:
            return path
        damages.append(damage)
        if first:
            log.warning("Checkpoint %s is damaged and skipped: %s", path.name, damage)
    if damages:
        raise UserError(
            f"All checkpoints in {folder} are damaged:\n  " + "\n  ".join(damages) + "\n"
            "  To start again, remove the folder or choose another one."
        )
    return None


def _restore_random_state(path: Path, rank: int) -> None:
    file = path / f"rng-{rank:05d}.json"
    if file.exists():
        set_random_state(json.loads(file.read_text("utf-8")))
    else:
        log.warning("%s was saved by fewer ranks; rank %d keeps its own random generators.", path.name, rank)
