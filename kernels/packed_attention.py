"""Causal attention over packed sequences that share prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import use_cpp
from .segments import Segments


def packed_attention(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    segments: Segments | Sequence[int],
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of packed tokens to their own sequence, whose prefix may be shared with others.

        q, k = rotate(q), rotate(k);   out = softmax(scale q k^T) v

    The softmax runs over the tokens of the same sequence at or before the query; with ``window`` W, over the last W of
    them. qkv (T, H + 2 Hk, d): H = ``heads`` query heads, then Hk key heads, then Hk value heads, H a multiple of Hk.
    ``rope``: cos and sin, each (T, r/2) with r <= d, of each token's position (`Segments.positions`); None: no
    rotation. ``segments``: the lengths of the sequences, or `Segments` that share prefixes, T tokens in total. Returns
    (T, H, d). Differentiable once in qkv.

    Memory does not grow with the square of the lengths. ``impl``: "cpp" (float32 on a CPU) never stores scores; "torch"
    is plain PyTorch, and copies the keys of a shared prefix for each of its sequences unless it runs on a CPU; "auto"
    is "cpp" if it can run.

    Raises ValueError for an ``impl`` that cannot run and for lengths that do not add up to T, and RuntimeError for
    shapes that do not match.
    """
    segments = Segments.of(segments)
    if sum(segments.lengths) != len(qkv):
        raise ValueError(f"the sequence lengths add up to {sum(segments.lengths)}, but there are {len(qkv)} tokens")
    if not use_cpp(impl, "packed_attention", qkv, *(rope or ()), differentiable=True):
        from . import packed_attention_torch

        return packed_attention_torch.packed_attention(qkv, rope, segments, heads, scale, window)
    cos, sin = rope or (None, None)
    return cast(Tensor, _Compiled.apply(qkv, cos, sin, segments.tensor, window or 0, scale, heads))


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        segments: Tensor,
        window: int,
        scale: float,
        heads: int,
    ) -> Tensor:
        out, lse = torch.ops.nlgrpo.packed_attention(qkv, cos, sin, segments, window, scale, heads)
        ctx.save_for_backward(qkv, cos, sin, out, lse, segments)
        ctx.options = (window, scale, heads)
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.nlgrpo.packed_attention_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 6
