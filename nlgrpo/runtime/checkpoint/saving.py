"""Save checkpoints: take a snapshot of the run, and write it, here or in a thread."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nlgrpo.errors import UserError
from nlgrpo.runtime.checkpoint import folders, storage, tensors
from nlgrpo.runtime.checkpoint.folders import Digest, Keep
from nlgrpo.runtime.checkpoint.group import Group
from nlgrpo.runtime.checkpoint.tensors import Tensors
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.seeding import random_state
from nlgrpo.runtime.supervision.threads import in_thread

NEWEST = Keep()


def save(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: Keep = NEWEST,
    trained_only: bool = False,
) -> Path:
    """Save checkpoint ``step`` and return its path. Every rank calls it.

    ``state``: JSON values with string keys, the same on every rank (rank 0 writes). A checkpoint of this step is
    replaced. Then those up to this step that ``keep`` does not name are deleted; later ones may be damaged, and stay.

    What was written is read again from the disk and compared. Model, optimizer and random generators do not change.
    Raises UserError on every rank if one of them cannot write; earlier checkpoints are then unchanged.
    """
    snapshot = Snapshot.of(step, model, optimizer, state, trained_only=trained_only)
    return write(Path(folder), snapshot, keep, Group.all())


class Saver:
    """Saves the checkpoints of a run, like `save`. Every rank has one, and calls its methods at the same steps.

    With ``background``, `save` copies the tensors to the memory of the host (pinned, beside a GPU), and a thread writes
    them while training continues. At most one checkpoint is being written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: Keep = NEWEST,
        trained_only: bool = False,
        background: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.trained_only = trained_only
        self.background = background
        self._group = Group.all(own=background)
        self._writing: Future[Path] | None = None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, wait: bool = True
    ) -> None:
        """Save checkpoint ``step``. Unless ``wait``, a saver with ``background`` returns when the tensors are copied.

        Raises the UserError of this checkpoint or, on all ranks, that of the one before.
        """
        self.wait()
        snapshot = Snapshot.of(step, model, optimizer, state, trained_only=self.trained_only)
        if wait or not self.background:
            write(self.folder, snapshot, self.keep, self._group)
            return
        snapshot.tensors = _on_host(snapshot.tensors)
        self._writing = in_thread(lambda: write(self.folder, snapshot, self.keep, self._group), "nlgrpo-checkpoint")

    def poll(self, ranks: Ranks) -> None:
        """Raise UserError if the checkpoint that is being written has failed; collective while one is."""
        if self._writing is not None and ranks.any(self._writing.done()):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises UserError on every rank if one could not write."""
        if self._writing is not None:
            writing = self._writing
            self._writing = None
            writing.result()


@dataclass
class Snapshot:
    """What a checkpoint holds. The tensors are those of the model until they are copied."""

    step: int
    tensors: Tensors
    state: str
    random: str

    @classmethod
    def of(
        cls, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, trained_only: bool
    ) -> Snapshot:
        if step < 0:
            raise UserError(f"save(step={step}): step must be 0 or more.")
        groups = tensors.param_groups(model, optimizer)
        return cls(
            step,
            tensors.of_training(model, optimizer, trained_only),
            _to_json({"state": state, "param_groups": groups, "trained_only": trained_only}),
            _to_json(random_state()),
        )


def _on_host(tensors: Tensors) -> Tensors:
    """Copy tensors to the memory of the host. Beside a GPU it is pinned until the copies are freed."""
    cuda = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
    )
    # A stager for each save: that of torch 2.11 is closed by its first `stage`, and later ones keep the copies.
    with closing(DefaultStager(options)) as stager:
        return cast(Tensors, stager.stage(tensors))


def write(folder: Path, snapshot: Snapshot, keep: Keep, group: Group) -> Path:
    """Write a snapshot; collective. Raises UserError on every rank if one of them cannot write."""
    target = folders.named(folder, snapshot.step)
    partial = folder / f".{target.name}.partial"
    first = group.rank == 0
    try:
        group.on_all(folder, lambda: folders.begin(partial) if first else None)
        own = {}
        group.on_all(folder, lambda: own.update(storage.write(partial, snapshot.tensors, group.process_group)))
        group.on_all(folder, lambda: own.update(_write_state(partial, snapshot, group.rank)))
        checked = group.on_all(folder, lambda: folders.check(partial, own))
        files = {name: digest for part in checked for name, digest in part.items()}
        group.on_all(folder, lambda: folders.finish(partial, target, group.world, files, keep) if first else None)
    except ValueError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # frees its space on a full disk
        raise
    return target


def _write_state(partial: Path, snapshot: Snapshot, rank: int) -> dict[str, Digest]:
    texts = {f"rng-{rank:05d}.json": snapshot.random} | ({"state.json": snapshot.state} if rank == 0 else {})
    return {name: folders.write(partial / name, text) for name, text in texts.items()}


def _to_json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value)
    except TypeError as error:
        raise UserError(
            f"The state of a checkpoint may contain strings, numbers, lists and dicts with string keys: {error}."
        ) from error
