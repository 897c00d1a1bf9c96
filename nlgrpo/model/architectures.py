"""Differences between the supported model families: the shape that a config defines, and the tensor names on disk."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nlgrpo.errors import UserError

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


ROPES = ("default", "linear", "yarn", "llama3")
SLIDING = "sliding_attention"
MOST_LAYERS = 10_000  # a damaged number must not allocate memory
# Keys of a config that change what other models compute, with the values that change nothing. The decoder does not have
# them, and transformers ignores most of them in the supported families, without a word.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleave": (None, False),
    "rope_interleaved": (None, False),
    "scale_depth": (None,),
    "scale_emb": (None, 1),
    "use_bidirectional_attention": (None, False),
}
OTHER_TASKS = re.compile(r"For\w*(Classification|Answering|Choice|Prediction|MaskedLM)|Reward")  # of `architectures`


@dataclass(frozen=True)
class Shape:
    """Architecture of a decoder. The defaults are those of Llama."""

    family: str
    vocab: int  # V
    width: int  # D
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int  # maximum sequence length
    eps: float = 1e-5
    norm: str = "rms"  # "rms" | "layer" (with bias)
    activation: str = "silu"
    gated: bool = True  # down(act(gate x) * up x), else down(act(up x))
    parallel: bool = False  # x + attention(norm1 x) + mlp(norm2 x)
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    rotary_dim: int = 0  # number of leading head dimensions that are rotated; 0: learned positions
    windows: tuple[int | None, ...] = ()  # per layer: number of keys that a query sees, its own included; None: all
    scales: tuple[float, ...] = ()  # per layer: factor of q k^T

    @property
    def matrices(self) -> int:
        """Number of parameters in the weight matrices of the blocks."""
        heads = self.heads + 2 * self.kv_heads
        up = self.ffn * (2 if self.gated else 1)
        return self.layers * self.width * ((heads + self.heads) * self.head_dim + up + self.ffn)

    @property
    def parameters(self) -> int:
        """Number of parameters of a decoder of this shape."""
        norms = 2 if self.norm == "layer" else 1
        heads = self.heads + 2 * self.kv_heads
        up = self.ffn * (2 if self.gated else 1)
        biases = heads * self.head_dim * self.qkv_bias + self.width * self.out_bias + (up + self.width) * self.mlp_bias
        block = biases + 2 * norms * self.width + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab * self.width * (1 if self.tied else 2)
        positions = self.context * self.width if self.rotary_dim == 0 else 0
        return self.matrices + self.layers * block + embeddings + positions + norms * self.width


class UnknownModel(UserError):
    """An architecture, activation or rotary embedding that the decoder does not support."""


def read_config(folder: Path) -> PretrainedConfig:
    """Read the config of a model directory.

    Raises UserError if transformers cannot read it; the message lists the supported architectures.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many types
        known = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"cannot read {folder / 'config.json'}: {error}\n  nlgrpo's decoder supports: {known}"
        ) from error


def shape_of(config: Any) -> Shape:
    """Return the ``Shape`` of a Hugging Face config.

    Raises UnknownModel for an unsupported architecture, activation or rotary embedding (the message lists the supported
    ones), and UserError for inconsistent numbers, quantised weights, and keys of other models that change what they
    compute.
    """
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownModel(f"unknown architecture {config.model_type!r}; nlgrpo's decoder supports: {known}")
    _check_keys(config)
    try:
        if not 0 < config.num_hidden_layers <= MOST_LAYERS:
            raise _invalid(config, f"{config.num_hidden_layers} layers")
        shape = FAMILIES[config.model_type](config)
        sizes = (shape.vocab, shape.width, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.context)
        sound = 0 < min(sizes) <= max(sizes) < 2**31
    except (TypeError, ZeroDivisionError, AttributeError) as error:
        raise _invalid(config, error) from error
    if not sound or shape.heads % shape.kv_heads or shape.rotary_dim % 2:
        raise _invalid(
            config,
            f"vocabulary {shape.vocab}, width {shape.width}, {shape.heads} heads of dimension {shape.head_dim}, "
            f"{shape.kv_heads} key-value heads, feed-forward {shape.ffn}, context {shape.context}",
        )
    if shape.activation not in ACTIVATIONS:
        raise UnknownModel(f"unknown activation {shape.activation!r}; supported: {', '.join(ACTIVATIONS)}")
    if shape.rotary_dim and (kind := config.rope_parameters.get("rope_type", "default")) not in ROPES:
        raise UnknownModel(f"unknown rotary embedding {kind!r}; supported: {', '.join(ROPES)}")
    if any(window is not None and window < 1 for window in shape.windows):
        raise _invalid(config, f"sliding_window {config.sliding_window}")
    _check_rotary(config, shape)
    return shape


def check_causal(config: Any) -> None:
    """Raise UserError if the config is that of a classifier or of another model without a head for the next token."""
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"config.json{_of(config)} has architectures = {names!r}; expected a list of class names")
    if names and all(OTHER_TASKS.search(name) for name in names):
        raise UserError(
            f"config.json{_of(config)} is that of a {names[0]}, which predicts no next token; expected a causal "
            "language model (architectures: ..ForCausalLM). A classifier can be a reward, classifier(path=..), or the "
            "model of `nlgrpo reward-model train`"
        )


