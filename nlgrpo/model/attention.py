"""Causal attention over packed sequences, and the choice of its implementation."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nlgrpo.kernels import split_and_rotate

Rope = tuple[Tensor, Tensor] | None  # cos and sin, each (T, r/2); None: no rotation


class PackedAttention:
    """Causal attention over packed sequences, each of which attends only to itself.

        softmax(scale q k^T) v

    The softmax runs over the keys of the same sequence at or before the query; with a window W, over the last W of
    them.

    Built once per micro-batch from the sequence ``lengths``, then called by every layer with ``qkv (T, H + 2 Hk, d)``
    before the rotation: ``heads`` = H query heads, then Hk key heads, then Hk value heads; H is a multiple of Hk.
    Returns ``(T, H, d)``.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths, default=0)
        self.kind = implementation(device.type, dtype)
        if self.kind != "sdpa":
            ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.cu_seqlens = ends.to(device, non_blocking=True)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        q, k, v = split_and_rotate(qkv, rope, heads)
        return self.attend(q, k, v, scale, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of split and rotated heads: q (T, H, d), k and v (T, Hk, d) -> (T, H, d)."""
        if self.kind == "sdpa":
            return self._sdpa(q, k, v, scale, window)
        left = -1 if window is None else window - 1
        bounds = (self.cu_seqlens, self.cu_seqlens, self.longest, self.longest)
        if self.kind == "flash_attn":
            from flash_attn import flash_attn_varlen_func

            return flash_attn_varlen_func(q, k, v, *bounds, softmax_scale=scale, causal=True, window_size=(left, 0))
        from torch.nn.attention.varlen import varlen_attn

        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return cast(Tensor, varlen_attn(q, k, v, *bounds, scale=scale, window_size=(left, 0)))

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """One call for each run of consecutive sequences of equal length, which is faster on a CPU than padding.

        The result of a sequence does not depend, bit for bit, on the others in its call.
        """
        runs = [(length, len(list(run))) for length, run in itertools.groupby(self.lengths)]
        out = []
        parts = (x.split([length * count for length, count in runs]) for x in (q, k, v))
        for (length, count), *qkv in zip(runs, *parts, strict=True):
            mask = None
            if window is not None and length > window:
                mask = q.new_ones(length, length, dtype=torch.bool).tril().triu(1 - window)
            query, key, value = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            grouped = q.shape[1] != k.shape[1]
            out_i = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            out.append(out_i.transpose(1, 2).flatten(0, 1))
        return torch.cat(out) if out else torch.zeros_like(q)


@functools.cache
def implementation(device: str, dtype: torch.dtype) -> str:
    """Name of the implementation for a device type and dtype.

    In half precision on a GPU: ``"flash_attn"`` if installed, else PyTorch's ``"varlen"``. Otherwise ``"sdpa"``.
    """
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    return "flash_attn" if importlib.util.find_spec("flash_attn") else "varlen"
