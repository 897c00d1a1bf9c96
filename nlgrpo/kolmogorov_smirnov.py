"""Two-sample Kolmogorov-Smirnov: the distance of two sorted samples, and the probability of one as large by chance."""

from __future__ import annotations

import torch
from torch import Tensor

from nlgrpo.kernels import ecdf, ecdf_torch

METHODS = ("auto", "exact", "asymp")
MOST_EXACT = 10_000  # samples of the larger side up to which "auto" is exact, as in SciPy


def distance(
    samples: tuple[Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
    offsets: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """sup_x |F_a(x) - F_b(x)| of each row of two sorted arrays of one dtype, float64.

    Both functions are constant between samples, so it is the largest difference after a run of equal values of the two
    arrays merged. Dense (..., M) and (..., M') give the leading shape, ragged rows (P,). Linear in the samples.
    """
    a, b = samples
    of_a, of_b = (
        torch.ones_like(x, dtype=torch.float64) if w is None else w for x, w in zip(samples, weights, strict=True)
    )
    merged, from_a = ecdf.merge(a, b, offsets=offsets, weights=(of_a, torch.zeros_like(of_b)))
    if weights[1] is None and weights[0] is None:
        from_b = 1 - from_a
    else:
        _, from_b = ecdf.merge(a, b, offsets=offsets, weights=(torch.zeros_like(of_a), of_b))
    total = None if offsets is None else offsets[0] + offsets[1]
    gap = (_cdf(from_a, total) - _cdf(from_b, total)).abs()
    within = merged[..., 1:] == merged[..., :-1]  # a run goes on
    if total is None:
        gap[..., :-1].masked_fill_(within, 0.0)
        return gap.amax(-1)
    rows = ecdf_torch.row_ids(total, gap.shape[0])
    gap[:-1].masked_fill_(within & (rows[1:] == rows[:-1]), 0.0)
    return gap.new_zeros(total.shape[0] - 1).scatter_reduce_(0, rows, gap, "amax")


def p_value(a: Tensor, b: Tensor, distance: float, method: str = "auto") -> float:
    """Probability of a distance at least as large between samples of these two sizes of one continuous distribution.

    a (m,), b (n,). "exact": over all orders of the pooled samples; "asymp": Kolmogorov's distribution at the effective
    size m n / (m + n); "auto": exact up to 10,000 samples on either side. Those of `scipy.stats.ks_2samp`, which is not
    asked for what needs no second look at the samples. Ties make it conservative.

    Raises ValueError for another method.
    """
    from scipy.stats import ks_2samp, kstwo  # half a second's import

    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; expected 'auto', 'exact' or 'asymp'.")
    m, n = len(a), len(b)
    if method == "exact" or (method == "auto" and max(m, n) <= MOST_EXACT):
        return float(ks_2samp(a.double().cpu().numpy(), b.double().cpu().numpy(), method="exact").pvalue)
    size = round(m * n / (m + n))
    return float(kstwo.sf(distance, size).clip(0.0, 1.0)) if size > 0 else 1.0  # one against one says nothing


def _cdf(masses: Tensor, offsets: Tensor | None) -> Tensor:
    sums = ecdf.cumulate(masses, offsets=offsets)
    if offsets is None:
        return sums / sums[..., -1:]
    return sums / sums[offsets[1:] - 1][ecdf_torch.row_ids(offsets, sums.shape[0])]
