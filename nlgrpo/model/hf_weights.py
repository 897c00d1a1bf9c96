"""Hugging Face model directories: locate one, read its safetensors into our tensors, and write ours back."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from nlgrpo.errors import UserError
from nlgrpo.model import shards
from nlgrpo.model.architectures import Shape, Source, keys_of_transformers_4
from nlgrpo.runtime import atomic_files

# Other names of the same tensor within its family: Pythia's head, GPT-2 saved without its prefix, and a tied matrix
# that is stored under the name of the head.
ALIASES: dict[str, tuple[str, ...]] = {
    "embed_out.weight": ("lm_head.weight",),
    "model.embed_tokens.weight": ("lm_head.weight",),
    "gpt_neox.embed_in.weight": ("embed_out.weight", "lm_head.weight"),
    "transformer.wte.weight": ("wte.weight", "lm_head.weight"),
}


HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDED = {
    "maze-lm": "scripts/make_maze_model.py",
    "numbers-lm": "scripts/make_numbers_model.py",
    "story-lm": "scripts/make_story_model.py STORIES.txt",
}
"""Models of the package, and the script that makes each."""
# How to sample: for transformers and vLLM, and what nlgrpo knows beyond that (`engine.as_trained`).
SAMPLING_FILES = ("generation_config.json", "nlgrpo.json")

# Stored buffers that the model computes itself: rotary frequencies, and causal masks of GPT-2 and GPT-NeoX.
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)(attn|attention)\.(masked_)?bias$")
# Tensors of quantised weights: GPTQ and AWQ, compressed-tensors and FP8, bitsandbytes.
QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale(_inv)?|absmax|quant_map|SCB)$")
VALUE_HEAD = "v_head."  # of TRL's models with a value head
# What puts a prefix in front of all names of a model that it wraps.
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module.": "FSDP",
    "base_model.model.": "PEFT",
}

log = logging.getLogger("nlgrpo")


def locate(path_or_name: str | Path, *, config_only: bool = False) -> Path:
    """Return the directory of a model: a local one, an embedded one (``"story-lm"``), or a download from the hub.

    ``config_only``: download only the config.json of a hub model. Raises UserError if there is no such directory and
    the hub has no such model.
    """
    path = Path(os.path.expanduser(path_or_name))
    if os.path.isfile(path / "config.json"):  # os.path, because Path's methods raise for overlong names
        if begun_from(path) is not None:
            raise UserError(
                f"{path} is the folder of a run, not a model; a finished run has its model in {path / 'model'}"
            )
        return path
    if os.path.isfile(path / "adapter_config.json"):
        raise UserError(
            f"{path} is an adapter, not a model: `nlgrpo merge {path} --out FOLDER` makes a model of it, and a run of "
            f"nlgrpo has one in {path.parent / 'model'}; lora.path continues it"
        )
    if os.path.isdir(path):
        raise UserError(f"{path} has no config.json, so it is not a Hugging Face model directory")
    if str(path_or_name) in EMBEDDED:
        return _embedded(str(path_or_name), config_only)
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
    if config_only:
        wanted = ["config.json"]
    try:
        return Path(huggingface_hub.snapshot_download(str(path_or_name), allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model {str(path_or_name)!r} is neither a directory, nor embedded, nor available on the Hugging Face "
            f"hub ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def _embedded(name: str, config_only: bool) -> Path:
    """Return the directory of a model of the package. Raises UserError if the package came without its files."""
    folder = Path(str(files("nlgrpo.data"))) / "assets" / name
    needed = ["config.json"] if config_only else ["config.json", "model.safetensors", "tokenizer.json"]
    missing = [file for file in needed if not os.path.isfile(folder / file)]
    if missing:
        raise UserError(
            f"the model {name!r} of this package is incomplete: {', '.join(missing)} missing in {folder}. Install "
            f"nlgrpo again, or make the model in a clone of nlgrpo: python {EMBEDDED[name]} --out {folder.parent}"
        )
    return folder


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


def write_config(config: PretrainedConfig, folder: Path) -> None:
    """Write config.json, also with the keys that transformers 4 reads (`architectures.keys_of_transformers_4`)."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text("utf-8")) | keys_of_transformers_4(config)
    atomic_files.atomic_write(path, json.dumps(written, indent=2, sort_keys=True) + "\n")


