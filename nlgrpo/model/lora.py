"""LoRA (Hu et al. 2021): a frozen model with trained low-rank updates of its linear layers.

    y = W x + b + s B A dropout(x),    s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski 2023)

A (rank, in) starts at random and B (out, rank) at 0, so the model starts unchanged, and without its adapters it is the
reference of the KL. A fused projection has an adapter for each of its parts: q, k and v are adapted as separate
matrices, as in PEFT. This module does not import the decoder; `adapters.py` reads and writes PEFT's files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlgrpo.errors import UserError
from nlgrpo.kernels import linear
from nlgrpo.model import shards
from nlgrpo.model.architectures import Shape, tensor_map
from nlgrpo.sections import ALL_LINEAR, LoraConfig

HEAD = "lm_head"  # transformers' name of the head; GPT-NeoX stores it as "embed_out"
PROJECTIONS = ("qkv", "out", "up", "down")  # linear layers of a block


# --- layers -----------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """Linear layer with frozen ``weight`` and ``bias``, and an adapter for each of its ``parts``.

    ``parts``: first row and number of rows of the weight, by the Hugging Face name of the part. Adapters are cast to
    the dtype of the input, so they may be stored in float32 beside a bfloat16 weight.
    """

    def __init__(self, base: nn.Linear, parts: Mapping[str, tuple[int, int]], config: LoraConfig, dtype: torch.dtype):
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.parts = dict(parts)
        self.scaling = config.scaling
        self.enabled = True
        self.dropout = nn.Dropout(config.dropout).eval()
        self.merged: Tensor | None = None  # set by `merged_for_sampling`
        empty = functools.partial(torch.empty, dtype=dtype, device=base.weight.device)
        self.lora_A = nn.ParameterDict({name: empty(config.rank, base.in_features) for name in parts})
        self.lora_B = nn.ParameterDict({name: empty(rows, config.rank) for name, (_, rows) in parts.items()})

    @property
    def active(self) -> Tensor | None:
        """The one weight with which the layer computes; None if it adds adapters to the product with ``weight``."""
        return self.merged if self.enabled else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.active is not None:
            return linear(x, self.active, self.bias)
        y = linear(x, self.weight, self.bias)
        dropped = self.dropout(x)
        for name, (first, rows) in self.parts.items():
            low = F.linear(dropped, self.lora_A[name].to(x.dtype))
            y[:, first : first + rows].addmm_(low, self.lora_B[name].to(x.dtype).mT, alpha=self.scaling)
        return y


class Retrained(nn.Module):
    """Embedding or head whose frozen ``weight`` stays for the reference, beside a ``trained`` copy."""

    def __init__(self, base: nn.Embedding | nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = base.weight
        self.enabled = True
        self.trained = nn.Parameter(torch.empty_like(base.weight, dtype=dtype))
        self.merged: Tensor | None = None  # set by `merged_for_sampling`

    @property
    def active(self) -> Tensor:
        if not self.enabled:
            return self.weight
        return self.trained.to(self.weight.dtype) if self.merged is None else self.merged

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.active)


Adapted = LoraLinear | Retrained


def active_weight(module: nn.Module) -> Tensor:
    """Weight with which an embedding, a head or a linear layer computes, if it is one; see `LoraLinear.active`."""
    weight = module.active if isinstance(module, Adapted) else module.weight
    assert isinstance(weight, Tensor)
    return weight


class Model(Protocol):
    """A decoder, as far as this module needs it."""

    shape: Shape

    @property
    def head(self) -> nn.Module | None: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


# --- names ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)  # the plan counts adapters for many settings
def parts_of(shape: Shape, module: str) -> Mapping[str, tuple[int, int]]:
    """First row and rows of each Hugging Face layer that the linear layer ``module`` ("blocks.0.qkv") is made of."""
    source = tensor_map(shape)[f"{module}.weight"]
    names = [name.removesuffix(".weight").rsplit(".", 1)[-1] for name in source.names]
    if len(names) == 1:
        return {names[0]: (0, -1)}
    starts = [sum(source.rows[:i]) for i in range(len(names))]
    return {name: (start, rows) for name, start, rows in zip(names, starts, source.rows, strict=True)}


def layer_names(shape: Shape) -> list[str]:
    """Hugging Face names of the linear layers of a block, which can have adapters."""
    names = [name for projection in PROJECTIONS for name in parts_of(shape, f"blocks.0.{projection}")]
    return list(dict.fromkeys(names))  # GPT-2 has two layers named c_proj


def saved_names(shape: Shape) -> dict[str, str]:
    """Our names of the embedding and of the untied head, by their Hugging Face names."""
    embedding = tensor_map(shape)["embed.weight"].names[0].removesuffix(".weight").rsplit(".", 1)[-1]
    return {embedding: "embed"} | ({} if shape.tied else {HEAD: "head"})


def check_layers(config: LoraConfig, shape: Shape) -> None:
    """Raise UserError for target modules and modules to save that a model of this shape does not have."""
    layers = layer_names(shape)
    saved = saved_names(shape)
    for name in config.target_modules:
        if name not in (ALL_LINEAR, *layers):
            raise UserError(
                f"lora.target_modules: a {shape.family} model has no linear layer {name!r}; it has "
                f"{', '.join(layers)}, or {ALL_LINEAR!r} for all of them"
            )
    for name in config.modules_to_save:
        if name not in saved:
            raise UserError(f"lora.modules_to_save: {name!r} is not one of {', '.join(saved)} of this model")
    if config.modules_to_save and shape.tied:
        raise UserError(
            "lora.modules_to_save: the embedding of this model is also its head (tie_word_embeddings), and PEFT would "
            "train only one of both; leave it empty"
        )


def targets(config: LoraConfig, shape: Shape) -> list[str]:
    """Hugging Face names of the layers with adapters."""
    layers = layer_names(shape)
    return layers if ALL_LINEAR in config.target_modules else [name for name in layers if name in config.target_modules]


def count(config: LoraConfig, shape: Shape) -> int:
    """Number of trained parameters of a model of this shape with adapters."""
    wanted = targets(config, shape)
    places = saved_names(shape)
    inputs = {"qkv": shape.width, "out": shape.heads * shape.head_dim, "up": shape.width, "down": shape.ffn}
    outputs = {
        "qkv": (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
        "out": shape.width,
        "up": shape.ffn * (2 if shape.gated else 1),
        "down": shape.width,
    }
    total = 0
    for projection in PROJECTIONS:
        for name, (_, rows) in parts_of(shape, f"blocks.0.{projection}").items():
            if name in wanted:
                total += config.rank * (inputs[projection] + (outputs[projection] if rows < 0 else rows))
    saved = sum(name in places for name in config.modules_to_save)
    return shape.layers * total + saved * shape.vocab * shape.width


# --- adapters of a model ----------------------------------------------------------------------------------------------


def attach(model: Model, config: LoraConfig, compute: torch.dtype) -> None:
    """Freeze a model and give it adapters, in place, usually while it is a blueprint.

    Frozen parameters get the dtype ``compute``, and adapters that of the parameters before. The head of a reward model
    stays trained. The adapters have no values before `adapters.init_adapters`. Raises UserError as `check_layers`.
    """
    check_layers(config, model.shape)
    if has_scalar_head(model) and HEAD in config.modules_to_save:
        raise UserError(
            f"lora.modules_to_save: a reward or value model has no {HEAD!r}; its own head is trained anyway"
        )
    assert isinstance(model, nn.Module)
    kept = {id(model.head.weight)} if model.head is not None and has_scalar_head(model) else set()
    dtype = model.get_parameter("embed.weight").dtype
    for _, parameter in model.named_parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(compute)
            parameter.requires_grad_(False)
    wanted = targets(config, model.shape)
    saved = saved_names(model.shape)
    for i in range(model.shape.layers):
        block = model.get_submodule(f"blocks.{i}")
        for projection in PROJECTIONS:
            base = block.get_submodule(projection)
            assert isinstance(base, nn.Linear)
            parts: dict[str, tuple[int, int]] = {}
            for name, (first, rows) in parts_of(model.shape, f"blocks.{i}.{projection}").items():
                if name in wanted:
                    parts[name] = (first, base.out_features if rows < 0 else rows)
            if parts:
                setattr(block, projection, LoraLinear(base, parts, config, dtype))
    for name in config.modules_to_save:
        base = model.get_submodule(saved[name])
        assert isinstance(base, nn.Embedding | nn.Linear)
        setattr(model, saved[name], Retrained(base, dtype))


def reset(model: Model, seed: int) -> None:
    """Initialise the adapters as PEFT does: entries of A from U(-1 / sqrt(in), 1 / sqrt(in)), B = 0.

    The values depend on the seed alone, not on the sharding. Trained copies get the values of their frozen weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in adapted(model):
            if isinstance(module, Retrained):
                module.trained.copy_(module.weight)
                continue
            for a, b in zip(module.lora_A.values(), module.lora_B.values(), strict=True):
                bound = 1 / math.sqrt(a.shape[1])
                noise = torch.empty(a.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
                shards.fill(a, noise)
                b.zero_()


def adapted(model: Model | nn.Module) -> list[Adapted]:
    """List the modules with an adapter or a trained copy."""
    return [module for _, module in model.named_modules() if isinstance(module, Adapted)]


def has_scalar_head(model: Model) -> bool:
    """Whether the head is that of a reward or value model, with one output."""
    return model.head is not None and len(active_weight(model.head)) == 1 and model.shape.vocab > 1


def base_parameters(model: Model | nn.Module) -> dict[str, Tensor]:
    """Parameters of the model without adapters and trained copies, by name."""
    return {name: p for name, p in model.named_parameters() if not is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter or is a trained copy."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".trained")


def is_saved(model: Model, name: str) -> bool:
    """Whether a parameter is saved with the adapter: those of `is_adapter`, and the head of a reward model."""
    return is_adapter(name) or (name == "head.weight" and has_scalar_head(model))


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes without adapters and trained copies: it is the model they started from."""
    modules = adapted(model)
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True


def adapted_bytes(model: nn.Module) -> int:
    """Bytes of the full weights that have an adapter or a trained copy: what `merged_for_sampling` allocates."""
    return sum(module.weight.numel() * module.weight.itemsize for module in adapted(model))


@contextmanager
def merged_for_sampling(model: nn.Module) -> Iterator[None]:
    """Context in which each adapted layer is one product, with a copy of its weight W + s B A in the dtype of W.

    The copies exist in the context only, in which the parameters must be full tensors (`fsdp.gathered`). Sums are
    computed in float32 and rounded once, so results differ from those with separate adapters by the rounding of W.
    """
    modules = adapted(model)
    try:
        with torch.no_grad():
            for module in modules:
                values = {name: p.detach() for name, p in module.named_parameters()}
                values["weight"] = values["weight"].clone()
                merged_values = dict(_merge(module, values))
                module.merged = merged_values["weight"].to(module.weight.dtype)
        yield
    finally:
        for module in modules:
            module.merged = None


@contextmanager
def dropout(model: nn.Module) -> Iterator[None]:
    """Context in which the adapters' dropout is on, for losses; it is off elsewhere."""
    layers = [module.dropout for module in adapted(model) if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


def merged(model: Model, parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model with its adapters merged, W + s B A, in ``dtype``, in the order of the base.

    ``parameters``: all full parameters by name, in the order of the model, each valid until the next is requested.
    Sums are computed in float32, or in float64 for a float64 parameter or ``dtype``, and rounded once, to ``dtype``.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}
    last = {f"{name}.{list(dict(module.named_parameters()))[-1]}": name for name, module in modules.items()}
    held: dict[str, Tensor] = {}
    for name, value in parameters:
        owner = next((prefix for prefix in modules if name.startswith(f"{prefix}.")), None)
        if owner is None:
            yield name, value.to(dtype)
            continue
        kept = value.dtype  # `_merge` rounds to it
        if kept != dtype:
            kept = functools.reduce(torch.promote_types, (kept, dtype, torch.float32))
        held[name.removeprefix(f"{owner}.")] = value.detach().to(kept, copy=True)
        if name in last:
            yield from ((f"{owner}.{key}", x.to(dtype)) for key, x in _merge(modules[owner], held))
            held = {}


def _merge(module: Adapted, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Merge one module into its weight, in place."""
    if isinstance(module, Retrained):
        yield "weight", values["trained"]
        return
    weight = values["weight"]
    wide = torch.promote_types(weight.dtype, torch.float32)
    for name, (first, rows) in module.parts.items():
        a = values[f"lora_A.{name}"].to(wide)
        b = values[f"lora_B.{name}"].to(wide)
        weight[first : first + rows] = weight[first : first + rows].to(wide) + module.scaling * b @ a
    yield "weight", weight
    if "bias" in values:
        yield "bias", values["bias"]
