"""Causal attention over packed sequences, and the choice of its implementation."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from nlgrpo.kernels import Segments, packed_attention, split_and_rotate

Rope = tuple[Tensor, Tensor] | None  # cos and sin, each (T, r/2); None: no rotation
KINDS = ("flash_attn", "varlen", "packed")


class PackedAttention:
    """Causal attention over packed sequences, each of which attends only to itself; see `kernels.packed_attention`.

    Sequences can share prefixes (`Segments`): a prefix is computed once, and its keys serve all of them.

    Built once per micro-batch from the lengths of the sequences or their `Segments`, then called by every layer with
    ``qkv (T, H + 2 Hk, d)`` before the rotation: ``heads`` = H query heads, then Hk key heads, then Hk value heads; H
    is a multiple of Hk. ``window``: maximum number of tokens that a token sees. Returns ``(T, H, d)``.
    """

    def __init__(
        self, lengths: Segments | Sequence[int], device: torch.device, dtype: torch.dtype, kind: str | None = None
    ) -> None:
        self.segments = Segments.of(lengths)
        self.kind = kind or implementation(device.type, dtype)
        if self.kind != "packed":
            queries, keys = self.segments.lengths, self.segments.key_lengths
            ends = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (queries, keys)]
            ends_q, ends_k = (x.to(device, non_blocking=True) for x in ends)
            self.bounds = (ends_q, ends_k, max(queries, default=0), max(keys, default=0))
            self.index = self.segments.key_index(device) if self.segments.shared else None

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        if self.kind == "packed":
            return packed_attention(qkv, rope, self.segments, heads=heads, scale=scale, window=window)
        q, k, v = split_and_rotate(qkv, rope, heads)
        left = -1 if window is None else window - 1
        if self.index is not None:
            k, v = k[self.index], v[self.index]
        if self.kind == "flash_attn":
            from flash_attn import flash_attn_varlen_func

            # Queries and keys end together: query i of l sees the keys up to n + i of n + l.
            return flash_attn_varlen_func(
                q, k, v, *self.bounds, softmax_scale=scale, causal=True, window_size=(left, 0)
            )
        from torch.nn.attention.varlen import varlen_attn

        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return cast(Tensor, varlen_attn(q, k, v, *self.bounds, scale=scale, window_size=(left, 0)))


@functools.cache
def implementation(device: str, dtype: torch.dtype) -> str:
    """Name of the implementation for a device type and dtype.

    In half precision on a GPU ``"flash_attn"`` if installed, else PyTorch's ``"varlen"``; the environment variable
    ``NLGRPO_ATTENTION`` names another one of `KINDS`. Otherwise ``"packed"``: `kernels.packed_attention`.

    Raises ValueError for an unknown name in ``NLGRPO_ATTENTION``, and for "flash_attn" if it is not installed.
    """
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "packed"
    installed = importlib.util.find_spec("flash_attn") is not None
    chosen = os.environ.get("NLGRPO_ATTENTION") or ("flash_attn" if installed else "varlen")
    if chosen not in KINDS:
        raise ValueError(f"NLGRPO_ATTENTION={chosen} is not known; expected one of {', '.join(KINDS)}")
    if chosen == "flash_attn" and not installed:
        raise ValueError(
            "NLGRPO_ATTENTION=flash_attn: flash-attn is not installed; install it, or use varlen or packed"
        )
    return chosen
