"""Empirical CDFs of rows of samples: ranks of the samples themselves, the CDF at queries, sorting and merging.

    strict  #{s < x} / M        weak  #{s <= x} / M        mid  the mean of both

Rows are dense, samples (..., M), or ragged: samples (S,) with ``offsets`` (P + 1,) int64, row p being
samples[offsets[p] : offsets[p + 1]]; no row is empty. With ``weights``, counts become sums of weights in float64, and M
their total. Weights have the shape of the samples, are finite and >= 0, and have a positive sum in every row.

Dtypes are float16, bfloat16, float32 and float64; -0 equals 0, and infinite samples are allowed. Not differentiable.
``impl`` is "auto", "cpp" (the compiled ops, on a CPU) or "torch". Invalid input raises ValueError; inside
``torch.compile`` the checks that read data (NaN, offsets, weights) are skipped.

Legend: P rows (prompts), M samples per row, Q queries per row, S samples in all rows.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from . import ecdf_torch
from .dispatch import use_cpp

try:
    import numpy as np
except ImportError:  # PyTorch works without NumPy
    np = None  # type: ignore[assignment]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIDES = {"strict": ecdf_torch.STRICT, "weak": ecdf_torch.WEAK, "mid": ecdf_torch.MID}
Side = Literal["strict", "weak", "mid"]
Pair = tuple[Tensor, Tensor]


def ranks(
    samples: Tensor,
    side: Side = "mid",
    *,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    impl: str = "auto",
) -> Tensor:
    """Empirical CDF of each row at its own samples, of the shape of ``samples``.

    In float64 it is exact: an integer count and one division, count / M (mid: / 2M). ``dtype=torch.float32`` rounds the
    result. Equal samples get equal values; a row of equal samples has 0 (strict), 1 (weak) or 1/2 (mid).

    Raises ValueError for NaN, naming the first; for M = 0 and empty rows; for offsets that do not increase from 0 to S;
    for shapes, dtypes and devices that do not match; for an unknown ``side``, ``dtype`` or ``impl``.
    """
    code = _side(side, dtype)
    x = _rows(samples, offsets, "samples")
    offsets = _offsets(offsets, x, "offsets", "samples")
    cpp = use_cpp(impl, "ecdf_ranks", x, dtypes=FLOATS)
    _refuse_nan(x, samples, "samples", offsets, cpp)
    w = None if weights is None else _weights(weights, samples, x, offsets)
    if cpp:
        result = torch.ops.nlgrpo.ecdf_ranks(x, offsets, w, code, dtype == torch.float64)
    else:
        result = ecdf_torch.ranks(x, offsets, w, code, dtype)
    return result.view(samples.shape)


def cdf(
    samples: Tensor,
    queries: Tensor,
    side: Side = "mid",
    *,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
    query_offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    impl: str = "auto",
) -> Tensor:
    """Empirical CDF of each row of ``samples`` at its queries, of the shape of ``queries``.

    samples (M,) with queries of any shape; samples (..., M) with queries (..., Q); ragged samples with ragged queries,
    whose ``query_offsets`` (P + 1,) may have empty rows. Samples and queries of two dtypes are compared in their common
    dtype. Accuracy and errors as `ranks`. At the samples it equals `ranks`.
    """
    code = _side(side, dtype)
    x = _rows(samples, offsets, "samples")
    offsets = _offsets(offsets, x, "offsets", "samples")
    cpp = use_cpp(impl, "ecdf_evaluate", x, dtypes=FLOATS)
    _refuse_nan(x, samples, "samples", offsets, cpp)
    w = None if weights is None else _weights(weights, samples, x, offsets)
    q, query_offsets = _queries(queries, query_offsets, samples, x, offsets, cpp)
    ordered, w = _order(x.to(q.dtype), offsets, w, cpp)
    cumulative = None if w is None else ecdf_torch.cumulate(w, offsets)
    return _evaluate(ordered, offsets, q, query_offsets, cumulative, code, dtype, cpp).view(queries.shape)


def evaluate(
    ordered: Tensor,
    queries: Tensor,
    side: Side = "mid",
    *,
    cumulative: Tensor | None = None,
    offsets: Tensor | None = None,
    query_offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    impl: str = "auto",
) -> Tensor:
    """`cdf` of rows that are already sorted and free of NaN, which is not checked.

    ``cumulative``: inclusive sums of the weights in that order, of the shape of ``ordered`` (`cumulate`).
    """
    code = _side(side, dtype)
    x = _rows(ordered, offsets, "ordered")
    offsets = _offsets(offsets, x, "offsets", "ordered")
    cpp = use_cpp(impl, "ecdf_evaluate", x, dtypes=FLOATS)
    if cumulative is not None:
        cumulative = _like(cumulative, ordered, "cumulative").to(torch.float64).reshape(x.shape).contiguous()
    q, query_offsets = _queries(queries, query_offsets, ordered, x, offsets, cpp)
    return _evaluate(x.to(q.dtype), offsets, q, query_offsets, cumulative, code, dtype, cpp).view(queries.shape)


def argsort(samples: Tensor, *, offsets: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Indices within the row that sort each row (stable), int64, of the shape of ``samples``.

    Raises ValueError as `ranks`.
    """
    x = _rows(samples, offsets, "samples")
    offsets = _offsets(offsets, x, "offsets", "samples")
    cpp = use_cpp(impl, "ecdf_argsort", x, dtypes=FLOATS)
    _refuse_nan(x, samples, "samples", offsets, cpp)
    return _argsort(x, offsets, cpp).view(samples.shape)