class Checkpoint:
    """Tensors of a directory's ``model.safetensors`` or of the shards in its index, read one at a time.

    Raises UserError if the directory has no safetensors, or if its index or a file is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index} is not an index of shards ({error!r})") from error
        elif single.is_file():
            shards = [single.name]
        else:
            raise UserError(
                f"{folder} has no model.safetensors (nor an index of shards); only safetensors are read. Convert "
                "other formats with transformers: model.save_pretrained(folder)"
            )
        if single.is_file() and single.name not in shards:
            raise UserError(
                f"{folder} has two models, {single.name} and the shards of {index.name}: transformers reads "
                "the former. Remove the one that is not meant"
            )
        outside = [name for name in shards if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise UserError(f"{index.name} of {folder} lists shards outside of the folder: {outside}")
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{index.name} of {folder} lists shards that do not exist: {', '.join(missing)}")
        self.files = {}
        for name in shards:
            try:
                opened = safe_open(folder / name, framework="pt")
            except SafetensorError as error:
                fault = "is damaged, not a complete safetensors file"
                raise UserError(atomic_files.unreadable(folder / name, fault, error)) from error
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def resolve(self, name: str) -> str | None:
        """Return the name under which this checkpoint stores the tensor ``name``, or None if it does not."""
        unprefixed = name.removeprefix("transformer.")
        return next((n for n in (name, unprefixed, *ALIASES.get(name, ())) if n in self.files), None)

    def names_of(self, source: Source) -> list[str]:
        """Return the names under which the tensors of a `Source` are stored. Raises UserError for a missing one."""
        found = []
        for name in source.names:
            resolved = self.resolve(name)
            if resolved is None:
                raise UserError(self._without(name))
            found.append(resolved)
        return found

    def _without(self, name: str) -> str:
        """Return the message for a missing tensor: the likely reason, if the names of the others show it."""
        said = f"{self.folder} has no tensor {name!r}"
        quantised = next(filter(QUANTISED.search, self.files), None)
        if quantised is not None:
            return _quantised(self.folder, f"it has {quantised!r} in place of {name!r}")
        return said + prefix_note(name, self.files)

    def check_tensors(self, sources: Iterable[Source], unused: Sequence[str]) -> None:
        """Check that the model has a place for each stored tensor.

        ``sources``: those of the model's parameters. ``unused``: names of tensors that it may leave out. Buffers that
        it computes itself are left out too, and a value head of TRL, which is logged.

        Raises UserError for missing tensors, and for others, such as biases or layers that config.json does not name:
        without them the model would compute something else.
        """
        used = {name for source in sources for name in self.names_of(source)}
        left = [name for name in self.files if name not in used and name not in unused and not BUFFERS.search(name)]
        quantised = next(filter(QUANTISED.search, left), None)
        if quantised is not None:
            raise UserError(_quantised(self.folder, f"it has {quantised!r}"))
        heads = sorted(name for name in left if name.startswith(VALUE_HEAD))
        if heads:
            log.warning("%s: the value head (%s) is not used by a language model", self.folder, ", ".join(heads))
        others = sorted(set(left) - set(heads))
        if others:
            raise UserError(_without_place(self.folder, others))

    def find(self, source: Source) -> list[Any]:
        """Return the tensors of a `Source` as slices of their files, which read nothing until they are indexed.

        Raises UserError for missing and for quantised tensors.
        """
        parts = []
        for resolved in self.names_of(source):
            part = self.slice(resolved)
            dtype = part[:1].dtype if part.get_shape() else torch.float32  # a scalar is refused for its shape
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise UserError(_quantised(self.folder, f"{resolved} has dtype {dtype}"))
            parts.append(part)
        return parts

    def check_embedding(self, name: str, tied: bool) -> None:
        """Check that the stored embedding ``name`` and the head agree with the config's ``tied``; else UserError."""
        heads = [n for n in ALIASES[name] if n.endswith(HEADS) and n in self.files]
        stored = self.resolve(name)
        if stored in heads and not tied:
            raise UserError(
                f"{self.folder} has no tensor {name!r}, and its config.json does not tie the embeddings to the head"
            )
        for head in heads:
            if tied and stored != head and not _equal(self.slice(head), self.slice(str(stored))):
                raise UserError(
                    f"config.json of {self.folder} ties {head!r} to {name!r}, but both are stored and differ. Set "
                    "tie_word_embeddings to false in it if both are needed, or remove the wrong one"
                )

    def slice(self, name: str) -> Any:
        """Return the tensor stored as ``name`` as a slice of its file."""
        return self.files[name].get_slice(name)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtype of each tensor; float32 for those that are not floating-point numbers."""
        names = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
        return [names.get(self.slice(name).get_dtype(), torch.float32) for name in self.files]

    @property
    def dtype(self) -> torch.dtype:
        """Most frequent dtype of the tensors."""
        dtypes = self.dtypes
        return max(set(dtypes), key=dtypes.count)

    @property
    def widest(self) -> torch.dtype:
        """Smallest dtype that holds the numbers of all tensors."""
        return functools.reduce(torch.promote_types, self.dtypes)


def prefix_note(name: str, stored: Collection[str]) -> str:
    """Return a note if ``name`` is ``stored`` without its prefix, or behind another, as wrappers save it; else ""."""
    bare = next((other for other in stored if name.endswith(f".{other}")), None)
    if bare is not None:
        return (
            f". It has {bare!r}, without the prefix {name.removesuffix(bare)!r}: the model was saved without its head "
            "(AutoModel) or renamed. Save the whole model (AutoModelForCausalLM), or add the prefix to the names"
        )
    found = next((other for other in stored if other.endswith(f".{name}")), None)
    if found is None:
        return ""
    prefix = found.removesuffix(name)
    makers = [maker for part, maker in WRAPPERS.items() if part in prefix]
    by = f", which {' and '.join(makers)} adds" if makers else ""
    return (
        f". Its tensors have the prefix {prefix!r}{by}: save the model that is wrapped, not the wrapper, or remove the "
        "prefix from the names"
    )


def check_unexpected(folder: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Check the tensors ``names`` of ``folder`` that transformers did not load into ``model``.

    Raises UserError for tensors of modules that the model has, such as biases and further layers: without them it
    would compute something else. Others, such as a tower for images, are logged, except for `BUFFERS`.
    """
    modules = {name for name, _ in model.named_modules()}
    inside = list[str]()
    outside = list[str]()
    for name in sorted(name for name in names if not BUFFERS.search(name)):
        layers = re.match(r"(.+?)\.\d+\.", name)
        owned = name.rpartition(".")[0] in modules or (layers is not None and layers[1] in modules)
        if owned:
            inside.append(name)
        else:
            outside.append(name)
    if inside:
        raise UserError(_without_place(folder, inside))
    if outside:
        log.warning("%s: the model does not use its tensors %s", folder, _listed(outside))


