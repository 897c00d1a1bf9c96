"""The linear layer in float32 on a CPU, compiled where MKL, which PyTorch calls, is slow.

MKL is slow for few rows. On processors with AVX-512 that Intel did not make, it is slow for any number of rows, because
it uses half of their width.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import extension
from .dispatch import requires_grad, use_cpp

FEW_ROWS = 64  # up to here the compiled version is faster on any processor with AVX-512; the same in csrc/linear.cpp
MOST_DEPTH = 4096  # for more rows: a deeper product does not stay in the cache
ROWS_PER_TRANSPOSE = 512  # with fewer, transposing the weight takes longer than the product saves


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Linear layer x weight^T + bias. Equals ``torch.nn.functional.linear`` up to rounding.

    x (T, D), weight (N, D), bias (N,); the result is (T, N). Differentiable, with the compiled version once. For few
    rows, that version takes about as long as reading the weights. A row of its result does not depend on the other
    rows, bit for bit. It needs AVX-512, and is ``F.linear`` without.

    ``impl``: "auto", "cpp" (float32 on a CPU) or "torch". "auto" is "cpp" where that is faster: for up to 64 rows
    without a gradient, and for any number on processors with AVX-512 that Intel did not make. Raises ValueError for an
    ``impl`` that cannot run, and RuntimeError for shapes that do not match.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    if impl == "auto" and not _faster(*given):
        impl = "torch"
    if not use_cpp(impl, "linear", *given, differentiable=True):
        return F.linear(x, weight, bias)
    if requires_grad(*given):
        return cast(Tensor, _Linear.apply(x, weight, bias))
    return torch.ops.nlgrpo.linear(x, weight, bias)


def _faster(x: Tensor, weight: Tensor, *bias: Tensor) -> bool:
    """Whether the compiled version is the faster one, and may run."""
    if x.ndim != 2 or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    few = len(x) <= FEW_ROWS and not requires_grad(x, weight, *bias)
    return few or (x.shape[1] <= MOST_DEPTH and mkl_is_slow())


def times_weight(grad: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """Matrix product of grad (T, N) and weight (N, D): the gradient of `linear` with respect to x. No gradient.

    The compiled version needs a transposed copy of the weight. "auto" runs it for many rows where MKL is slow.
    """
    worthwhile = len(grad) >= ROWS_PER_TRANSPOSE and grad.shape[1] <= MOST_DEPTH
    if impl == "auto" and not (worthwhile and mkl_is_slow()):
        impl = "torch"
    if use_cpp(impl, "linear", grad, weight, differentiable=True):
        return torch.ops.nlgrpo.linear(grad, weight.mT.contiguous(), None)
    return grad @ weight


@functools.cache
def mkl_is_slow() -> bool:
    """Whether the op is compiled for this processor's AVX-512, and MKL does not use it."""
    return extension.available() and torch.backends.mkl.is_available() and torch.ops.nlgrpo.other_avx512()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return cast(Tensor, torch.ops.nlgrpo.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            times_weight(grad, weight) if wanted[0] else None,
            grad.mT @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
        )