def _check_keys(config: Any) -> None:
    """Raise UserError for quantised weights, and for keys of other models that change what they compute."""
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UserError(
            f"config.json{_of(config)} has a quantization_config ({method or quantised}): the weights are quantised, "
            "which is not supported. Use the model that it was made from, or dequantise it with transformers: "
            "model.dequantize(), then save_pretrained(folder)"
        )
    keys = dict(UNSUPPORTED)
    if config.model_type in ("llama", "gpt_neox", "gpt2"):
        keys["sliding_window"] = (None,)
        keys["layer_types"] = (None, ["full_attention"] * len(getattr(config, "layer_types", None) or []))
    values = {key: getattr(config, key, None) for key in keys}
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "gpt_neox" and rope.get("rope_type", "default") == "default":
        values["partial_rotary_factor"] = rope.get("partial_rotary_factor")
    for key, neutral in keys.items():
        value = values[key]
        if value not in neutral:
            raise UserError(
                f"config.json{_of(config)} sets {key} = {value!r}, which nlgrpo's {config.model_type!r} models do not "
                "have: they would compute something else. Remove the key if the model was trained without it"
            )


def _of(config: Any) -> str:
    return f" of {config.name_or_path}" if config.name_or_path else ""


def _invalid(config: Any, why: object) -> UserError:
    return UserError(f"config.json{_of(config)} is not a valid {config.model_type!r} config: {why}")


def _check_rotary(config: Any, shape: Shape) -> None:
    try:
        with torch.device("cpu"):  # the caller may be building a model on the meta device
            frequencies, _ = rotary_frequencies(config, shape)
    except (TypeError, KeyError, ZeroDivisionError) as error:
        raise _invalid(config, f"rope_parameters, {error}") from error
    if frequencies is not None and not (frequencies.isfinite().all() and 2 * len(frequencies) == shape.rotary_dim):
        raise _invalid(
            config,
            f"rope_parameters {config.rope_parameters} give {len(frequencies)} frequencies "
            f"{frequencies.tolist()[:2]}, ..; expected {shape.rotary_dim // 2}, finite",
        )


def _llama_like(config: Any, **differences: Any) -> Shape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers
    choices = {
        "family": config.model_type,
        "vocab": config.vocab_size,
        "width": config.hidden_size,
        "layers": layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": head_dim,
        "ffn": config.intermediate_size,
        "context": config.max_position_embeddings,
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "activation": config.hidden_act,
        "tied": bool(config.tie_word_embeddings),
        "rotary_dim": head_dim,
        "windows": (None,) * layers,
        "scales": (head_dim**-0.5,) * layers,
    }
    return Shape(**(choices | differences))


def _llama(config: Any) -> Shape:
    bias = bool(config.attention_bias)
    return _llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.mlp_bias))


