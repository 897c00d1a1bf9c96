"""Completions kept on disk under names that their content determines, so that none is drawn or scored twice.

What a model draws depends on its files, the sampling, the seed and the prompts. The folder of a `Store` is named by a
digest of the first three, and a file in it by one of its prompts; what is computed from a file, scores for instance,
lies beside it under a digest of what computed it. A file is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from nlgrpo.engine import Rollout
from nlgrpo.metrics import atomic_write, atomic_write_bytes

Tensors = dict[str, Tensor]


class Store:
    """Files of tensors in a folder that ``identity``, plain data, determines below ``root``."""

    def __init__(self, root: Path, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True, indent=1)
        self.digest = _short(text.encode())
        self.folder = root / self.digest
        self._writing(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        if not (self.folder / "identity.json").is_file():
            self._writing(lambda: atomic_write(self.folder / "identity.json", text + "\n"))

    def has(self, name: str) -> bool:
        """Whether there is such a file, and it is whole."""
        return self.read(name) is not None

    def read(self, name: str) -> Tensors | None:
        """None where there is no such file, or it is damaged."""
        try:
            return safetensors.torch.load(self._path(name).read_bytes())
        except (FileNotFoundError, SafetensorError):
            return None

    def write(self, name: str, tensors: Tensors) -> None:
        content = safetensors.torch.save({key: x.contiguous().cpu() for key, x in tensors.items()})
        self._writing(lambda: atomic_write_bytes(self._path(name), content))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _writing(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise ValueError(
                f"cannot write into {self.folder}: {error.strerror}. What has been kept there stays, and the same "
                "command goes on from it."
            ) from error


def chunk_name(index: Sequence[int], ids: Sequence[Sequence[int]]) -> str:
    """Of the completions of some prompts, whose numbers key the noise."""
    return f"{index[0]:06d}-{_short(json.dumps([list(index), [list(p) for p in ids]]).encode())}"


def from_rollout(rollout: Rollout) -> Tensors:
    return {
        "tokens": rollout.tokens.to(torch.int32),
        "logprobs": rollout.logprobs,
        "lengths": rollout.lengths,
        "finished": rollout.finished,
    }


def to_rollout(tensors: Tensors, prompt_ids: Sequence[Sequence[int]]) -> Rollout:
    tokens = tensors["tokens"].long()
    return Rollout([list(p) for p in prompt_ids], tokens, tensors["logprobs"], tensors["lengths"], tensors["finished"])


def digest_of(*paths: Path) -> str:
    """Of the contents of files, and of the folders' own files, with their names."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
            total.update(file.name.encode())
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()[:16]


def digest_of_function(function: Callable[..., Any], spec: str) -> str:
    """Of what a reward does: its spec, the source file of its code, and every file or folder that its arguments name.

    What the code reads elsewhere is not seen.
    """
    while isinstance(function, partial):
        function = function.func
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        source = [Path(inspect.getfile(code))]
    except TypeError:  # built in
        source = []
    found = [path for path in [*source, *_named_in(spec)] if len(str(path)) < 4096 and path.exists()]
    return _short(f"{spec} {digest_of(*dict.fromkeys(found))}".encode())


def _named_in(spec: str) -> list[Path]:
    """Texts in quotes in a spec, and what stands before its brackets, which may be a model's folder."""
    return [Path(part) for part in (spec.partition("(")[0], *spec.replace('"', "'").split("'")[1::2]) if part.strip()]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
