"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

``peft.PeftModel.from_pretrained`` loads what `save` writes, and `read` reads what PEFT wrote.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nlgrpo.errors import UserError
from nlgrpo.model import fsdp, hf_weights, lora, safetensors_writer, shards
from nlgrpo.model.architectures import Shape, Source, tensor_map
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig, LoraLinear, Model, Retrained
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NOTHING: tuple[Any, ...] = (None, False, {}, [], "")  # values of a key that is not used
PREFIX = "base_model.model."  # of PEFT's tensor names
SCORE = "score"  # transformers' name of the head of a classifier
SCORES = (SCORE, "classifier")  # modules that PEFT saves with a classifier's adapter, if the model has them
# Keys of PEFT's config that change what an adapter computes, with the values that are supported.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # the others change the base weights
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "eva_config": (None,),
    "corda_config": (None,),
    "arrow_config": (None,),
    "exclude_modules": (None, []),
}
# Keys of PEFT's config that change nothing once an adapter is trained, or that are read here.
KNOWN = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out", "inference_mode",
        "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_config",
        "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
        "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: its settings, its tensors by PEFT's names, and the model that it was trained on."""

    folder: Path
    config: LoraConfig
    tensors: dict[str, Tensor]
    base: str  # "" if the adapter does not name it
    task: str  # "CAUSAL_LM" or "SEQ_CLS"

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or a wider dtype that holds the numbers of all tensors."""
        return functools.reduce(torch.promote_types, (x.dtype for x in self.tensors.values()), torch.float32)


def is_adapter(path: str | Path) -> bool:
    """Whether ``path`` is a folder with an adapter."""
    return os.path.isfile(Path(os.path.expanduser(path)) / CONFIG)


def read_adapter(path: str | Path) -> Adapter:
    """Read an adapter that PEFT or `save` wrote.

    Raises UserError for a folder without an adapter, a damaged file, and for kinds of adapters that are not supported:
    anything but LoRA, DoRA, trained biases, ranks that differ between layers.
    """
    folder = Path(os.path.expanduser(path))
    try:
        saved = json.loads((folder / CONFIG).read_text("utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {_renamed(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        missing = CONFIG if not (folder / CONFIG).is_file() else WEIGHTS
        raise UserError(f"{folder} has no {missing}, so it is not an adapter in PEFT's format") from error
    except SafetensorError as error:
        raise UserError(atomic_files.unreadable(folder / WEIGHTS, "is not a readable adapter", error)) from error
    except (ValueError, OSError) as error:
        raise UserError(f"{folder} is not a readable adapter: {error}") from error
    for key, supported in PLAIN.items():
        if saved.get(key, supported[0]) not in supported:
            raise UserError(f"{folder / CONFIG}: {key} = {saved[key]!r} is not supported; expected {supported[0]!r}")
    unknown = [key for key, value in saved.items() if key not in PLAIN and key not in KNOWN and value not in NOTHING]
    if unknown:
        raise UserError(
            f"{folder / CONFIG}: {unknown[0]} = {saved[unknown[0]]!r} is not known and may change what the adapter "
            "computes; expected the config of a LoRA adapter of PEFT. Remove the key if it changes nothing"
        )
    try:
        config = LoraConfig(
            rank=int(saved["r"]),
            alpha=float(saved["lora_alpha"]),
            dropout=float(saved.get("lora_dropout") or 0.0),
            target_modules=tuple(dict.fromkeys(_layer(name) for name in tensors if ".lora_A." in name)),
            rslora=bool(saved.get("use_rslora")),
            modules_to_save=tuple(_renamed(n) for n in saved.get("modules_to_save") or () if n not in SCORES),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} is not the config of a LoRA adapter: {error!r}") from error
    faults = config.faults() or ["r = 0"] * (config.rank == 0)
    if faults:
        raise UserError(f"{folder / CONFIG}: {'; '.join(faults)}")
    return Adapter(folder, config, tensors, saved.get("base_model_name_or_path") or "", saved.get("task_type") or "")


def resolve(config: LoraConfig, shape: Shape) -> LoraConfig | None:
    """Return the settings of the adapters of a model, which an adapter at ``config.path`` defines; None without any.

    Raises UserError as `read`, and for layers that the model does not have.
    """
    if not config.enabled:
        return None
    settings = replace(read_adapter(config.path).config, path=config.path) if config.path else config
    lora.check_layers(settings, shape)
    return settings


def init_adapters(model: Model, config: LoraConfig, seed: int) -> None:
    """Give attached adapters their first values: those of the adapter at ``config.path``, or those of `lora.reset`.

    An adapter of a reward model has its head too. Raises UserError as `read` and `load`.
    """
    lora.reset(model, seed)
    if config.path:
        load_adapter(model, read_adapter(config.path))


def load_adapter(model: Model, adapter: Adapter) -> None:
    """Copy the tensors of an adapter into a model with adapters of the same settings, in place.

    Raises UserError for missing tensors, for tensors that the model has no place for, and for wrong shapes.
    """
    left = dict(adapter.tensors)
    for theirs, parameter, interleaved in _places(model):
        value = left.pop(theirs, None)
        if value is None:
            note = hf_weights.prefix_note(theirs, adapter.tensors) or "; it must adapt every layer of the model"
            raise UserError(f"{adapter.folder} has no tensor {theirs!r}{note}")
        if value.shape != parameter.shape:
            raise UserError(
                f"{theirs} of {adapter.folder} has shape {tuple(value.shape)}, but the model requires "
                f"{tuple(parameter.shape)}; was the adapter trained on another model?"
            )
        shards.fill(parameter, _reordered(value, (model.shape.heads, 3)) if interleaved else value)
    if left:
        raise UserError(f"{adapter.folder} has tensors that the model has no place for, such as {min(left)}")


def save(
    model: Model, folder: Path, config: LoraConfig, parameters: Iterable[tuple[str, Tensor]], *, base: str
) -> None:
    """Write the adapters of a model in PEFT's format. ``parameters``: full tensors by name; others are skipped.

    ``base``: the directory or the name of the model without them. A reward model's head is saved with its adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = {id(p): name for name, p in model.named_parameters()}
    scored = lora.has_scalar_head(model)
    places = {ours[id(p)]: (theirs, interleaved) for theirs, p, interleaved in _places(model)}
    state = {}
    for name, value in parameters:
        if name in places:
            theirs, interleaved = places[name]
            state[theirs] = _reordered(value, (3, model.shape.heads)) if interleaved else value.detach().clone()
    saved = [*config.modules_to_save, *([SCORE] if scored else [])]
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scored else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": lora.targets(config, model.shape),
        "use_rslora": config.rslora,
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": model.shape.family == "gpt2",  # its layers store the transposed weight
        "inference_mode": True,
    }
    safetensors_writer.write_file(folder / WEIGHTS, state)
    atomic_files.atomic_write(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def export(
    model: Decoder,
    run: Path,
    write: Callable[[Path, Iterator[tuple[str, Tensor]]], object],
    *,
    config: LoraConfig | None,
    compute: torch.dtype,
    ranks: Ranks,
    base: str,
) -> Path:
    """Write ``RUN/model``, and with adapters ``RUN/adapter``; collective, complete on return. Returns ``RUN/model``.

    ``write`` saves a folder from parameters in the dtype ``compute``, with adapters merged. The adapter itself keeps
    the dtype in which it was trained. ``base``: as for `save`.
    """
    folder = run / "model"

    def write_merged(parameters: Iterator[tuple[str, Tensor]]) -> None:
        write(folder, lora.merged(model, parameters, compute))

    fsdp.save_on_first(model, compute if config is None else None, ranks, folder, write_merged)
    if config is not None:
        own = partial(save, model, run / "adapter", config, base=base)
        fsdp.save_on_first(model, None, ranks, run / "adapter", own, only=lambda name: lora.is_saved(model, name))
    return folder


def _places(model: Model) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield PEFT's name, the parameter, and whether its rows are interleaved on disk, for each trained tensor."""
    places = tensor_map(model.shape)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            source = places[f"{name}.weight"]
            for part in module.parts:
                theirs = PREFIX + _named(source, part)
                yield f"{theirs}.lora_A.weight", module.lora_A[part], False
                yield f"{theirs}.lora_B.weight", module.lora_B[part], source.layout == "interleaved"
        elif isinstance(module, Retrained):
            theirs = f"{lora.HEAD}.weight" if name == "head" else places[f"{name}.weight"].names[0]
            yield PREFIX + theirs, module.trained, False
    if model.head is not None and lora.has_scalar_head(model):
        yield f"{PREFIX}{SCORE}.weight", lora.active_weight(model.head), False


def _reordered(value: Tensor, groups: tuple[int, int]) -> Tensor:
    """Reorder rows (a, b, d) to (b, a, d): GPT-NeoX stores (H, 3, d), and we (3, H, d)."""
    return value.detach().unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _renamed(name: str) -> str:
    """Rename the head of a GPT-NeoX model as transformers 5 does."""
    return name.replace("embed_out", lora.HEAD)


def _named(source: Source, part: str) -> str:
    """Full Hugging Face name of the layer ``part`` of a fused projection."""
    return next(n.removesuffix(".weight") for n in source.names if _layer(n) == part)


def _layer(name: str) -> str:
    """Name of a layer within its block: "q_proj" for "..self_attn.q_proj.weight" and "..q_proj.lora_A.weight"."""
    for suffix in (".weight", ".lora_A"):
        name = name.removesuffix(suffix)
    return name.rsplit(".", 1)[-1]
