"""Causal attention over packed sequences, and the choice of its implementation."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nlgrpo.kernels import split_and_rotate
from nlgrpo.model.segments import Segments

Rope = tuple[Tensor, Tensor] | None  # cos and sin, each (T, r/2); None: no rotation


class PackedAttention:
    """Causal attention over packed sequences, each of which attends only to itself.

        softmax(scale q k^T) v

    The softmax runs over the keys of the same sequence at or before the query; with a window W, over the last W of
    them. Sequences can share prefixes (`Segments`): a prefix is computed once, and its keys serve all of them.

    Built once per micro-batch from the lengths of the sequences or their `Segments`, then called by every layer with
    ``qkv (T, H + 2 Hk, d)`` before the rotation: ``heads`` = H query heads, then Hk key heads, then Hk value heads; H
    is a multiple of Hk. Returns ``(T, H, d)``.
    """

    def __init__(self, lengths: Segments | Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.segments = Segments.of(lengths)
        self.kind = implementation(device.type, dtype)
        self._parts: dict[int | None, list[_Part]] = {}
        if self.kind in ("flash_attn", "varlen"):
            queries, offsets = self.segments.lengths, self.segments.offsets
            keys = [offset + length for offset, length in zip(offsets, queries, strict=True)]
            ends = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (queries, keys)]
            ends_q, ends_k = (x.to(device, non_blocking=True) for x in ends)
            self.bounds = (ends_q, ends_k, max(queries, default=0), max(keys, default=0))
            self.index = self.segments.key_index(device) if self.segments.shared else None

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        q, k, v = split_and_rotate(qkv, rope, heads)
        return self.attend(q, k, v, scale, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of split and rotated heads: q (T, H, d), k and v (T, Hk, d) -> (T, H, d)."""
        if self.kind == "flash_cpu":
            if window not in self._parts:
                self._parts[window] = _parts(self.segments, window, q)
            return cast(Tensor, _PartialAttention.apply(q, k, v, scale, self._parts[window]))
        if self.kind == "sdpa":
            return self._sdpa(q, k, v, scale, window)
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

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """One call per segment, with a copy of the keys of its prefix."""
        index, offsets, lengths = self.segments.key_index(q.device), self.segments.offsets, self.segments.lengths
        sizes = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
        out = []
        for query, key, value in zip(q.split(lengths), k[index].split(sizes), v[index].split(sizes), strict=True):
            mask = _mask(len(query), len(key), window, q.device)
            query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
            out.append(mixed[0].transpose(0, 1))
        return torch.cat(out) if out else torch.zeros_like(q)


@functools.cache
def implementation(device: str, dtype: torch.dtype) -> str:
    """Name of the implementation for a device type and dtype.

    On a CPU ``"flash_cpu"``, which never copies the keys of a prefix. In half precision on a GPU ``"flash_attn"`` if
    installed, else PyTorch's ``"varlen"``. Otherwise ``"sdpa"``.
    """
    if device == "cpu":
        return "flash_cpu"
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    return "flash_attn" if importlib.util.find_spec("flash_attn") else "varlen"


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Mask (queries, keys) of the keys that each query sees; the last query and the last key are the same token."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries + 1 - window)


# --- on a CPU ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Scores that one call computes. The queries and the keys are ``batch`` sequences of equal length each."""

    queries: slice
    keys: slice
    batch: int = 1
    causal: bool = True
    mask: Tensor | None = None  # added to the scores

    def heads(self, x: Tensor, tokens: slice) -> Tensor:
        """(T, H, ..) -> (batch, H, length, ..)."""
        return x[tokens].unflatten(0, (self.batch, -1)).transpose(1, 2)


def _parts(segments: Segments, window: int | None, like: Tensor) -> list[_Part]:
    """Split the scores into parts: first those of each segment with itself, then those of suffixes with their prefix.

    Consecutive segments of equal length share a call, which is faster on a CPU than padding.
    """
    own, cross = list[_Part](), list[_Part]()
    start = 0
    for length, run in itertools.groupby(segments.lengths):
        count = len(list(run))
        tokens = slice(start, start := start + count * length)
        if length:
            hidden = window is not None and length > window
            mask = _additive(_mask(length, length, window, like.device), like) if hidden else None
            own.append(_Part(tokens, tokens, count, mask is None, mask))
    for group in segments.groups():
        cross += _cross_parts(*group, window, like)
    return own + cross


def _cross_parts(start: int, length: int, suffixes: list[int], window: int | None, like: Tensor) -> list[_Part]:
    """Parts of the suffixes of a prefix with its keys: one part, or, where a window hides some keys, one per suffix."""
    begin = start + length  # of the suffixes
    if not length or not sum(suffixes):
        return []
    if window is None or length + max(suffixes) <= window:
        return [_Part(slice(begin, begin + sum(suffixes)), slice(start, begin), causal=False)]
    parts = []
    starts = itertools.accumulate(suffixes, initial=begin)
    for first, suffix in zip(starts, suffixes, strict=False):
        queries, keys = min(suffix, window - 1), min(length, window - 1)  # the others see nothing of the prefix
        if queries:
            mask = _additive(_mask(queries, keys + queries, window, like.device)[:, :keys], like)
            parts.append(_Part(slice(first, first + queries), slice(begin - keys, begin), causal=False, mask=mask))
    return parts


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)


class _PartialAttention(torch.autograd.Function):
    """Attention whose softmax runs over several parts, each computed by PyTorch's flash attention.

        out = sum_p exp(lse_p - lse) out_p,    lse = log sum_p exp(lse_p)

    The backward pass of each part uses the total ``out`` and ``lse``, which gives its share of the gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: list[_Part]) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = out.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in parts:
            inputs = part.heads(q, part.queries), part.heads(k, part.keys), part.heads(v, part.keys)
            mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, part.causal, attn_mask=part.mask, scale=scale
            )
            mixed, log_sum = mixed.transpose(1, 2).flatten(0, 1), log_sum.transpose(1, 2).flatten(0, 1)
            if part.queries == part.keys:
                out[part.queries], lse[part.queries] = mixed, log_sum
            else:
                before = lse[part.queries]
                total = torch.logaddexp(before, log_sum)
                weight = (log_sum - total).exp_()[..., None]
                out[part.queries] = torch.lerp(out[part.queries].to(lse), mixed.to(lse), weight)
                lse[part.queries] = total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.parts = scale, parts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for part in ctx.parts:
            spans = (part.queries, part.keys, part.keys)
            inputs = [part.heads(x, span) for x, span in zip((q, k, v), spans, strict=True)]
            results = [part.heads(x, part.queries) for x in (out, lse)]
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part.heads(grad, part.queries), *inputs, *results, 0.0, part.causal, attn_mask=part.mask,
                scale=ctx.scale,
            )  # fmt: skip
            for total, share, span in zip(grads, shares, spans, strict=True):
                share = share.transpose(1, 2).flatten(0, 1)
                if part.queries == part.keys:
                    total[span] = share
                else:
                    total[span] += share
        return (*grads, None, None)
