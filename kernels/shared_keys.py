"""Keys and values of packed segments whose prefixes are shared, for kernels that read each segment's own keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import requires_grad
from .segments import Segments


def keys_of_segments(x: Tensor, segments: Segments) -> Tensor:
    """Rows (K, ..) that the segments attend to, segment by segment, from ``x (T, ..)``: of its prefix, then its own.

    Equal to ``x[segments.key_index(x.device)]``. The gradient of a token of a prefix is the sum over its copies, added
    in one order: no atomic additions, and no sort as in the gradient of indexing. Differentiable once.
    """
    if requires_grad(x):
        copied: Tensor = _Copied.apply(x, segments)
        return copied
    return x.index_select(0, segments.key_index(x.device))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return x.index_select(0, segments.key_index(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, copied = ctx.segments.key_sources(grad.device)
        total = grad.index_select(0, own)
        for tokens, copies in copied:
            of_tokens = grad.index_select(0, copies.flatten()).unflatten(0, copies.shape)
            total.index_copy_(0, tokens, of_tokens.sum(1))
        return total, None
