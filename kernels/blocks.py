"""The small ops of a transformer block, fused into one call each: PyTorch needs several, which slow a small model."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference
from .dispatch import requires_grad, use_cpp
from .recompute import without_temporaries


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """RMS norm x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension.

    x (T, D), weight (D,); the result is (T, D) of the dtype of ``x``. Differentiable, with the compiled version once.
    ``impl``: "auto", "cpp" (float32 on a CPU) or "torch".
    """
    if not use_cpp(impl, "rms_norm", x, weight, differentiable=True):
        return without_temporaries(partial(reference.rms_norm, eps=eps), x, weight)
    if requires_grad(x, weight):
        return cast(Tensor, _RMSNorm.apply(x, weight, eps))
    return torch.ops.nlgrpo.rms_norm(x, weight, eps)


def swiglu(x: Tensor, *, impl: str = "auto") -> Tensor:
    """SwiGLU gate / (1 + exp(-gate)) * up, (T, F), where ``x (T, 2F)`` contains gate, then up.

    Differentiable; ``impl`` as for `rms_norm`.
    """
    if not use_cpp(impl, "swiglu", x, differentiable=True):
        return without_temporaries(reference.swiglu, x)
    return cast(Tensor, _SwiGLU.apply(x)) if requires_grad(x) else torch.ops.nlgrpo.swiglu(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return cast(Tensor, torch.ops.nlgrpo.rms_norm(x, weight, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.nlgrpo.rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return cast(Tensor, torch.ops.nlgrpo.swiglu(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.nlgrpo.swiglu_backward(grad, *ctx.saved_tensors))


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
