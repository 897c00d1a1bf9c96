"""Empirical CDFs in plain PyTorch, for GPUs, ``torch.compile`` and installs without a compiler.

The same functions as the compiled ops (csrc/). Dense rows are (P, M); ragged rows are concatenated in (S,), row p from
offsets[p] to offsets[p + 1]. ``side``: 0 strict, 1 weak, 2 mid. There are no loops over rows, and memory is linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRICT = 0
WEAK = 1
MID = 2
LEVELS = 32  # halvings or doublings, enough for rows of 4 billion


def ranks(samples: Tensor, offsets: Tensor | None, weights: Tensor | None, side: int, dtype: torch.dtype) -> Tensor:
    """CDF of each row at its own samples, of their shape."""
    order = argsort(samples, offsets)
    ordered = take(samples, order, offsets)
    cumulative = None if weights is None else cumulate(take(weights, order, offsets), offsets)
    result = evaluate(ordered, offsets, ordered, offsets, cumulative, side, dtype)  # sorted queries are fast
    if offsets is not None:
        order = order + offsets[row_ids(offsets, order.shape[0])]
    return torch.empty_like(result).scatter_(-1, order, result)


def evaluate(
    ordered: Tensor,
    offsets: Tensor | None,
    queries: Tensor,
    query_offsets: Tensor | None,
    cumulative: Tensor | None,
    side: int,
    dtype: torch.dtype,
) -> Tensor:
    """CDF of sorted rows at the queries of each row; ``cumulative``: inclusive sums of the weights in that order."""
    if side == MID:
        sides = [_count(ordered, offsets, queries, query_offsets, weak) for weak in (False, True)]
    else:
        sides = [_count(ordered, offsets, queries, query_offsets, side == WEAK)]
    if cumulative is not None:
        parts = [_mass(cumulative, offsets, count, query_offsets) for count in sides]
        return (sum(parts[1:], parts[0]) / len(parts)).to(dtype)
    if offsets is None or query_offsets is None:
        return (sum(sides[1:], sides[0]).double() / (len(sides) * ordered.shape[-1])).to(dtype)
    size = offsets.diff()[row_ids(query_offsets, queries.shape[0])]
    return (sum(sides[1:], sides[0]).double() / (len(sides) * size)).to(dtype)


def sort(samples: Tensor, offsets: Tensor | None) -> Tensor:
    if offsets is None:
        return samples.sort(dim=-1, stable=True).values
    return take(samples, argsort(samples, offsets), offsets)


def argsort(samples: Tensor, offsets: Tensor | None) -> Tensor:
    """Indices within the row that sort each row (stable)."""
    if offsets is None:
        return samples.argsort(dim=-1, stable=True)
    row = row_ids(offsets, samples.shape[0])
    by_value = samples.argsort(stable=True)
    return by_value[row[by_value].argsort(stable=True)] - offsets[row]


def take(x: Tensor, at: Tensor, offsets: Tensor | None) -> Tensor:
    """Take the elements of each row at the indices ``at`` within the row."""
    if offsets is None:
        return x.gather(-1, at)
    return x[at + offsets[row_ids(offsets, at.shape[0])]]


def row_ids(offsets: Tensor, total: int) -> Tensor:
    """Row index of each of ``total`` elements, (total,) int64."""
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff(), output_size=total)


def cumulate(weights: Tensor, offsets: Tensor | None) -> Tensor:
    """Inclusive sums along each row, in float64, never decreasing."""
    if offsets is None:
        sums = weights.double().cumsum(-1)
        return sums.cummax(-1).values if sums.is_cuda else sums  # a parallel sum may decrease by rounding
    # Differences of a cumulative sum over all rows would be inaccurate for a light row after a heavy one. Sums of 1, 2,
    # 4, ... neighbours stay within a row.
    index = _local(weights, offsets)
    sums = weights.double()
    for level in range(_levels(offsets)):
        sums = sums + torch.where(index >= 1 << level, sums.roll(1 << level), 0.0)
    for level in range(_levels(offsets)):  # neighbours are added in another order and may decrease by rounding
        sums = torch.maximum(sums, torch.where(index >= 1 << level, sums.roll(1 << level), 0.0))
    return sums


def merge(
    a: Tensor,
    a_offsets: Tensor | None,
    b: Tensor,
    b_offsets: Tensor | None,
    a_weights: Tensor | None,
    b_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Merge two sorted arrays row by row, ``a`` before ``b`` among equals; also their weights, or an empty tensor."""
    at_a = _local(a, a_offsets) + _count(b, b_offsets, a, a_offsets, weak=False)
    at_b = _local(b, b_offsets) + _count(a, a_offsets, b, b_offsets, weak=True)
    if a_offsets is not None and b_offsets is not None:
        starts = a_offsets + b_offsets
        at_a = at_a + starts[row_ids(a_offsets, a.shape[0])]
        at_b = at_b + starts[row_ids(b_offsets, b.shape[0])]
    at = torch.cat((at_a, at_b), -1)
    values = torch.cat((a, b), -1)
    merged = torch.empty_like(values).scatter_(-1, at, values)
    if a_weights is None or b_weights is None:
        return merged, merged.new_empty(0, dtype=torch.float64)
    masses = torch.cat((a_weights, b_weights), -1)
    return merged, torch.empty_like(masses).scatter_(-1, at, masses)


def _local(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Index of each element within its row."""
    index = torch.arange(x.shape[-1], device=x.device)
    return index.expand(x.shape) if offsets is None else index - offsets[row_ids(offsets, x.shape[0])]


def _count(
    ordered: Tensor, offsets: Tensor | None, queries: Tensor, query_offsets: Tensor | None, weak: bool
) -> Tensor:
    """Number of samples of the row below each query (with ``weak``: below or equal), int64."""
    if offsets is None or query_offsets is None:
        return torch.searchsorted(ordered, queries, right=weak)
    row = row_ids(query_offsets, queries.shape[0])
    start = offsets[row]
    end = offsets[row + 1]
    position = start
    for level in reversed(range(_levels(offsets))):
        ahead = position + (1 << level)
        sample = ordered[torch.minimum(ahead, end) - 1]
        counts = (sample <= queries) if weak else (sample < queries)
        position = torch.where((ahead <= end) & counts, ahead, position)
    return position - start


def _mass(cumulative: Tensor, offsets: Tensor | None, count: Tensor, query_offsets: Tensor | None) -> Tensor:
    """Weight of the first ``count`` samples of the row, divided by the total weight of the row."""
    last = (count - 1).clamp(min=0)
    if offsets is None or query_offsets is None:
        below = cumulative.gather(-1, last)
        total = cumulative[:, -1:]
    else:
        row = row_ids(query_offsets, count.shape[0])
        below = cumulative[offsets[row] + last]
        total = cumulative[offsets[row + 1] - 1]
    return torch.where(count > 0, below, 0.0) / total


def _levels(offsets: Tensor) -> int:
    """Number of powers of two up to the longest row; a constant under ``torch.compile``, which cannot read the data."""
    if torch.compiler.is_compiling():
        return LEVELS
    return int(offsets.diff().amax()).bit_length() if offsets.shape[0] > 1 else 0