def sort(samples: Tensor, *, offsets: Tensor | None = None) -> Tensor:
    """Sort each row; shape and dtype of ``samples``. Raises ValueError as `ranks`."""
    x = _rows(samples, offsets, "samples")
    offsets = _offsets(offsets, x, "offsets", "samples")
    cpp = use_cpp("auto", "ecdf_argsort", x, dtypes=FLOATS)
    _refuse_nan(x, samples, "samples", offsets, cpp)
    return _sort(x, offsets, cpp).view(samples.shape)


def sort_weighted(samples: Tensor, weights: Tensor, *, offsets: Tensor | None = None) -> Pair:
    """Sort each row, and return its weights in that order in float64. Raises ValueError as `ranks`."""
    x = _rows(samples, offsets, "samples")
    offsets = _offsets(offsets, x, "offsets", "samples")
    cpp = use_cpp("auto", "ecdf_argsort", x, dtypes=FLOATS)
    _refuse_nan(x, samples, "samples", offsets, cpp)
    ordered, w = _order(x, offsets, _weights(weights, samples, x, offsets), cpp)
    assert w is not None
    return ordered.view(samples.shape), w.view(samples.shape)


def cumulate(weights: Tensor, *, offsets: Tensor | None = None) -> Tensor:
    """Inclusive sums of ``weights`` along each row in float64, of their shape; never decreasing."""
    w = _rows(weights, offsets, "weights")
    return ecdf_torch.cumulate(w, _offsets(offsets, w, "offsets", "weights")).view(weights.shape)


def merge(
    a: Tensor,
    b: Tensor,
    *,
    offsets: tuple[Tensor, Tensor] | None = None,
    weights: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> Tensor | Pair:
    """Merge two sorted arrays row by row, with ``a`` before ``b`` among equal samples.

    a (..., M) and b (..., M') give (..., M + M'). For ragged rows, ``offsets`` is a pair (of a, of b), and the offsets
    of the result are their sum. With a pair of ``weights`` the result is (merged, its weights in float64). The compiled
    version is linear in the number of samples. Both inputs must be sorted and free of NaN, which is not checked.

    Raises ValueError for different dtypes, devices and numbers of rows.
    """
    for name, pair in (("offsets", offsets), ("weights", weights)):
        if pair is not None and not (
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)
        ):
            raise ValueError(f"{name}: expected a pair of tensors, for a and b, got {type(pair).__name__} {pair!r}.")
    offsets_a, offsets_b = offsets or (None, None)
    x = _rows(a, offsets_a, "a")
    y = _rows(b, offsets_b, "b")
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"a is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; convert one with .to(other).")
    offsets_a = _offsets(offsets_a, x, "offsets[0]", "a")
    offsets_b = _offsets(offsets_b, y, "offsets[1]", "b")
    if offsets_a is None or offsets_b is None:
        same_rows = a.shape[:-1] == b.shape[:-1]
    else:
        same_rows = offsets_a.shape == offsets_b.shape
    if not same_rows:
        raise ValueError(f"a and b must have the same rows, got {_shape(a, offsets_a)} and {_shape(b, offsets_b)}.")
    u = v = None
    if weights is not None:
        u = _weights(weights[0], a, x, offsets_a, least=0)
        v = _weights(weights[1], b, y, offsets_b, least=0)
    cpp = use_cpp(impl, "ecdf_merge", x, y, dtypes=FLOATS)
    op = torch.ops.nlgrpo.ecdf_merge if cpp else ecdf_torch.merge
    merged, w = op(x, offsets_a, y, offsets_b, u, v)
    shape = (*a.shape[:-1], a.shape[-1] + b.shape[-1])
    if weights is None:
        return merged.view(shape)
    return merged.view(shape), w.view(shape)


def _order(x: Tensor, offsets: Tensor | None, weights: Tensor | None, cpp: bool) -> tuple[Tensor, Tensor | None]:
    """Sort the rows, and return their weights in that order."""
    if weights is None:
        return _sort(x, offsets, cpp), None
    at = _argsort(x, offsets, cpp)
    return ecdf_torch.take(x, at, offsets), ecdf_torch.take(weights, at, offsets)


