"""Memory of one transformer block per token, measured on a block whose tensors have no memory.

The block runs forward and backward on tensors of the device "meta", so the result follows the code: the family,
adapters, the compiled ops and the kind of attention. A count of allocations replaces a formula per combination.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nlgrpo.kernels import Segments
from nlgrpo.kernels.dispatch import traced_as_cpu
from nlgrpo.model import lora
from nlgrpo.model.architectures import Shape
from nlgrpo.model.attention import PackedAttention, Rope
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.lora import LoraConfig

TOKENS = 2**16  # the trace is linear in the number of tokens; without memory it costs the same for any
FEW_TOKENS = 2**9  # of a trace with memory
SMALL = 2**20  # parameters of a block that is traced with memory on a CPU; some ops without it import the compiler


@dataclass(frozen=True)
class BlockBytes:
    """Bytes per token of one block: what it keeps for its backward pass, and its temporary tensors."""

    saved: float
    """Kept from the forward to the backward pass."""
    forward: float
    """Most that is alive in a forward pass without a gradient, without the input."""
    backward: float
    """Most that is alive in the backward pass beyond ``saved``, with the gradient of the output."""


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that ops create, while they are alive. ``peak``: the largest count so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports the compiler, which takes a second

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in self._known | given:
                self._add(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@functools.lru_cache(maxsize=64)
def _trace(
    shape: Shape, adapter: LoraConfig | None, compute: torch.dtype, kind: str, checkpointing: bool, tokens: int
) -> BlockBytes:
    """Bytes of all blocks of a model for one packed sequence, with those of the gradients of their parameters."""
    with _device(kind, shape) as device:
        model = _model(shape, adapter, compute, device)
        model.activation_checkpointing = checkpointing
        x = torch.empty(tokens, shape.width, dtype=compute, device=device, requires_grad=True)
        segments = Segments([tokens])
        attend = PackedAttention(segments, torch.device(device), compute, None if kind == "cpu" else kind)
        rope = model.rope(segments.positions(torch.device(device)))
        with Allocated() as forward, torch.no_grad():
            _run(model, x, rope, attend)
        with Allocated() as training:
            y = _run(model, x, rope, attend)
            saved = training.now
            _Loss.apply(y).backward()
    return BlockBytes(saved, forward.peak, training.peak - saved)


class _Loss(torch.autograd.Function):
    """A loss whose gradient is one new tensor. `Tensor.backward` with a gradient imports sympy, which takes 0.4 s."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.size = y.shape
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].new_empty(ctx.size)


def _run(model: Decoder, x: Tensor, rope: Rope, attend: PackedAttention) -> Tensor:
    for block in model.blocks:
        x = block(x, rope, attend)
    return x


def per_token(
    shape: Shape, adapter: LoraConfig | None, compute: torch.dtype, kind: str, *, checkpointing: bool = False
) -> BlockBytes:
    """Bytes per token of a block that computes in ``compute``.

    ``checkpointing``: ``saved`` is what the block keeps while it runs again in the backward pass, when none of its ops
    is computed once more. ``kind``: implementation of the attention (`model.attention.KINDS`), or "cpu" for what a CPU
    runs. All implementations of a GPU are counted as "varlen": each keeps its inputs, its output and a normalizer.
    """
    scale = shape.scales[0]
    window = shape.windows[0]
    one = replace(shape, layers=1, vocab=1, tied=True, context=1, windows=(window,), scales=(scale,))
    two = replace(one, layers=2, windows=(window,) * 2, scales=(scale,) * 2)
    if adapter is not None:
        adapter = _Hashed(**vars(replace(adapter, modules_to_save=())))
    kind = "cpu" if kind == "cpu" else "varlen"
    trace = functools.partial(_trace, adapter=adapter, compute=compute, kind=kind, checkpointing=checkpointing)
    tokens = FEW_TOKENS if _has_memory(kind, one) else TOKENS
    # their difference has no parameters
    short = trace(one, tokens=tokens)
    long = trace(one, tokens=2 * tokens)
    return BlockBytes(
        saved=(trace(two, tokens=tokens).saved - short.saved) / tokens,
        forward=(long.forward - short.forward) / tokens,
        backward=(long.backward - short.backward) / tokens,
    )


class _Hashed(LoraConfig):
    """Settings of adapters as a key of the cache."""

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))


def _has_memory(kind: str, shape: Shape) -> bool:
    return kind == "cpu" and replace(shape, layers=1).parameters <= SMALL


@contextmanager
def _device(kind: str, shape: Shape) -> Iterator[str]:
    """Context that yields the device of a trace; "meta" has no memory. Ops for ``kind`` "cpu" are those of a CPU."""
    with traced_as_cpu() if kind == "cpu" else nullcontext():
        yield "cpu" if _has_memory(kind, shape) else "meta"


def _model(shape: Shape, adapter: LoraConfig | None, compute: torch.dtype, device: str) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(compute)
    try:
        with torch.device(device):
            frequencies = torch.empty(shape.rotary_dim // 2, dtype=torch.float32) if shape.rotary_dim else None
            model = Decoder(shape, frequencies)
    finally:
        torch.set_default_dtype(before)
    if adapter is not None:
        lora.attach(model, adapter, compute)
    return model