def _without_place(folder: Path, names: Sequence[str]) -> str:
    return (
        f"{folder} has tensors that the model of its config.json has no place for: {_listed(names)}. Without them it "
        "would compute something else; correct config.json (the number of layers, attention_bias, mlp_bias, ..), or "
        "remove the tensors"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", .. ({len(names)} in all)" if len(names) > 4 else "")


def _quantised(folder: Path, why: str) -> str:
    return (
        f"{folder} is quantised: {why}. Quantised weights are not supported; use the model that it was made from, or "
        "dequantise it with transformers: model.dequantize(), then save_pretrained(folder)"
    )


def _equal(a: Any, b: Any, rows: int = 1024) -> bool:
    """Whether two stored tensors are equal, read ``rows`` rows at a time."""
    if a.get_shape() != b.get_shape():
        return False
    return all(torch.equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.get_shape()[0], rows))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_into(
    parameters: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    shape: Shape,
    places: Mapping[str, Source],
    *,
    unused: Sequence[str] = (),
) -> None:
    """Fill ``parameters`` in place from a model directory; of a sharded parameter, only this rank's rows.

    No other rows are read. Raises UserError as `Checkpoint.check_tensors`, and for a tensor whose shape differs from
    the config's.
    """
    folder = checkpoint.folder
    checkpoint.check_tensors([places[name] for name in parameters], unused)
    with torch.no_grad():
        for name, parameter in parameters.items():
            source = places[name]
            parts = checkpoint.find(source)
            found = _joined_shape([tuple(part.get_shape()) for part in parts], source.layout)
            if found != tuple(parameter.shape):
                raise UserError(
                    f"{' + '.join(source.names)} of {folder} has shape {found}, but its config.json "
                    f"requires {tuple(parameter.shape)}"
                )
            _read_rows(parts, source.layout, shape, shards.rows(parameter), shards.local(parameter))


