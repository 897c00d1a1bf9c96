"""The models that a user names for an evaluation: runs, sweeps, checkpoints, directories and hub names, with labels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.errors import UserError
from nlgrpo.model import decoder, hf_weights, reward_model
from nlgrpo.model.tokenizer import load_tokenizer
from nlgrpo.runtime.atomic_files import into
from nlgrpo.runtime.checkpoint.model import read_model


@dataclass(frozen=True)
class NamedModel:
    """A model to evaluate. ``path``: the folder of a run, one of its checkpoints, a model directory or a hub name."""

    label: str
    path: Path
    given: str = ""
    """The label that the user gave, of the whole sweep for its runs; "" without one."""

    @property
    def run(self) -> Path | None:
        """The folder of the run that trained it; None for other models."""
        if is_run(self.path):
            return self.path
        return self.path.parents[1] if is_checkpoint(self.path) else None

    def directory(self, exports: Path) -> Path:
        """Return the model directory; a checkpoint is first exported into a folder of ``exports``.

        Runs of different sweeps can have the same name, so the folder's name has a digest of the checkpoint's manifest,
        which has the SHA-256 of its files. Raises UserError if there is no such model, and for a checkpoint that has
        adapters or is damaged.
        """
        if is_checkpoint(self.path):
            digest = hashlib.sha256((self.path / "manifest.json").read_bytes()).hexdigest()[:12]
            return export(self.path, exports / f"{self.path.parents[1].name}-{self.path.name}-{digest}")
        return hf_weights.locate(self.path / "model" if is_run(self.path) else str(self.path))


def is_run(path: Path) -> bool:
    return (path / "model" / "config.json").is_file()


def is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file() and (path / "state.json").is_file()


def named(given: Sequence[str]) -> tuple[NamedModel, ...]:
    """Read models as `read`. Raises UserError as it does, and for two models of one label."""
    found = read_named_models(given)
    labels = [model.label for model in found]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two models have the label {label!r}; set another one with LABEL=PATH")
    return tuple(found)


def read_named_models(given: Sequence[str]) -> list[NamedModel]:
    """Read ``PATH`` or ``LABEL=PATH``; a path that exists is one, whatever its name. A sweep stands for its runs.

    Without a label, a run is named by its folder, and a checkpoint by the folders of its run and its own. Raises
    UserError for a sweep without a finished run.
    """
    found: list[NamedModel] = []
    for text in given:
        label, path = split_label(text)
        if (path / sweep_state.SWEEP_FILE).is_file():
            found += _of_sweep(path, label)
        elif is_checkpoint(path):
            found.append(NamedModel(label or f"{path.resolve().parents[1].name}/{path.name}", path, label))
        else:
            found.append(NamedModel(label or path.name or text, path, label))
    return found


def split_label(text: str) -> tuple[str, Path]:
    """Split ``LABEL=PATH``; the label is "" without one. Folders of a sweep have names like ``seed=1,lr=0.001``."""
    label, equals, path = text.partition("=")
    if os.path.exists(os.path.expanduser(text)) or not (equals and label and path):
        return "", Path(os.path.expanduser(text))
    return label, Path(os.path.expanduser(path))


def _of_sweep(folder: Path, label: str) -> list[NamedModel]:
    points = sweep_state.read_sweep_state(folder)
    finished = [point for point in points if is_run(point.folder)]
    if not finished:
        raise UserError(f"{folder} is a sweep of {len(points)} runs; none has finished")
    start = f"{label}/" if label else ""
    return [NamedModel(f"{start}{point.name}", point.folder, label) for point in finished]


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint as a Hugging Face directory, unless it is there already; return the directory.

    Raises UserError for a checkpoint that is damaged or has adapters.
    """
    if (folder / "config.json").is_file():
        return folder
    source, saved = reward_model.locate(str(checkpoint))
    assert saved is not None
    model = decoder.load(source, dtype=torch.float32)
    read_model(saved, dict(model.named_parameters()))
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with into(folder.parent):
        decoder.save(model, unfinished, tokenizer=load_tokenizer(source), like=source)
        unfinished.rename(folder)
    return folder