def _argsort(x: Tensor, offsets: Tensor | None, cpp: bool) -> Tensor:
    return torch.ops.nlgrpo.ecdf_argsort(x, offsets) if cpp else ecdf_torch.argsort(x, offsets)


def _sort(x: Tensor, offsets: Tensor | None, cpp: bool) -> Tensor:
    """Sort rows by NumPy, which is fastest, where possible: it supports neither ragged rows nor bfloat16."""
    if offsets is not None:
        return ecdf_torch.take(x, _argsort(x, offsets, cpp), offsets)
    if np is None or not x.is_cpu or torch.compiler.is_compiling():
        return ecdf_torch.sort(x, None)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.from_numpy(np.sort(wide.numpy(), axis=-1)).to(x.dtype)


def _evaluate(
    ordered: Tensor,
    offsets: Tensor | None,
    queries: Tensor,
    query_offsets: Tensor | None,
    cumulative: Tensor | None,
    side: int,
    dtype: torch.dtype,
    cpp: bool,
) -> Tensor:
    if cpp:
        double = dtype == torch.float64
        return torch.ops.nlgrpo.ecdf_evaluate(ordered, offsets, queries, query_offsets, cumulative, side, double)
    return ecdf_torch.evaluate(ordered, offsets, queries, query_offsets, cumulative, side, dtype)


def _side(side: str, dtype: torch.dtype) -> int:
    if not isinstance(side, str) or side not in SIDES:
        raise ValueError(f"side={side!r} is not known; expected 'strict' (<), 'weak' (<=) or 'mid' (their mean).")
    if dtype is not torch.float64 and dtype is not torch.float32:
        raise ValueError(f"dtype={dtype}: expected torch.float64 or torch.float32.")
    return SIDES[side]


def _tensor(x: Tensor, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}; convert it with torch.as_tensor.")
    if x.dtype not in FLOATS:
        raise ValueError(
            f"{name}: expected float16, bfloat16, float32 or float64, got {str(x.dtype).removeprefix('torch.')}; "
            "convert it, for instance with .double()."
        )
    return x.detach()


def _rows(x: Tensor, offsets: Tensor | None, name: str) -> Tensor:
    """Return contiguous rows (P, M), or (S,) with offsets."""
    data = _tensor(x, name)
    if offsets is not None:
        if data.ndim != 1:
            raise ValueError(f"{name} with offsets: expected the rows concatenated, (S,), got {tuple(x.shape)}.")
        return data.contiguous()
    if data.ndim == 0 or data.shape[-1] == 0:
        raise ValueError(f"{name}: expected (..., M) with M >= 1, got {tuple(x.shape)}.")
    return data.reshape(-1, data.shape[-1]).contiguous()


def _offsets(offsets: Tensor | None, x: Tensor, name: str, of: str, *, empty: bool = False) -> Tensor | None:
    """Check the offsets of the rows of ``x`` and return them in int64. ``empty``: allow empty rows."""
    if offsets is None:
        return None
    integers = isinstance(offsets, Tensor) and offsets.dtype in (torch.int64, torch.int32)
    if not integers or offsets.ndim != 1 or offsets.shape[0] == 0:
        got = f"{offsets.dtype} {tuple(offsets.shape)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"{name}: expected an int64 tensor (P + 1,), got {got}.")
    if offsets.device != x.device:
        raise ValueError(f"{name} are on {offsets.device}, but {of} on {x.device}; move one with .to(device).")
    offsets = offsets.to(torch.int64).contiguous()
    if torch.compiler.is_compiling():
        return offsets
    sizes = offsets.diff()
    rising = sizes.numel() == 0 or int(sizes.amin()) >= (0 if empty else 1)
    if not rising or int(offsets[0]) != 0 or int(offsets[-1]) != x.shape[0]:
        raise ValueError(f"{name}: {_what_is_wrong(offsets.tolist(), x.shape[0], of)}")
    return offsets


def _what_is_wrong(offsets: list[int], total: int, of: str) -> str:
    if offsets[0] != 0:
        return f"the first must be 0, got {offsets[0]}."
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            return f"they decrease from {start} to {end} after row {row}; expected them to increase from 0 to {total}."
        if end > total:
            return f"row {row} ends at {end}, but {of} has {total} elements."
    if offsets[-1] != total:
        return f"the last must be {total}, the number of elements of {of}, got {offsets[-1]}."
    row = next(row for row in range(len(offsets) - 1) if offsets[row] == offsets[row + 1])
    return f"row {row} of {of} is empty (at {offsets[row]}); drop it, as an empty row has no CDF."


