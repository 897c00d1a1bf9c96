"""Matrix products with a weight in float32 on a CPU, compiled where the library that PyTorch calls is slow.

That is for a few rows, and on processors with AVX-512 that Intel did not make: there MKL uses half of its width.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import requires_grad, use_cpp

FEW_ROWS = 64  # up to here the compiled op is faster than MKL on any processor with AVX-512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Linear layer x weight^T + bias. Equals ``torch.nn.functional.linear`` up to rounding.

    x (T, D), weight (N, D), bias (N,); the result is (T, N). Differentiable, with the compiled version once. That
    version reads the weights at the speed of the memory, and a row of its result does not depend on the other rows, bit
    for bit. It needs AVX-512, and is ``F.linear`` without.

    ``impl``: "auto", "cpp" (float32 on a CPU) or "torch". "auto" takes the compiled version where it is faster. Raises
    ValueError for an ``impl`` that cannot run, and RuntimeError for shapes that do not match.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    if not use_cpp(_faster(impl, x), "linear", *given, differentiable=True):
        return F.linear(x, weight, bias)
    if requires_grad(*given):
        return cast(Tensor, _Linear.apply(x, weight, bias, impl))
    return torch.ops.nlgrpo.linear(x, weight, bias)


def times_weight(grad: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """Matrix product of grad (T, N) and weight (N, D): the gradient of `linear` with respect to x. No gradient."""
    if use_cpp(_faster(impl, grad), "linear", grad, weight, differentiable=True):
        return torch.ops.nlgrpo.linear(grad, weight.mT.contiguous(), None)
    return grad @ weight


def _faster(impl: str, x: Tensor) -> str:
    """Return "torch" for "auto" where the compiled version is slower or cannot run."""
    if impl != "auto":
        return impl
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return "torch"
    few = x.ndim == 2 and len(x) <= FEW_ROWS and not requires_grad(x)
    return "auto" if few or mkl_is_slow() else "torch"


@functools.cache
def mkl_is_slow() -> bool:
    """Whether this processor has AVX-512 and was not made by Intel, so that MKL does not use it."""
    info = Path("/proc/cpuinfo")
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not info.is_file():
        return False
    return torch.backends.mkl.is_available() and "GenuineIntel" not in info.read_text("utf-8")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, impl: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.impl = impl
        return cast(Tensor, torch.ops.nlgrpo.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            times_weight(grad, weight, impl=ctx.impl) if wanted[0] else None,
            grad.mT @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
            None,
        )
