"""Empirical CDFs: the rank of a reward among many others (`ranks`, `cdf`), and `ECDF`, sorted once and queried often.

    strict  #{s < x} / M        weak  #{s <= x} / M        mid  the mean of both

The tensor functions come from `nlgrpo.kernels.ecdf`. `ECDF` stores sorted rows; it can be queried, merged and saved.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nlgrpo.calibration import kolmogorov_smirnov
from nlgrpo.calibration.log_cdf import Exponential, add_half, fit_exponential
from nlgrpo.kernels import ecdf as kernel
from nlgrpo.kernels import ecdf_torch
from nlgrpo.kernels.ecdf import Side, argsort, cdf, ranks

__all__ = ["ECDF", "argsort", "cdf", "ks_distance", "ks_test", "ranks"]

Smoother = Literal["add-half", "exponential"]
FORMAT = {"format": "nlgrpo.ecdf", "version": "1"}


class ECDF:
    """Empirical CDFs of rows of samples, sorted once. Immutable.

    ``samples`` (M,) or (..., M), or ragged (S,) with ``offsets`` (P + 1,); ``weights`` of the same shape, 1 by default.
    See `nlgrpo.kernels.ecdf` for the formats. The attributes are ``samples`` in ascending order, ``weights`` in that
    order, float64 or None, and ``offsets``, int64 or None.

    Raises ValueError as `ranks`.
    """

    samples: Tensor
    weights: Tensor | None
    offsets: Tensor | None

    def __init__(self, samples: Tensor, *, weights: Tensor | None = None, offsets: Tensor | None = None) -> None:
        if weights is None:
            self.samples = kernel.sort(samples, offsets=offsets)
            self.weights = None
        else:
            self.samples, self.weights = kernel.sort_weighted(samples, weights, offsets=offsets)
        self.offsets = None if offsets is None else offsets.to(torch.int64, copy=True)

    @classmethod
    def _of_sorted(cls, samples: Tensor, weights: Tensor | None, offsets: Tensor | None) -> ECDF:
        ecdf = cls.__new__(cls)
        ecdf.samples = samples
        ecdf.weights = weights
        ecdf.offsets = offsets
        return ecdf

    def __len__(self) -> int:
        """Number of samples over all rows."""
        return self.samples.numel()

    def __repr__(self) -> str:
        if self.offsets is not None:
            shape = f"{self._rows} ragged rows, {len(self)} samples"
        else:
            shape = f"{'x'.join(map(str, self.samples.shape))} samples"
        weighted = ", weighted" if self.weights is not None else ""
        return f"ECDF({shape}{weighted}, {str(self.samples.dtype).removeprefix('torch.')} on {self.samples.device})"

    def cdf(
        self,
        queries: Tensor,
        side: Side = "mid",
        *,
        query_offsets: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the CDF of each row at its queries, of their shape; see `nlgrpo.kernels.ecdf.cdf` for the shapes."""
        return kernel.evaluate(
            self.samples,
            queries,
            side,
            cumulative=self._cumulative,
            offsets=self.offsets,
            query_offsets=query_offsets,
            dtype=dtype,
        )

    def log_cdf(
        self,
        queries: Tensor,
        side: Side = "strict",
        smoother: Smoother | None = "add-half",
        *,
        query_offsets: Tensor | None = None,
    ) -> Tensor:
        """Return log F at the queries, float64, of their shape.

        ``smoother``: None is log F itself, -inf where F is 0. "add-half" is log((count + 1/2) / (M + 1)), count = M F
        of M samples, weighted or not. "exponential" is -a e^{-b r}, fitted to each row's samples with F > 0
        (`log_cdf.fit_exponential`; vBoN, Sec. 6), which extrapolates below the smallest and above the largest sample.

        Raises ValueError for another smoother, for rows that cannot be fitted, and as `cdf`.
        """
        if smoother not in (None, "add-half", "exponential"):
            raise ValueError(f"smoother={smoother!r} is not known; expected None, 'add-half' or 'exponential'.")
        F = self.cdf(queries, side, query_offsets=query_offsets)
        if smoother is None:
            return F.log()
        rows = None if query_offsets is None else ecdf_torch.row_ids(query_offsets.to(torch.int64), F.shape[0])
        if smoother == "add-half":
            return add_half(F, self.samples.shape[-1] if self.offsets is None else self._sizes[rows])
        if rows is not None:
            return self._fit(side)(queries.detach(), rows)
        by_row = queries.detach().reshape(self._rows, queries.numel() // max(1, self._rows))
        return self._fit(side)(by_row).view(queries.shape)

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Return the q-quantiles inf{x : F(x) >= q} of the weak CDF F, which are samples; min{x : F(x) > 0} at q = 0.

        q in [0, 1], of any shape K; the result is K for samples (M,), (..., K) for (..., M), (P, K) for ragged rows,
        in the dtype of the samples. It inverts the CDF as computed: at q = k/M it is the k-th smallest sample, even if
        the product q M rounds to above k. Raises ValueError for q outside [0, 1].
        """
        try:
            q = torch.as_tensor(q, dtype=torch.float64, device=self.samples.device)
        except (TypeError, ValueError) as error:
            raise ValueError(f"quantile: expected probabilities in [0, 1], got {q!r}.") from error
        wrong = q[~((q >= 0) & (q <= 1))]
        if wrong.numel():
            raise ValueError(f"quantile {float(wrong[0])}: expected probabilities in [0, 1].")
        flat = q.reshape(-1)
        at = self._positions(flat) if self.weights is None else self._weighted_positions(flat)
        if self.offsets is not None:
            return self.samples[self.offsets[:-1, None] + at].view((self._rows, *q.shape))
        rows = self.samples.reshape(self._rows, self.samples.shape[-1])
        return rows.gather(1, at.expand(self._rows, -1)).view((*self.samples.shape[:-1], *q.shape))

    def merge(self, other: ECDF) -> ECDF:
        """Return the ECDF of the samples of both, row by row, in linear time. Neither is modified.

        Raises ValueError for another dtype, device, number of rows or layout, and if only one is weighted.
        """
        if not isinstance(other, ECDF):
            raise ValueError(f"expected an ECDF to merge with, got {type(other).__name__}; use ECDF(samples).")
        if self._layout != other._layout or self.samples.device != other.samples.device:
            raise ValueError(f"cannot merge {self!r} and {other!r}: dtype, device, rows and weights must agree.")
        offsets = None
        if self.offsets is not None and other.offsets is not None:
            offsets = (self.offsets, other.offsets)
        total = None if offsets is None else offsets[0] + offsets[1]
        if self.weights is None or other.weights is None:
            return self._of_sorted(kernel.merge(self.samples, other.samples, offsets=offsets), None, total)
        weights = (self.weights, other.weights)
        merged, masses = kernel.merge(self.samples, other.samples, offsets=offsets, weights=weights)
        return self._of_sorted(merged, masses, total)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> ECDF:
        """Return the ECDF of the samples of all ranks of ``group``, on every rank; without a process group, ``self``.

        Row sizes may differ between ranks. The ranks exchange their sorted samples, and each rank merges them. The
        backend must support the device of the samples (NCCL: a GPU). Raises ValueError on all ranks if their dtypes,
        numbers of rows or weights do not agree.
        """
        if not dist.is_available() or not dist.is_initialized():
            return self
        shards = _gather_shards(self, group)
        # in pairs, so that each sample is moved log2(ranks) times
        while len(shards) > 1:
            pairs = [a.merge(b) for a, b in zip(shards[::2], shards[1::2], strict=False)]
            shards = pairs + shards[2 * len(pairs) :]
        return shards[0]

    def to(self, device: torch.device | str) -> ECDF:
        """Return this ECDF with its tensors on ``device``."""
        weights = None if self.weights is None else self.weights.to(device)
        offsets = None if self.offsets is None else self.offsets.to(device)
        return self._of_sorted(self.samples.to(device), weights, offsets)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically."""
        target = Path(path)
        named = {"samples": self.samples, "weights": self.weights, "offsets": self.offsets}
        tensors = {name: x.cpu().contiguous() for name, x in named.items() if x is not None}
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            partial = Path(folder, target.name)
            save_file(tensors, partial, metadata=FORMAT)
            os.replace(partial, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> ECDF:
        """Load a file written by `save`, bit for bit. Raises ValueError for any other file."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not an ECDF file: {error}.") from None
        if metadata != FORMAT or "samples" not in tensors:
            raise ValueError(f"{path} is not an ECDF file: expected {FORMAT} in its header, got {metadata}.")
        samples = tensors["samples"]
        weights = tensors.get("weights")
        offsets = tensors.get("offsets")
        # this also validates all
        again = cls(samples, weights=weights, offsets=offsets)
        if not torch.equal(again.samples, samples):
            raise ValueError(f"{path} is not an ECDF file: its samples are not sorted.")
        return cls._of_sorted(samples, weights, offsets).to(device)

    @property
    def _rows(self) -> int:
        return self.samples.shape[:-1].numel() if self.offsets is None else self.offsets.shape[0] - 1

    @functools.cached_property
    def _sizes(self) -> Tensor:
        assert self.offsets is not None
        return self.offsets.diff()

    def _by_row(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor with one element per sample into its rows."""
        if self.offsets is not None:
            return x.split(self._sizes.tolist())
        return x.reshape(self._rows, self.samples.shape[-1]).unbind()

    @property
    def _layout(self) -> tuple[object, ...]:
        """Properties that must agree for two ECDFs to merge."""
        rows = self.samples.shape[:-1] if self.offsets is None else self._rows
        return self.samples.dtype, self.weights is None, self.offsets is None, rows

    @functools.cached_property
    def _cumulative(self) -> Tensor | None:
        return None if self.weights is None else kernel.cumulate(self.weights, offsets=self.offsets)

    @functools.cached_property
    def _fits(self) -> dict[str, Exponential]:
        return {}

    def _fit(self, side: Side) -> Exponential:
        if side not in self._fits:
            cdf_of_samples = self._by_row(self.cdf(self.samples, side, query_offsets=self.offsets))
            weights = None if self.weights is None else self._by_row(self.weights)
            self._fits[side] = fit_exponential(self._by_row(self.samples), cdf_of_samples, weights)
        return self._fits[side]

    def _positions(self, q: Tensor) -> Tensor:
        """Index within its row of the smallest sample with k / M >= q, (P or 1, K). k / M rounds unlike ceil(q M)."""
        if self.offsets is None:
            M = torch.tensor([[self.samples.shape[-1]]], device=q.device)
        else:
            M = self._sizes[:, None]
        k = (q * M).ceil()
        k = torch.where((k - 1) / M >= q, k - 1, k)
        k = torch.where(k / M < q, k + 1, k)
        return k.long().clamp(min=1) - 1

    def _weighted_positions(self, q: Tensor) -> Tensor:
        """The same with weights: the number of samples with F < q, or with F = 0 for q = 0."""
        positive_q = q.clamp(min=math.ulp(0.0))
        sums = self._cumulative
        assert sums is not None
        if self.offsets is None:
            F = (sums / sums[..., -1:]).reshape(self._rows, sums.shape[-1])
            counts = kernel.evaluate(F, positive_q.expand(self._rows, -1), "strict") * F.shape[-1]
        else:
            F = sums / sums[self.offsets[1:] - 1][ecdf_torch.row_ids(self.offsets, len(self))]
            q_rows = torch.arange(self._rows + 1, device=q.device) * q.numel()
            all_q = positive_q.repeat(self._rows)
            below = kernel.evaluate(F, all_q, "strict", offsets=self.offsets, query_offsets=q_rows)
            counts = below.view(self._rows, q.numel()) * self._sizes[:, None]
        return counts.round().long()


def ks_distance(a: Tensor | ECDF, b: Tensor | ECDF) -> Tensor:
    """Kolmogorov-Smirnov distance sup_x |F_a(x) - F_b(x)| of two samples, tensors or ECDFs, row by row; float64.

    (M,) and (M',) give a scalar, (..., M) and (..., M') the leading shape, ragged ECDFs (P,). Linear time for ECDFs.
    Raises ValueError for a different number of rows, and as `ECDF`.
    """
    return _distance(*_two(a, b))


def ks_test(a: Tensor | ECDF, b: Tensor | ECDF, method: str = "auto") -> tuple[Tensor, Tensor]:
    """Return `ks_distance` and its p-value under the hypothesis that both samples have one continuous distribution.

    ``method``: "exact", "asymp", or "auto" (exact up to 10,000 samples), as in `scipy.stats.ks_2samp`. Both results are
    float64, of the shape of the distance.

    Raises ValueError for weighted ECDFs, whose distance has no known distribution, and as `ks_distance`.
    """
    first, second = _two(a, b)
    if first.weights is not None or second.weights is not None:
        raise ValueError("ks_test: no p-value is known for weighted samples; ks_distance gives their distance.")
    distances = _distance(first, second)
    of_first = first._by_row(first.samples)
    of_second = second._by_row(second.samples)
    p = []
    for x, y, distance in zip(of_first, of_second, distances.reshape(-1).tolist(), strict=True):
        p.append(kolmogorov_smirnov.p_value(x, y, distance, method))
    return distances, distances.new_tensor(p).view(distances.shape)


def _two(a: Tensor | ECDF, b: Tensor | ECDF) -> tuple[ECDF, ECDF]:
    """Return both as ECDFs of one dtype."""
    first = a if isinstance(a, ECDF) else ECDF(a)
    second = b if isinstance(b, ECDF) else ECDF(b)
    common = torch.promote_types(first.samples.dtype, second.samples.dtype)
    first = ECDF._of_sorted(first.samples.to(common), first.weights, first.offsets)
    second = ECDF._of_sorted(second.samples.to(common), second.weights, second.offsets)
    if first._layout[2:] != second._layout[2:]:
        raise ValueError(f"{first!r} and {second!r}: expected the same number of rows, both dense or both ragged.")
    return first, second


def _distance(a: ECDF, b: ECDF) -> Tensor:
    offsets = None if a.offsets is None or b.offsets is None else (a.offsets, b.offsets)
    return kolmogorov_smirnov.distance((a.samples, b.samples), (a.weights, b.weights), offsets)


def _gather_shards(mine: ECDF, group: dist.ProcessGroup | None) -> list[ECDF]:
    """Return the ECDFs of all ranks, in rank order."""
    samples = mine.samples
    dtype = list(kernel.FLOATS).index(samples.dtype)
    weighted = mine.weights is not None
    ragged = mine.offsets is not None
    kind = [dtype, int(weighted), int(ragged), samples.ndim, mine._rows]
    header = torch.tensor([*kind, samples.shape[-1]], device=samples.device)
    headers = [torch.empty_like(header) for _ in range(dist.get_world_size(group))]
    dist.all_gather(headers, header, group)
    kinds = [tuple(h.tolist()[:-1]) for h in headers]
    if len(set(kinds)) > 1:
        seen = ", ".join(map(str, kinds))
        raise ValueError(
            f"{mine!r}: dtype, layout, number of rows and weights must agree on all ranks; per rank: {seen} (index of "
            "the dtype, weighted, ragged, dimensions, rows)."
        )
    ranks = len(headers)
    widths = [int(h[-1]) for h in headers]
    sizes = widths if ragged else [mine._rows * width for width in widths]
    parts = _gather(samples, sizes, group)
    weights = [None] * ranks if mine.weights is None else _gather(mine.weights, sizes, group)
    offsets = [None] * ranks if mine.offsets is None else _gather(mine.offsets, [mine._rows + 1] * ranks, group)
    shards = []
    for part, weight, offset, width in zip(parts, weights, offsets, widths, strict=True):
        shape = (*samples.shape[:-1], width)
        shards.append(ECDF._of_sorted(part.view(shape), None if weight is None else weight.view(shape), offset))
    return shards


def _gather(x: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather flat tensors of ``sizes`` elements from all ranks, as bytes, which every backend supports."""
    longest = max(sizes) * x.element_size()
    if longest == 0:
        return [x.new_empty(0) for _ in sizes]
    padded = torch.zeros(longest, dtype=torch.uint8, device=x.device)
    padded[: x.numel() * x.element_size()] = x.contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group)
    return [part[: size * x.element_size()].view(x.dtype) for part, size in zip(parts, sizes, strict=True)]
