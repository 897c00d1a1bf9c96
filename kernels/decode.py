"""The small ops of a decoding step, fused into one call each: PyTorch needs several, which dominate a short step."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .dispatch import use_cpp


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """RMS norm x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension.

    x (T, D), weight (D,); the result is (T, D) of the dtype of ``x``. Differentiable; the compiled version runs only on
    tensors that do not require a gradient. ``impl``: "auto", "cpp" (float32 on a CPU) or "torch".
    """
    if use_cpp(impl, "rms_norm", x, weight):
        return torch.ops.nlgrpo.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def swiglu(x: Tensor, *, impl: str = "auto") -> Tensor:
    """SwiGLU gate / (1 + exp(-gate)) * up, (T, F), where ``x (T, 2F)`` contains gate, then up.

    Differentiable; ``impl`` as for `rms_norm`.
    """
    if use_cpp(impl, "swiglu", x):
        return torch.ops.nlgrpo.swiglu(x)
    return reference.swiglu(x)


def decode_attention(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    cache: Tensor,
    column: int,
    *,
    heads: int,
    scale: float,
    first: Tensor | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of one new token per row over a cache of keys and values, to which those of the token are written.

        q, k = rotate(q), rotate(k);   cache[:, :, column] = (k, v)
        out = softmax(scale q k_c^T over the columns c in [max(first, column + 1 - window), column]) v_c

    qkv (R, H + 2 Hk, d): H = ``heads`` query heads, then Hk key heads, then Hk value heads, H a multiple of Hk.
    ``rope``: cos and sin, each (R, r/2) with r <= d, of the row's position (`reference.rotate`); None: no rotation.
    ``cache`` (R, 2 Hk, columns, d), keys before values, is **modified in place**. ``first`` (R,) int64: first column
    that a row sees, 0 by default; a row always sees its own. ``window``: maximum number of columns that a row sees,
    its own included. Returns (R, H, d). Not differentiable.

    Raises ValueError for an ``impl`` that cannot run, and RuntimeError, before anything is written, for shapes that do
    not match.
    """
    if use_cpp(impl, "decode_attention", qkv, cache, *(rope or ())):
        cos, sin = rope or (None, None)
        return torch.ops.nlgrpo.decode_attention(qkv, cos, sin, cache, column, first, window or 0, scale, heads)
    return reference.decode_attention(qkv, rope, cache, column, heads=heads, scale=scale, first=first, window=window)
