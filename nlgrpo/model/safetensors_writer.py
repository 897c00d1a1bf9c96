"""Write safetensors files tensor by tensor, in the memory of a piece: no file and no tensor is ever copied whole.

A file is an 8-byte length (little-endian), a JSON header with the place of each tensor, and the tensors. Files are byte
for byte those of the safetensors library, and shards and index those of ``huggingface_hub.save_torch_state_dict``,
which both need all tensors in memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Layout = Mapping[str, tuple[Sequence[int], torch.dtype]]  # shape and dtype of each tensor

PIECE = 16 * 2**20  # bytes; a row that is larger is one piece
MAX_FILE = 5 * 10**9
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.tmp)?")


def write(folder: Path, layout: Layout, tensors: Iterator[tuple[str, Tensor]], *, max_file: int = MAX_FILE) -> None:
    """Write ``model.safetensors``, or shards of at most ``max_file`` bytes of tensors and their index, into ``folder``.

    ``tensors``: the tensors of ``layout`` by name, in its order, on any device. One may be a view with other dimensions
    and strides than on disk, if its elements have the same order. It is released before the next one is requested.
    Weights that the folder held before are removed first; a file appears under its name when it is complete, and the
    index when all shards are.

    Raises UserError for a dtype that safetensors does not have.
    """
    for name, (_, dtype) in layout.items():
        if dtype not in NAMES:
            raise UserError(f"{name} has dtype {dtype}, which safetensors cannot store; use one of {sorted(DTYPES)}")
    files = split(layout, max_file)
    for old in folder.iterdir():
        if WEIGHTS.fullmatch(old.name):
            old.unlink()
    for file_name, part in files.items():
        with atomic_files.replacing(folder / file_name) as file:
            _write_file(file, part, tensors)
    assert next(tensors, None) is None, "more tensors than in the layout"
    if len(files) > 1:
        places = {name: file_name for file_name, part in files.items() for name in part}
        index = {"metadata": {"total_size": sum(map(_bytes, layout.values()))}, "weight_map": places}
        atomic_files.atomic_write(folder / "model.safetensors.index.json", json.dumps(index, indent=2))


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file with all ``tensors``; it appears under its name when it is complete."""
    with atomic_files.replacing(path) as file:
        _write_file(file, {name: (x.shape, x.dtype) for name, x in tensors.items()}, iter(tensors.items()))


def split(layout: Layout, max_file: int) -> dict[str, Layout]:
    """Assign the tensors, in their order, to files of at most ``max_file`` bytes; a larger tensor has its own file."""
    parts: list[dict[str, tuple[Sequence[int], torch.dtype]]] = [{}]
    size = 0
    for name, entry in layout.items():
        if parts[-1] and size + _bytes(entry) > max_file:
            parts.append({})
            size = 0
        parts[-1][name] = entry
        size += _bytes(entry)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _write_file(file: BinaryIO, part: Layout, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write the header, and the next tensors at their places."""
    header, places = _header(part)
    file.write(header)
    for expected, (shape, dtype) in part.items():
        name, tensor = next(tensors, (None, torch.empty(0)))
        assert (name, tensor.numel(), tensor.dtype) == (expected, math.prod(shape), dtype), (name, expected)
        file.seek(len(header) + places[expected])
        _write_tensor(file, tensor.detach())
        del tensor  # else it would live until the next one is there


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    for piece in _pieces(tensor):
        file.write(piece.cpu().flatten().view(torch.uint8).numpy().data)


def _header(part: Layout) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and where each tensor begins behind it.

    Dtypes with larger elements come first, so every element is aligned; then names decide.
    """
    places = {}
    end = 0
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, entry in sorted(part.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
        places[name], end = end, end + _bytes(entry)
        described[name] = {"dtype": NAMES[entry[1]], "shape": list(entry[0]), "data_offsets": [places[name], end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Split a tensor into contiguous pieces of about `PIECE` bytes, in the order of its elements."""
    row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    if tensor.dim() > 1 and row > PIECE:
        for inner in tensor:
            yield from _pieces(inner)
    elif tensor.numel():
        for rows in tensor.split(max(1, PIECE // row)) if tensor.dim() else (tensor,):
            yield rows.contiguous()


def _bytes(entry: tuple[Sequence[int], torch.dtype]) -> int:
    shape, dtype = entry
    return math.prod(shape) * dtype.itemsize
