"""One decoder for Llama, Mistral, Qwen2, Qwen3, GPT-NeoX/Pythia and GPT-2, on packed tokens.

The families differ in the norm, the feed-forward, the biases, the positions and whether attention and feed-forward run
in parallel. ``Shape`` holds these choices; ``architectures.py`` reads them from a Hugging Face config. Attention is
passed in (``attend``), so training (packed, differentiable), prefill and cached decoding run the same blocks.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from nlgrpo.errors import UserError
from nlgrpo.kernels import BlockWeights, Segments, linear, recomputed, rms_norm, swiglu
from nlgrpo.model import hf_weights, lora
from nlgrpo.model.architectures import (
    ACTIVATIONS,
    Shape,
    Source,
    check_causal,
    read_config,
    rotary_frequencies,
    shape_of,
    tensor_map,
)
from nlgrpo.model.attention import PackedAttention, Rope
from nlgrpo.model.tokenizer import save_tokenizer

# Width of a model from which norms and activations are recomputed: in narrower ones they take a tenth of the time, and
# little memory.
RECOMPUTED_WIDTH = 256
# (hidden (S, D), weight (V, D)) -> any result. After `Decoder.limit_vocabulary` it also gets bias (V,), by this name.
Head = Callable[..., Any]
Attend = Callable[..., Tensor]  # (qkv (T, H + 2 Hk, d), rope, *, heads, layer, scale, window) -> (T, H, d)


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without initial values, which are loaded: on "meta", `nn.init.normal_` would import the compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class Linear(nn.Linear):
    """Linear layer by `kernels.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def make_norm(shape: Shape) -> nn.Module:
    return RMSNorm(shape.width, shape.eps) if shape.norm == "rms" else nn.LayerNorm(shape.width, shape.eps)


@functools.cache
def _compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True, backend=backend)


class Block(nn.Module):
    """Transformer layer with fused projections: ``qkv`` is the q, then k, then v heads, ``up`` is gate, then up."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer = layer
        self.backend: str | None = None  # of torch.compile
        self.recompute = shape.width >= RECOMPUTED_WIDTH  # see `project`
        d = shape.head_dim
        heads = shape.heads + 2 * shape.kv_heads
        self.norm1 = make_norm(shape)
        self.qkv = Linear(shape.width, heads * d, bias=shape.qkv_bias)
        if shape.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(d))
            self.k_norm = nn.Parameter(torch.ones(d))
        self.out = Linear(shape.heads * d, shape.width, bias=shape.out_bias)
        self.norm2 = make_norm(shape)
        self.up = Linear(shape.width, shape.ffn * (2 if shape.gated else 1), bias=shape.mlp_bias)
        self.down = Linear(shape.ffn, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        shape = self.shape
        heads = Block.heads
        add = Block.add
        if self.backend is not None and not torch.is_inference_mode_enabled():  # which is generation
            heads = _compiled(Block.heads, self.backend)
            add = _compiled(Block.add, self.backend)
        scale = shape.scales[self.layer]
        window = shape.windows[self.layer]
        mixed = attend(heads(self, x), rope, heads=shape.heads, layer=self.layer, scale=scale, window=window)
        return add(self, x, mixed)

    def heads(self, x: Tensor) -> Tensor:
        """Queries, keys and values (T, H + 2 Hk, d) before the rotation."""
        shape = self.shape
        qkv = self.project(self.qkv, lambda: self.norm1(x)).view(len(x), -1, shape.head_dim)
        if shape.qk_norm:
            qk, v = qkv.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
            weight = torch.cat((self.q_norm.expand(shape.heads, -1), self.k_norm.expand(shape.kv_heads, -1)))
            qkv = torch.cat((F.rms_norm(qk, (shape.head_dim,), eps=shape.eps) * weight, v), dim=1)
        return qkv

    def add(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the attention's output, from ``mixed`` (T, H, d), and that of the feed-forward to ``x`` (T, D)."""
        attended = x + self.out(mixed.flatten(1))
        return attended + self.mlp(x if self.shape.parallel else attended)

    def project(self, layer: nn.Module, value: Callable[[], Tensor]) -> Tensor:
        """Apply a linear layer to ``value()``, which wide models compute again in the backward pass and do not save."""
        x = value()
        if torch.compiler.is_compiling() or not self.recompute or not torch.is_grad_enabled():
            return cast(Tensor, layer(x))
        with recomputed(x, value):
            return cast(Tensor, layer(x))

    def llama_weights(self) -> BlockWeights | None:
        """Weights for `kernels.decode_block`; None if the block does not have Llama's form, or adds adapters."""
        shape = self.shape
        layers = (self.qkv, self.out, self.up, self.down)
        if any(isinstance(layer, lora.LoraLinear) and layer.merged is None for layer in layers):
            return None
        gated = shape.gated and shape.activation == "silu" and not shape.mlp_bias
        if shape.parallel or shape.norm != "rms" or shape.qk_norm or shape.out_bias or not gated:
            return None
        return BlockWeights(
            norm1=self.norm1.weight,
            qkv=lora.active_weight(self.qkv),
            qkv_bias=self.qkv.bias,
            out=lora.active_weight(self.out),
            norm2=self.norm2.weight,
            up=lora.active_weight(self.up),
            down=lora.active_weight(self.down),
        )

    def mlp(self, x: Tensor) -> Tensor:
        """Output of the feed-forward (T, D) for its input before the norm."""
        hidden = self.project(self.up, lambda: self.norm2(x))
        return self.project(self.down, lambda: self.activate(hidden))

    def activate(self, hidden: Tensor) -> Tensor:
        """Input of ``down`` (T, F) from the output of ``up``."""
        act = ACTIVATIONS[self.shape.activation]
        if not self.shape.gated:
            return act(hidden)
        if self.shape.activation == "silu":
            return swiglu(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return act(gate) * up


class Decoder(nn.Module):
    """A causal language model on packed tokens.

    ``config`` is the Hugging Face config that the model was built from; `save` writes it.
    """

    inv_freq: Tensor | None

    def __init__(
        self,
        shape: Shape,
        inv_freq: Tensor | None = None,
        rope_scale: float = 1.0,
        config: PretrainedConfig | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.config = config
        self.embed = _embedding(shape.vocab, shape.width)
        self.positions = _embedding(shape.context, shape.width) if shape.rotary_dim == 0 else None
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = make_norm(shape)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocab, bias=False)
        self.rope_scale = rope_scale
        self._checkpointing = False
        self.offloaded = False  # set by `fsdp.shard`: the parameters are in the memory of the host
        self.tokens: int | None = None  # set by `limit_vocabulary`
        self._bias: Tensor | None = None  # of `head_bias`
        self.each_gathered: Callable[[], Iterator[Block]] | None = None  # set by `fsdp.gathered`
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """Weight (V, D) of the language-model head; the embedding if it is tied."""
        return lora.active_weight(self.embed if self.head is None else self.head)

    def limit_vocabulary(self, tokens: int | None) -> None:
        """Give ids from ``tokens`` on the probability 0, in logits, samples and log-probs; None: no id.

        Vocabularies are padded: the rows behind the tokenizer's have no token, and nobody can read a sample of them.
        They stay in the product, and a bias of -inf takes them out of its result: a product with the other rows alone
        takes 3 to 8 times as long on an H100, because their number may be odd (experiments/gpu/README.md).
        """
        self.tokens = None if tokens is None or tokens >= self.shape.vocab else tokens
        self._bias = None

    def head_bias(self, like: Tensor) -> Tensor | None:
        """Bias (V,) of the head in the dtype of ``like``: -inf for ids without a token, else 0; None if all do."""
        if self.tokens is None:
            return None
        bias = self._bias
        if bias is None or bias.dtype != like.dtype or bias.device != like.device:
            with torch.inference_mode(False):  # training takes the same tensor, and saves it for its backward pass
                bias = torch.zeros(self.shape.vocab, dtype=like.dtype, device=like.device)
                bias[self.tokens :] = -torch.inf
            self._bias = bias
        return bias

    def apply_head(self, hidden: Tensor, head: Head = linear) -> Any:
        """Output of ``head`` for hidden states (S, D) after the final norm; by default the logits (S, V)."""
        bias = self.head_bias(hidden)
        if bias is None:
            return head(hidden, self.head_weight)
        return head(hidden, self.head_weight, bias=bias)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each block is recomputed in the backward pass; else only its cheap ops are, in wide models."""
        return self._checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, on: bool) -> None:
        self._checkpointing = on
        for block in self.blocks:
            cast(Block, block).recompute = not on and self.shape.width >= RECOMPUTED_WIDTH

    def configure(
        self, activation_checkpointing: bool = False, compiled: bool = False, backend: str = "inductor"
    ) -> None:
        """Set how the blocks run.

        ``activation_checkpointing``: recompute each block in the backward pass instead of keeping its activations.
        ``compiled``: compile what is before and after the attention with ``torch.compile``, for any number of tokens,
        except in generation. All blocks share these two graphs, because neither depends on the layer.
        """
        self.activation_checkpointing = activation_checkpointing
        for block in self.blocks:
            cast(Block, block).backend = backend if compiled else None

    def each_block(self) -> Iterator[Block]:
        """Yield the blocks in their order, for code that calls `Block.forward` or takes weights (no hooks of FSDP).

        With `fsdp.gathered` by block, each has its full parameters only until the next one.
        """
        return iter(cast(Iterable[Block], self.blocks)) if self.each_gathered is None else self.each_gathered()

    def rope(self, positions: Tensor) -> Rope:
        """cos and sin (T, r/2) of ``positions (T,)``, computed in float32 like transformers; None if learned."""
        if self.positions is not None:
            return None
        assert self.inv_freq is not None
        angle = positions[:, None].float() * self.inv_freq.float()
        cos = angle.cos() * self.rope_scale
        sin = angle.sin() * self.rope_scale
        dtype = self.embed.weight.dtype
        return cos.to(dtype), sin.to(dtype)

    def enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input embeddings (T, D)."""
        x = self.embed(tokens)
        return x if self.positions is None else x + self.positions(positions)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (T, D) after the final norm, the input of the head."""
        x = self.enter(tokens, positions)
        rope = self.rope(positions)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, attend, use_reentrant=False)
            else:
                x = block(x, rope, attend)
        return self.norm(x)

    def forward(
        self, tokens: Tensor, lengths: Segments | list[int], select: Tensor | None = None, head: Head | None = None
    ) -> Any:
        """Run packed sequences ``tokens (T,)`` with ``lengths``, whose sum is T, or `Segments` that share prefixes.

        Without ``head``, returns the logits (T, V). With it, returns ``head(hidden (S, D), weight (V, D))`` for the
        hidden states at ``select (S,)``, such as `nlgrpo.kernels.linear_logprob` with its targets; the logits of all
        tokens are never stored. After `limit_vocabulary` the head also gets ``bias=`` (V,). The head runs here and not
        in the caller, because FSDP2 gathers the weight here.

        Raises UserError if the lengths do not add up to T.
        """
        segments = Segments.of(lengths)
        if sum(segments.lengths) != len(tokens):
            raise UserError(
                f"the sequence lengths add up to {sum(segments.lengths)}, but there are {len(tokens)} tokens"
            )
        attend = PackedAttention(segments, tokens.device, self.embed.weight.dtype)
        hidden = self.hidden(tokens, segments.positions(tokens.device), attend)
        if head is None:
            return self.apply_head(hidden)
        return self.apply_head(hidden if select is None else hidden[select], head)


def build(config: PretrainedConfig) -> Decoder:
    """Build a decoder with uninitialised weights from a Hugging Face config.

    Raises UserError for an unknown architecture.
    """
    return allocate(blueprint(config))


def blueprint(config: PretrainedConfig) -> Decoder:
    """Build a decoder on the meta device: its parameters have shapes but no memory."""
    with torch.device("meta"):
        return Decoder(shape_of(config), config=config)


def allocate(model: Decoder, device: str | torch.device = "cpu") -> Decoder:
    """Allocate the memory of a blueprint, in place. Rotary frequencies are float32 for any dtype of the weights.

    Offloaded parameters are allocated in the memory of the host.
    """
    assert model.config is not None
    model.to_empty(device="cpu" if model.offloaded else device)
    inv_freq, model.rope_scale = rotary_frequencies(model.config, model.shape)
    model.inv_freq = None if inv_freq is None else inv_freq.to(device)
    return model


def load(
    path_or_name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    shard: Callable[[Decoder], object] | None = None,
) -> Decoder:
    """Load a causal language model from a Hugging Face directory, an embedded name (``"story-lm"``) or a hub name.

    Reads safetensors only, one tensor at a time, and runs no code of the directory. ``shard`` shards the blueprint in
    place before its memory is allocated, so a rank never holds more than its shard and one full tensor. It may attach
    adapters (`lora.attach`), which have no values then.

    Raises UserError for an unknown architecture (the message lists the supported ones), a missing tensor or one of the
    wrong shape, tensors that have no place in the model, a classifier, and a directory that is not a model directory.
    """
    folder = hf_weights.locate(path_or_name)
    config = read_config(folder)
    check_causal(config)
    model = blueprint(config).to(dtype)
    if shard is not None:
        shard(model)
    allocate(model, device)
    places = tensor_map(model.shape)
    checkpoint = hf_weights.Checkpoint(folder)
    checkpoint.check_embedding(places["embed.weight"].names[0], model.shape.tied)
    unused = hf_weights.HEADS if model.shape.tied else ()
    hf_weights.read_into(lora.base_parameters(model), checkpoint, model.shape, places, unused=unused)
    return model


def save(
    model: Decoder,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    parameters: Iterable[tuple[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    like: Path | None = None,
) -> None:
    """Save a directory that ``AutoModelForCausalLM.from_pretrained`` and vLLM load.

    ``parameters``: full tensors of the dtype ``dtype`` to save instead of the model's own, by name and in their order,
    such as `fsdp.each_full`; each is written before the next one is requested. ``like``: the directory that the model
    was loaded from; its files of how to sample (`hf_weights.SAMPLING_FILES`) are copied.

    Raises UserError for a decoder without a Hugging Face config.
    """
    if model.config is None:
        raise UserError("this decoder was built without a Hugging Face config; use model.load or model.build")
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = model.head_weight.dtype if dtype is None else dtype
    hf_weights.write_config(model.config, folder)
    named = model.named_parameters() if parameters is None else parameters
    write_weights(named, folder, blueprint(model.config).to(model.config.dtype), tensor_map(model.shape))
    for name in hf_weights.SAMPLING_FILES:
        if like is not None and (like / name).is_file():
            shutil.copy(like / name, folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def write_weights(
    parameters: Iterable[tuple[str, Tensor]], folder: Path, like: Decoder, places: Mapping[str, Source]
) -> None:
    """Write parameters to the safetensors of ``folder``, one at a time, under their names and in their layouts there.

    ``like``: a blueprint with the names, the order, the shapes and the dtype of the ``parameters``.
    """
    layout = hf_weights.layout(dict(like.named_parameters()), like.shape, places)
    from nlgrpo.model import safetensors_writer

    safetensors_writer.write(folder, layout, hf_weights.all_stored(parameters, like.shape, places))
