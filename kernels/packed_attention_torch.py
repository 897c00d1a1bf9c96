"""Causal attention over packed sequences in plain PyTorch: by its flash attention on a CPU, else by SDPA."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import is_cpu
from .reference import split_and_rotate
from .segments import Segments, keys_of_segments


def packed_attention(
    qkv: Tensor, rope: tuple[Tensor, Tensor] | None, segments: Segments, heads: int, scale: float, window: int | None
) -> Tensor:
    """See `packed_attention.packed_attention`."""
    q, k, v = split_and_rotate(qkv, rope, heads)
    if is_cpu(qkv):
        return cast(Tensor, _PartialAttention.apply(q, k, v, scale, _parts(segments, window, q)))
    pairs = keys_of_segments(torch.stack((k, v), dim=1), segments).split(segments.key_lengths)
    out = [q[:0]]
    for query, pair in zip(q.split(segments.lengths), pairs, strict=True):
        key, value = pair.unbind(1)
        mask = _mask(len(query), len(key), window, q.device)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


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
    own: list[_Part] = []
    cross: list[_Part] = []
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
        # the others see nothing of the prefix
        queries = min(suffix, window - 1)
        keys = min(length, window - 1)
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
            mixed = mixed.transpose(1, 2).flatten(0, 1)
            log_sum = log_sum.transpose(1, 2).flatten(0, 1)
            if part.queries == part.keys:
                out[part.queries] = mixed
                lse[part.queries] = log_sum
            else:
                before = lse[part.queries]
                total = torch.logaddexp(before, log_sum)
                weight = (log_sum - total).exp_()[..., None]
                out[part.queries] = torch.lerp(out[part.queries].to(lse), mixed.to(lse), weight)
                lse[part.queries] = total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for part in ctx.parts:
            spans = (part.queries, part.keys, part.keys)
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part.heads(grad, part.queries),
                part.heads(q, part.queries),
                part.heads(k, part.keys),
                part.heads(v, part.keys),
                part.heads(out, part.queries),
                part.heads(lse, part.queries),
                0.0,
                part.causal,
                attn_mask=part.mask,
                scale=ctx.scale,
            )
            for total, share, span in zip(grads, shares, spans, strict=True):
                share = share.transpose(1, 2).flatten(0, 1)
                if part.queries == part.keys:
                    total[span] = share
                else:
                    total[span] += share
        return (*grads, None, None)
