"""Causal attention over packed sequences, and the choice of its implementation."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nlgrpo.errors import UserError
from nlgrpo.kernels import Segments, keys_of_segments, packed_attention, rotate_queries_and_keys

Rope = tuple[Tensor, Tensor] | None  # cos and sin, each (T, r/2); None: no rotation
KINDS = ("flash_attn", "varlen", "packed")
LARGEST_HEAD = 256  # of flash attention
HEAD_MULTIPLE = 8  # PyTorch's varlen attention takes heads of these sizes only; flash-attn pads others itself


class PackedAttention:
    """Causal attention over packed sequences, each of which attends only to itself; see `kernels.packed_attention`.

    Sequences can share prefixes (`Segments`): a prefix is computed once, and its keys serve all of them.

    Built once per micro-batch from the lengths of the sequences or their `Segments`, then called by every layer with
    ``qkv (T, H + 2 Hk, d)`` before the rotation: ``heads`` = H query heads, then Hk key heads, then Hk value heads; H
    is a multiple of Hk. ``window``: maximum number of tokens that a token sees. Returns ``(T, H, d)``.

    Heads larger than `LARGEST_HEAD` run by `kernels.packed_attention` on any device.
    """

    def __init__(
        self, lengths: Segments | Sequence[int], device: torch.device, dtype: torch.dtype, kind: str | None = None
    ) -> None:
        self.segments = Segments.of(lengths)
        self.kind = kind or implementation(device.type, dtype)
        if self.kind != "packed":
            longest = (max(self.segments.lengths, default=0), max(self.segments.key_lengths, default=0))
            self.bounds = (*self.segments.ends(device), *longest)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        if self.kind == "packed" or qkv.shape[2] > LARGEST_HEAD:
            return packed_attention(qkv, rope, self.segments, heads=heads, scale=scale, window=window)
        kv_heads = (qkv.shape[1] - heads) // 2
        q, kv = rotate_queries_and_keys(qkv, rope, heads).split((heads, 2 * kv_heads), dim=1)
        if self.segments.shared:
            kv = keys_of_segments(kv, self.segments)
            q = q.contiguous()  # a view would keep the keys and values from which those of the segments were copied
        k, v = kv.split(kv_heads, dim=1)
        left = -1 if window is None else window - 1
        if self.kind == "flash_attn":
            from flash_attn import flash_attn_varlen_func

            # PyTorch's flag says nothing to flash-attn, which has had this argument since 2.4.1.
            exact = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
            # Queries and keys end together: query i of l sees the keys up to n + i of n + l.
            return flash_attn_varlen_func(
                q, k, v, *self.bounds, softmax_scale=scale, causal=True, window_size=(left, 0), **exact
            )
        return self._varlen(q, k, v, scale, left)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> Tensor:
        """Attention by PyTorch's ``varlen_attn``. Zeros fill heads up to a multiple of 8: they change no product."""
        from torch.nn.attention.varlen import varlen_attn

        size = q.shape[2]
        missing = -size % HEAD_MULTIPLE
        if missing:
            q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
        grouped: dict[str, Any] = {}
        if q.shape[1] != k.shape[1] and takes_fewer_key_heads(varlen_attn):
            grouped = {"enable_gqa": True}
        elif q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = cast(Tensor, varlen_attn(q, k, v, *self.bounds, scale=scale, window_size=(left, 0), **grouped))
        return out[..., :size] if missing else out


@functools.cache
def takes_fewer_key_heads(varlen_attn: Callable[..., object]) -> bool:
    """Whether PyTorch's ``varlen_attn`` takes key heads that query heads share; that of older versions does not."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache
def implementation(device: str, dtype: torch.dtype) -> str:
    """Name of the implementation for a device type and dtype.

    In half precision on a GPU ``"flash_attn"`` if installed, else PyTorch's ``"varlen"``; the environment variable
    ``NLGRPO_ATTENTION`` names another one of `KINDS`. Otherwise ``"packed"``: `kernels.packed_attention`.

    Raises UserError for an unknown name in ``NLGRPO_ATTENTION``, and for "flash_attn" if it is not installed.
    """
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "packed"
    installed = importlib.util.find_spec("flash_attn") is not None
    chosen = os.environ.get("NLGRPO_ATTENTION") or ("flash_attn" if installed else "varlen")
    if chosen not in KINDS:
        raise UserError(f"NLGRPO_ATTENTION={chosen} is not known; expected one of {', '.join(KINDS)}")
    if chosen == "flash_attn" and not installed:
        raise UserError("NLGRPO_ATTENTION=flash_attn: flash-attn is not installed; install it, or use varlen or packed")
    return chosen