def _mistral(config: Any) -> Shape:
    return _llama_like(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def _qwen2(config: Any, **differences: Any) -> Shape:
    known = {"full_attention"} if config.sliding_window is None else {"full_attention", SLIDING}
    if not set(config.layer_types) <= known:
        raise _invalid(
            config,
            f"layer_types {config.layer_types} with sliding_window {config.sliding_window}; supported: "
            f"{', '.join(sorted(known))}",
        )
    windows = tuple(config.sliding_window if kind == SLIDING else None for kind in config.layer_types)
    return _llama_like(config, **({"windows": windows, "qkv_bias": True} | differences))


def _qwen3(config: Any) -> Shape:
    bias = bool(config.attention_bias)
    return _qwen2(config, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _gpt_neox(config: Any) -> Shape:
    head_dim = config.hidden_size // config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", True))
    return _llama_like(
        config,
        eps=config.layer_norm_eps,
        norm="layer",
        gated=False,
        parallel=bool(config.use_parallel_residual),
        rotary_dim=int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
    )


def _gpt2(config: Any) -> Shape:
    layers = config.n_layer
    head_dim = config.n_embd // config.n_head
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    by_depth = config.scale_attn_by_inverse_layer_idx
    return Shape(
        family="gpt2",
        vocab=config.vocab_size,
        width=config.n_embd,
        layers=layers,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=head_dim,
        ffn=config.n_inner or 4 * config.n_embd,
        context=config.n_positions,
        eps=config.layer_norm_epsilon,
        norm="layer",
        activation=config.activation_function,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=bool(config.tie_word_embeddings),
        windows=(None,) * layers,
        scales=tuple(scale / (i + 1) if by_depth else scale for i in range(layers)),
    )


FAMILIES: dict[str, Callable[[Any], Shape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
}


def keys_of_transformers_4(config: Any) -> dict[str, Any]:
    """Return the keys of config.json under which transformers 4 finds the dtype and the rotary embedding.

    transformers 5 reads them too, and writes others. Without them, transformers 4 and engines that read its files
    compute with the default base of 10,000, without a word.
    """
    keys: dict[str, Any] = {"torch_dtype": str(config.dtype).removeprefix("torch.")}
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return keys
    if config.model_type == "gpt_neox":
        keys |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    else:
        keys["rope_theta"] = rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    original = scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") == "yarn" and original == config.max_position_embeddings:
        del scaling["original_max_position_embeddings"]  # a default of transformers 5; 4 would derive a factor of 1
    keys["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return keys


def rotary_frequencies(config: Any, shape: Shape) -> tuple[Tensor | None, float]:
    """Inverse frequencies (r/2,) of the rotary embedding, and the factor of cos and sin (yarn).

    (None, 1.0) for learned positions.
    """
    if shape.rotary_dim == 0:
        return None, 1.0
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        steps = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** steps), 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq, float(scale)


@dataclass(frozen=True)
class Source:
    """Name and layout of one of our tensors in a Hugging Face checkpoint.

    The tensors ``names`` are concatenated along dim 0; ``rows`` are their numbers of rows. ``layout``: ``"rows"`` is
    unchanged, ``"transposed"`` is GPT-2's Conv1D (in, out), ``"interleaved"`` is GPT-NeoX, whose rows are grouped by
    head: q, k, v of head 0, then of head 1.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    layout: str = "rows"


def tensor_map(shape: Shape) -> dict[str, Source]:
    """Map each parameter name of a decoder of this shape to its `Source` on disk."""
    names = {"gpt_neox": _neox_names, "gpt2": _gpt2_names}.get(shape.family, _llama_names)(shape)
    return {ours: source if isinstance(source, Source) else Source((source,), (-1,)) for ours, source in names.items()}


def _llama_names(shape: Shape) -> dict[str, str | Source]:
    names: dict[str, str | Source] = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not shape.tied:
        names["head.weight"] = "lm_head.weight"
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    for i in range(shape.layers):
        ours = f"blocks.{i}."
        theirs = f"model.layers.{i}."
        names[ours + "norm1.weight"] = theirs + "input_layernorm.weight"
        names[ours + "norm2.weight"] = theirs + "post_attention_layernorm.weight"
        for part in ("weight", "bias"):
            if part == "weight" or shape.qkv_bias:
                parts = tuple(f"{theirs}self_attn.{x}_proj.{part}" for x in "qkv")
                names[ours + f"qkv.{part}"] = Source(parts, (q, kv, kv))
            if part == "weight" or shape.out_bias:
                names[ours + f"out.{part}"] = f"{theirs}self_attn.o_proj.{part}"
            if part == "weight" or shape.mlp_bias:
                parts = (f"{theirs}mlp.gate_proj.{part}", f"{theirs}mlp.up_proj.{part}")
                names[ours + f"up.{part}"] = Source(parts, (shape.ffn, shape.ffn))
                names[ours + f"down.{part}"] = f"{theirs}mlp.down_proj.{part}"
        if shape.qk_norm:
            names[ours + "q_norm"] = theirs + "self_attn.q_norm.weight"
            names[ours + "k_norm"] = theirs + "self_attn.k_norm.weight"
    return names


def _neox_names(shape: Shape) -> dict[str, str | Source]:
    names: dict[str, str | Source] = {"embed.weight": "gpt_neox.embed_in.weight"}
    if not shape.tied:
        names["head.weight"] = "embed_out.weight"
    for part in ("weight", "bias"):
        names[f"norm.{part}"] = f"gpt_neox.final_layer_norm.{part}"
        for i in range(shape.layers):
            ours = f"blocks.{i}."
            theirs = f"gpt_neox.layers.{i}."
            names[ours + f"norm1.{part}"] = theirs + f"input_layernorm.{part}"
            names[ours + f"norm2.{part}"] = theirs + f"post_attention_layernorm.{part}"
            if part == "weight" or shape.qkv_bias:
                names[ours + f"qkv.{part}"] = Source(
                    (theirs + f"attention.query_key_value.{part}",), (-1,), "interleaved"
                )
            if part == "weight" or shape.out_bias:
                names[ours + f"out.{part}"] = theirs + f"attention.dense.{part}"
            names[ours + f"up.{part}"] = theirs + f"mlp.dense_h_to_4h.{part}"
            names[ours + f"down.{part}"] = theirs + f"mlp.dense_4h_to_h.{part}"
    return names


def _gpt2_names(shape: Shape) -> dict[str, str | Source]:
    names: dict[str, str | Source] = {
        "embed.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
    }
    if not shape.tied:
        names["head.weight"] = "lm_head.weight"
    projections = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for part in ("weight", "bias"):
        names[f"norm.{part}"] = f"transformer.ln_f.{part}"
        for i in range(shape.layers):
            ours = f"blocks.{i}."
            theirs = f"transformer.h.{i}."
            names[ours + f"norm1.{part}"] = theirs + f"ln_1.{part}"
            names[ours + f"norm2.{part}"] = theirs + f"ln_2.{part}"
            layout = "transposed" if part == "weight" else "rows"
            for mine, its in projections.items():
                names[ours + f"{mine}.{part}"] = Source((theirs + f"{its}.{part}",), (-1,), layout)
    return names