def _refuse_nan(x: Tensor, given: Tensor, name: str, offsets: Tensor | None, cpp: bool) -> None:
    """Raise ValueError that names the first NaN of ``x``, the rows of ``given``."""
    if torch.compiler.is_compiling() or x.numel() == 0:
        return
    if cpp:
        first_nan = torch.ops.nlgrpo.ecdf_first_nan(x)
    else:
        first_nan = int(x.isnan().view(-1).nonzero()[0]) if bool(x.amax().isnan()) else -1  # amax propagates NaN
    if first_nan >= 0:
        raise ValueError(f"{_place(first_nan, given, name, offsets)} is NaN; drop it, or replace it first.")


def _place(position: int, given: Tensor, name: str, offsets: Tensor | None) -> str:
    """Name an element as the caller would index it: "samples[3, 5]", and the row of a ragged one."""
    index: list[int] = []
    rest = position
    for size in reversed(given.shape):
        rest, i = divmod(rest, size)
        index.insert(0, i)
    row = "" if offsets is None else f" (in row {int((offsets <= position).sum()) - 1})"
    return f"{name}[{', '.join(map(str, index))}]{row}" if index else name


def _like(x: Tensor, samples: Tensor, name: str) -> Tensor:
    """Return ``x`` detached. Raises ValueError unless it has the shape and device of ``samples``."""
    data = _tensor(x, name)
    if x.shape != samples.shape or x.device != samples.device:
        raise ValueError(
            f"{name}: expected {tuple(samples.shape)} on {samples.device}, one per sample, "
            f"got {tuple(x.shape)} on {x.device}."
        )
    return data


def _weights(weights: Tensor, samples: Tensor, x: Tensor, offsets: Tensor | None, *, least: int = 1) -> Tensor:
    """Check weights and return them in float64, as rows. ``least=0``: the sum of a row may be 0."""
    w = _like(weights, samples, "weights").to(torch.float64).reshape(x.shape).contiguous()
    if torch.compiler.is_compiling() or w.numel() == 0:
        return w
    sums = w.sum(-1) if offsets is None else torch.segment_reduce(w, "sum", offsets=offsets)
    # NaN propagates
    lowest = float(sums.amin())
    total = float(sums.amax())
    if not (float(w.amin()) >= 0 and total < torch.inf and (lowest > 0 or least == 0)):
        raise ValueError(_bad_weight(w.view(-1), sums, weights, offsets))
    return w


def _bad_weight(w: Tensor, sums: Tensor, given: Tensor, offsets: Tensor | None) -> str:
    bad = (~((w >= 0) & w.isfinite())).nonzero()
    if len(bad):
        i = int(bad[0])
        return f"{_place(i, given, 'weights', offsets)} is {float(w[i])}; expected a finite number >= 0."
    row = int((~((sums > 0) & sums.isfinite())).nonzero()[0])
    return f"the weights of row {row} sum to {float(sums[row])}; expected a positive and finite sum."


def _queries(
    queries: Tensor, query_offsets: Tensor | None, samples: Tensor, x: Tensor, offsets: Tensor | None, cpp: bool
) -> tuple[Tensor, Tensor | None]:
    """Check queries and return them as rows, in the dtype for comparison with ``x``, with their offsets."""
    q = _tensor(queries, "queries")
    if q.device != x.device:
        raise ValueError(f"queries are on {q.device}, but the samples on {x.device}; move one with .to(device).")
    if (offsets is None) != (query_offsets is None):
        raise ValueError("ragged samples need ragged queries: give both offsets and query_offsets, or neither.")
    if query_offsets is not None and offsets is not None:
        if q.ndim != 1:
            raise ValueError(f"queries with query_offsets: expected the rows concatenated, (S,), got {tuple(q.shape)}.")
        query_offsets = _offsets(query_offsets, q, "query_offsets", "queries", empty=True)
        if query_offsets is not None and query_offsets.shape != offsets.shape:
            rows = offsets.shape[0] - 1, query_offsets.shape[0] - 1
            raise ValueError(f"query_offsets: expected the number of rows of the samples, {rows[0]}, got {rows[1]}.")
    elif samples.ndim == 1:
        q = q.reshape(1, -1)
    elif q.shape[:-1] != samples.shape[:-1] or q.ndim == 0:
        sizes = ", ".join(map(str, samples.shape[:-1]))
        raise ValueError(f"queries: expected ({sizes}, Q) for samples {tuple(samples.shape)}, got {tuple(q.shape)}.")
    else:
        q = q.reshape(x.shape[0], q.shape[-1])
    _refuse_nan(q.contiguous(), queries, "queries", query_offsets, cpp)
    common = torch.promote_types(torch.promote_types(x.dtype, q.dtype), torch.float32)
    return q.to(common).contiguous(), query_offsets


def _shape(x: Tensor, offsets: Tensor | None) -> str:
    return f"shape {tuple(x.shape)}" if offsets is None else f"{offsets.shape[0] - 1} ragged rows"