def _joined_shape(found: list[tuple[int, ...]], layout: str) -> tuple[Any, ...]:
    """Return the shape of our tensor from its stored parts; their shapes as they are if they do not fit together."""
    if len(found) == 1:
        return found[0][::-1] if layout == "transposed" else found[0]
    if () in found or len({size[1:] for size in found}) > 1:
        return tuple(found)
    return sum(size[0] for size in found), *found[0][1:]


def _read_rows(parts: list[Any], layout: str, shape: Shape, rows: slice, out: Tensor) -> None:
    """Read our ``rows`` of a tensor from its stored ``parts`` into ``out``."""
    if layout == "transposed":
        if rows.start < rows.stop:
            out.copy_(parts[0][:, rows].T)
        return
    begin = end = 0  # in our rows
    for part, first, count in _stretches(parts, layout, shape):
        begin = end
        end = end + count
        low = max(begin, rows.start)
        high = min(end, rows.stop)
        if low < high:
            stored = slice(first + low - begin, first + high - begin)
            out[low - rows.start : high - rows.start].copy_(part[stored])


def _stretches(parts: list[Any], layout: str, shape: Shape) -> Iterator[tuple[Any, int, int]]:
    """Yield where our rows are stored, in their order: part, first row there, number of rows."""
    if layout == "interleaved":  # (H, 3, d) there, (3, H, d) here
        for kind, head in itertools.product(range(3), range(shape.heads)):
            yield parts[0], (3 * head + kind) * shape.head_dim, shape.head_dim
    else:
        for part in parts:
            yield part, 0, part.get_shape()[0]


# --- writing ----------------------------------------------------------------------------------------------------------


def layout(
    like: Mapping[str, Tensor], shape: Shape, places: Mapping[str, Source]
) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Shape and dtype of each stored tensor, for our tensors ``like``, which may be on the meta device."""
    found: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for ours, tensor in like.items():
        for name, size, _ in as_stored(tensor, places[ours], shape):
            found[name] = (size, tensor.dtype)
    return found


def all_stored(
    parameters: Iterable[tuple[str, Tensor]], shape: Shape, places: Mapping[str, Source]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of our ``parameters``, as views; each is released before the next is requested."""
    for name, parameter in parameters:
        for stored, _, view in as_stored(parameter, places[name], shape):
            yield stored, view
        del parameter, view  # else they would live until the next parameter is there


def as_stored(parameter: Tensor, source: Source, shape: Shape) -> list[tuple[str, Sequence[int], Tensor]]:
    """Return the stored tensors of one of ours: name, shape, and a view with the same elements in the same order.

    A view can have more dimensions than the shape, because reshaping it would copy it.
    """
    ours = parameter.detach()
    if source.layout == "interleaved":  # (3, H, d) here, (H, 3, d) there
        heads = ours.unflatten(0, (3, shape.heads, shape.head_dim)).transpose(0, 1)
        return [(source.names[0], ours.shape, heads)]
    whole = ours.T if source.layout == "transposed" else ours
    rows = source.rows if len(source.names) > 1 else (len(whole),)
    return [(name, part.shape, part) for name, part in zip(source.names, whole.split(rows), strict=True)]
