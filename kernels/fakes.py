"""Shapes of the compiled ops' results, so that they run on fake tensors (``torch._subclasses.FakeTensorMode``).

Tools that trace a model without memory need them. Only the ops of training have one: those that autograd calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    """Register the results' shapes. Call it once, after the ops are loaded."""
    results: dict[str, Callable[..., Any]] = {
        "rms_norm": _as_first,
        "rms_norm_backward": _rms_norm_backward,
        "swiglu": _swiglu,
        "swiglu_backward": _as_second,
        "linear": _linear,
        "packed_attention": _packed_attention,
        "packed_attention_backward": _as_second,
    }
    for op, like in results.items():
        torch.library.register_fake(f"nlgrpo::{op}", like)


def _as_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _as_second(_: Tensor, x: Tensor, *__: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _as_first(x), torch.empty_like(weight)


def _swiglu(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _packed_attention(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, segments: Tensor, window: int, scale: float, heads: int
) -> tuple[Tensor, Tensor]:
    tokens, _, d = qkv.shape
    return qkv.new_empty(tokens, heads, d), qkv.new_empty(tokens, heads)
