"""Causal attention over packed sequences, and the one place that decides which implementation runs it."""

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
    """Causal attention in which each of several sequences, laid end to end, sees only itself.

    softmax(q k^T scale, over the keys of the same sequence at or before the query and, with a window W, less than W
    behind it) v

    Built once a micro-batch from the sequence ``lengths``, then called by every layer with ``qkv (T, H + 2 Hk, d)``,
    not rotated yet (``heads`` = H of queries, then keys, then values; H a multiple of Hk); returns ``(T, H, d)``.
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
        """The same for heads that have been split and rotated: q (T, H, d), k and v (T, Hk, d)."""
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
        """A call for each run of sequences of one length: exact lengths beat one padded call on a CPU.

        A group's samples have one length where none has ended; their results are those of a call each, bit for bit.
        """
        runs = [(length, len(list(run))) for length, run in itertools.groupby(self.lengths)]
        out = []
        parts = (x.split([length * count for length, count in runs]) for x in (q, k, v))
        for (length, count), *qkv in zip(runs, *parts, strict=True):
            mask = None
            if window is not None and length > window:
                mask = q.new_ones(length, length, dtype=torch.bool).tril().triu(1 - window)
            query, key, value = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)  # heads before tokens
            grouped = q.shape[1] != k.shape[1]
            out_i = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            out.append(out_i.transpose(1, 2).flatten(0, 1))
        return torch.cat(out) if out else torch.zeros_like(q)


@functools.cache
def implementation(device: str, dtype: torch.dtype) -> str:
    """``"flash_attn"`` where installed, else PyTorch's ``"varlen"``, for half precision on a GPU; else ``"sdpa"``."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    return "flash_attn" if importlib.util.find_spec("flash_attn") else "varlen"
