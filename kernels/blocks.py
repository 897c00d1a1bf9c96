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
