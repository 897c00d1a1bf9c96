"""Rotary embedding of the queries and keys of a fused projection, in one new tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import requires_grad


def rotate_queries_and_keys(qkv: Tensor, rope: tuple[Tensor, Tensor] | None, heads: int) -> Tensor:
    """Rotate the query and key heads of ``qkv (T, H + 2 Hk, d)``; the value heads are copied. H is ``heads``.

    The numbers are those of `reference.split_and_rotate`, bit for bit, in five passes over the data instead of eight
    (six if r < d), in the forward and in the backward. ``rope``: cos and sin, each (T, r/2); without it, ``qkv`` is
    returned. The result is contiguous, and nothing but ``rope`` is saved. Differentiable once in ``qkv``.
    """
    if rope is None:
        return qkv
    rotated = heads + (qkv.shape[1] - heads) // 2
    if requires_grad(qkv):
        turned: Tensor = _Rotated.apply(qkv, *rope, rotated)
        return turned
    return _rotate(qkv, *rope, rotated)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int, *, back: bool = False) -> Tensor:
    """Rotate the first ``heads`` heads: (a, b) -> (a cos - b sin, b cos + a sin), or by minus the angle (``back``)."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = 2 * cos.shape[-1]
    pairs = x[:, :heads, :width].unflatten(-1, (2, -1))
    turned = out[:, :heads, :width].unflatten(-1, (2, -1))
    torch.mul(pairs, cos[:, None, None], out=turned)
    crossed = pairs * sin[:, None, None]
    first, second = turned.unbind(2)
    a_sin, b_sin = crossed.unbind(2)
    if back:
        first += b_sin
        second -= a_sin
    else:
        first -= b_sin
        second += a_sin
    if width < x.shape[-1]:
        out[:, :heads, width:] = x[:, :heads, width:]
    out[:, heads:] = x[:, heads:]
    return out


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _rotate(qkv, cos, sin, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.heads, back=True), None, None, None
