"""Ops of a decoding step: a whole transformer block, and the choice of the next tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .blocks import rms_norm, swiglu
from .branches import Branches, branch_attention
from .dispatch import choose, use_cpp


class BlockWeights(NamedTuple):
    """Weights of a transformer block of Llama's form: ``norm1`` and ``norm2`` (D,), the others (out, in).

    ``qkv``: q, then k, then v heads, with the optional bias ``qkv_bias``. ``up``: gate, then up.
    """

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    norm2: Tensor
    up: Tensor
    down: Tensor


def decode_block(
    x: Tensor,
    weights: BlockWeights,
    rope: tuple[Tensor, Tensor] | None,
    own: Tensor,
    column: int,
    prompts: Tensor,
    branches: Branches,
    *,
    eps: float,
    heads: int,
    scale: float,
    window: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Transformer block of Llama's form on n new tokens of each row of a KV cache.

        y = x + out(attention(qkv(rms_norm(x, norm1))))
        z = y + down(swiglu(up(rms_norm(y, norm2))))

    x and the result are (R n, D), row after row. The attention is `branch_attention` with the other arguments; it
    writes to ``own``. Not differentiable. ``impl``: "auto", "cpp" (float32 on a CPU) or "torch".

    Raises ValueError for an ``impl`` that cannot run, and RuntimeError for shapes that do not match.
    """
    w = weights
    if use_cpp(impl, "decode_block", x, own, prompts, *(t for t in weights if t is not None), *(rope or ())):
        cos, sin = rope or (None, None)
        return torch.ops.nlgrpo.decode_block(
            x, w.norm1, w.qkv, w.qkv_bias, w.out, w.norm2, w.up, w.down, eps, cos, sin, own, column, prompts,
            branches.lengths, branches.prompt, window or 0, scale, heads,
        )  # fmt: skip
    qkv = F.linear(rms_norm(x, w.norm1, eps, impl=impl), w.qkv, w.qkv_bias).unflatten(1, (-1, own.shape[4]))
    mixed = branch_attention(
        qkv, rope, own, column, prompts, branches, heads=heads, scale=scale, window=window, impl=impl
    )
    y = x + F.linear(mixed.flatten(1), w.out)
    return y + F.linear(swiglu(F.linear(rms_norm(y, w.norm2, eps, impl=impl), w.up), impl=impl), w.down)


def sample_tokens(
    logits: Tensor, noise: Tensor, *, temperature: float = 1.0, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Sample a token from each row of softmax(logits / temperature) by inversion.

        token = first v with sum_{u <= v} p_u > noise sum_u p_u

    logits (R, V); ``noise`` (R,) in float64, in [0, 1). Returns tokens (R,) and their log-probs (R,), in float32
    (float64 for float64 logits). Sums are in float64. Logits that are not finite give a log-prob that is NaN. Not
    differentiable. ``impl``: "auto", "triton", "cpp" (float32 on a CPU) or "torch". "triton" reads the logits once in
    their dtype and needs no memory of their size; "torch" needs about 30 bytes for each bfloat16 logit.

    Raises ValueError for an ``impl`` that cannot run, and RuntimeError for shapes that do not match.
    """
    logits = logits.detach()
    chosen = choose(impl, "sample_tokens", logits, cpp=(torch.float32,))
    if chosen == "cpp":
        return torch.ops.nlgrpo.sample_tokens(logits, noise, temperature)
    if chosen == "triton":
        from . import sample_triton

        return sample_triton.sample_tokens(logits, noise, temperature)
    return reference.sample_tokens(logits, noise, temperature)
