"""Hugging Face model directories: locate one, read its safetensors into our tensors, and convert ours back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nlgrpo.model.architectures import Shape, Source

# Other names of the same tensor within its family: Pythia's head, GPT-2 saved without its prefix, and a tied matrix
# that is stored under the name of the head.
ALIASES: dict[str, tuple[str, ...]] = {
    "embed_out.weight": ("lm_head.weight",),
    "model.embed_tokens.weight": ("lm_head.weight",),
    "gpt_neox.embed_in.weight": ("embed_out.weight", "lm_head.weight"),
    "transformer.wte.weight": ("wte.weight", "lm_head.weight"),
}


HEADS = ("lm_head.weight", "embed_out.weight")


def locate(path_or_name: str | Path) -> Path:
    """Return the directory of a model: a local one, an embedded one (``"story-lm"``), or a download from the hub.

    Raises ValueError if there is no such directory and the hub has no such model.
    """
    path = Path(os.path.expanduser(path_or_name))
    if os.path.isfile(path / "config.json"):  # os.path, because Path's methods raise for overlong names
        if begun_from(path) is not None:
            raise ValueError(
                f"{path} is the folder of a run, not a model; a finished run has its model in {path / 'model'}"
            )
        return path
    if os.path.isdir(path):
        raise ValueError(f"{path} has no config.json, so it is not a Hugging Face model directory")
    embedded = Path(str(files("nlgrpo.data"))) / "assets" / str(path_or_name)
    if os.path.isfile(embedded / "config.json"):
        return embedded
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
    try:
        return Path(huggingface_hub.snapshot_download(str(path_or_name), allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {str(path_or_name)!r} is neither a directory, nor embedded, nor available on the Hugging Face "
            f"hub ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def begun_from(folder: Path) -> str | None:
    """Return the ``model.path`` of the run in ``folder``, or None if the folder holds no run."""
    file = folder / "config.json"
    if not os.path.isfile(file):
        return None
    try:
        path = json.loads(file.read_text("utf-8"))["model"]["path"]
    except (ValueError, KeyError, TypeError):  # a config.json of Hugging Face has no such key
        return None
    return str(path)


class Checkpoint:
    """Tensors of a directory's ``model.safetensors`` or of the shards in its index, read one at a time.

    Raises ValueError if the directory has no safetensors, or if its index or a file is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} is not an index of shards ({error!r})") from error
        elif single.is_file():
            shards = [single.name]
        else:
            raise ValueError(
                f"{folder} has no model.safetensors (nor an index of shards); only safetensors are read. Convert "
                "other formats with transformers: model.save_pretrained(folder)"
            )
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{index.name} of {folder} lists shards that do not exist: {', '.join(missing)}")
        self.files = {}
        for name in shards:
            try:
                opened = safe_open(folder / name, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{folder / name} is damaged, not a complete safetensors file: {error}") from error
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def resolve(self, name: str) -> str | None:
        """Return the name under which this checkpoint stores the tensor ``name``, or None if it does not."""
        unprefixed = name.removeprefix("transformer.")
        return next((n for n in (name, unprefixed, *ALIASES.get(name, ())) if n in self.files), None)

    def read(self, source: Source) -> Tensor:
        """Read the tensors of a `Source`, concatenated. Raises ValueError for missing and for quantised tensors."""
        parts = []
        for name in source.names:
            resolved = self.resolve(name)
            if resolved is None:
                raise ValueError(f"{self.folder} has no tensor {name!r}")
            tensor = self.get(resolved)
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                raise ValueError(
                    f"{resolved} of {self.folder} has dtype {tensor.dtype}: quantised weights are not supported. "
                    "Dequantise the model with transformers: model.dequantize(), then save_pretrained(folder)"
                )
            parts.append(tensor)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def check_embedding(self, name: str, tied: bool) -> None:
        """Check that the stored embedding ``name`` and the head agree with the config's ``tied``; else ValueError."""
        heads = [n for n in ALIASES[name] if n.endswith(HEADS) and n in self.files]
        stored = self.resolve(name)
        if stored in heads and not tied:
            raise ValueError(
                f"{self.folder} has no tensor {name!r}, and its config.json does not tie the embeddings to the head"
            )
        for head in heads:
            if tied and stored != head and not torch.equal(self.get(head), self.get(str(stored))):
                raise ValueError(
                    f"config.json of {self.folder} ties {head!r} to {name!r}, but both are stored and differ. Set "
                    "tie_word_embeddings to false in it if both are needed, or remove the wrong one"
                )

    def get(self, name: str) -> Tensor:
        """Read the tensor stored as ``name``."""
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        """Most frequent dtype of the tensors."""
        dtypes = [self.files[n].get_slice(n).get_dtype() for n in self.files]
        return {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}.get(
            max(set(dtypes), key=dtypes.count), torch.float32
        )


def _heads_together(x: Tensor, shape: Shape) -> Tensor:
    """Reorder rows from GPT-NeoX's (H, 3, d) to ours (3, H, d)."""
    return x.unflatten(0, (shape.heads, 3, shape.head_dim)).transpose(0, 1).flatten(0, 2)


def _heads_apart(x: Tensor, shape: Shape) -> Tensor:
    """Reorder rows from ours (3, H, d) to GPT-NeoX's (H, 3, d)."""
    return x.unflatten(0, (3, shape.heads, shape.head_dim)).transpose(0, 1).flatten(0, 2)


IN: dict[str, Callable[[Tensor, Shape], Tensor]] = {
    "rows": lambda x, shape: x,
    "transposed": lambda x, shape: x.T,
    "interleaved": _heads_together,
}
OUT = IN | {"interleaved": _heads_apart}


def read_into(parameters: Mapping[str, Tensor], folder: Path, shape: Shape, places: Mapping[str, Source]) -> None:
    """Fill ``parameters`` in place from the directory ``folder``; of a sharded parameter, only this rank's rows.

    Raises ValueError for a missing tensor and for one whose shape differs from the config's.
    """
    checkpoint = Checkpoint(folder)
    with torch.no_grad():
        for name, parameter in parameters.items():
            source = places[name]
            value = IN[source.layout](checkpoint.read(source), shape)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{' + '.join(source.names)} of {folder} has shape {tuple(value.shape)}, but its config.json "
                    f"requires {tuple(parameter.shape)}"
                )
            copy_rows(parameter, value)


def copy_rows(parameter: Tensor, whole: Tensor) -> None:
    """Copy a full tensor into a parameter in place; of a sharded parameter, only this rank's rows."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(_rows_of_rank(whole, parameter.device_mesh))
    else:
        parameter.copy_(whole)


def _rows_of_rank(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Rows of this rank: FSDP2 splits dimension 0 like ``torch.chunk``, so the last ranks may have none."""
    parts = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def state_for_export(parameters: Mapping[str, Tensor], shape: Shape, places: Mapping[str, Source]) -> dict[str, Tensor]:
    """Return our tensors under their Hugging Face names and in its layouts."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        source = places[name]
        value = OUT[source.layout](parameter.detach(), shape)
        rows = source.rows if len(source.names) > 1 else (len(value),)
        parts = (
            x.clone(memory_format=torch.contiguous_format) for x in value.split(rows)
        )  # a storage each, as safetensors needs
        state.update(zip(source.names, parts, strict=True))
    return state
