"""The tensors of a checkpoint on disk: safetensors files, written and read by torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from nlgrpo.errors import UserError

Digest = dict[str, Any]  # "bytes" and "sha256" of a file
FILE_BYTES = 2**26  # of tensors in a file, which DCP copies whole before it writes them


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Digest]:
    """Write the tensors, each rank its shards; collective in ``group``, or by this process alone.

    Returns the digests of what this rank has written, by file.
    """
    world = 1 if group is None else dist.get_world_size(group)
    storage = dcp.HuggingFaceStorageWriter(str(folder), _files(tensors, world), save_distributed=True)
    storage.fs = files = _HashedFiles()
    try:
        with _single_process_is_fine():
            dcp.save(_untied(tensors), storage_writer=storage, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        fault, _ = next(iter(error.failures.values()))
        raise fault from None
    return {Path(path).name: digest.value() for path, digest in files.written.items()}


class _HashedFiles(FileSystem):
    """Files whose bytes are hashed when they are written, not when they are read."""

    def __init__(self) -> None:
        self.written: dict[str, _HashedFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            self.written[str(path)] = hashed = _HashedFile(stream)
            yield cast(io.IOBase, hashed)


class _HashedFile:
    def __init__(self, stream: io.IOBase) -> None:
        self.stream = stream
        self.size = 0
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.size += len(content)
        self.sha256.update(content)
        written: int = self.stream.write(content)
        return written

    def value(self) -> Digest:
        return {"bytes": self.size, "sha256": self.sha256.hexdigest()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that have the memory of an earlier one, such as tied weights: safetensors refuses them."""
    found = {}
    seen = set()
    for name, tensor in tensors.items():
        place = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen |= {place} if tensor.numel() else set()
    return found


def _files(tensors: Mapping[str, Tensor], world: int) -> dict[str, int]:
    """Number the files of the tensors, from 1; the same on every rank."""
    files = {}
    number = 1
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // world
        if filled and filled + size > FILE_BYTES:
            number = number + 1
            filled = 0
        files[name] = number
        filled = filled + size
    return files


def stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape and dtype of each tensor of a checkpoint. Raises UserError for one of an earlier version."""
    if (folder / ".metadata").exists():
        raise UserError(
            f"{folder} was written by nlgrpo before its checkpoints were safetensors files; its index is a pickle, "
            "which is not read. Finish the run with that version, or restart it (--train.restart)."
        )
    found: dict[str, TensorStorageMetadata] = {}
    for name, entry in dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = entry
    return found


def read(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Read tensors in place, on any number of ranks, in their dtypes; collective unless ``alone``."""
    with _single_process_is_fine():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=alone)


@contextmanager
def _single_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
