"""Two-sample Kolmogorov-Smirnov test: the distance of two sorted samples, and its p-value.

`ks_table` runs the test for every prompt on samples of two sizes (vBoN, Table 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nlgrpo.kernels import ecdf, ecdf_torch

METHODS = ("auto", "exact", "asymp")
MOST_EXACT = 10_000  # "auto" is exact up to this size of the larger sample, as in SciPy
COLUMNS = ("M", "against", "rejected", "rejection rate", "statistic", "p-value", "mean distance")


def distance(
    samples: tuple[Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
    offsets: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return sup_x |F_a(x) - F_b(x)| of each row of two sorted arrays of one dtype, float64.

    Both CDFs are constant between samples, so the supremum is the largest difference after a run of equal values in the
    merged array. Dense (..., M) and (..., M') give the leading shape, ragged rows (P,). Linear in the samples.
    """
    a, b = samples
    weights_a = torch.ones_like(a, dtype=torch.float64) if weights[0] is None else weights[0]
    weights_b = torch.ones_like(b, dtype=torch.float64) if weights[1] is None else weights[1]
    merged, from_a = ecdf.merge(a, b, offsets=offsets, weights=(weights_a, torch.zeros_like(weights_b)))
    if weights[1] is None and weights[0] is None:
        from_b = 1 - from_a
    else:
        _, from_b = ecdf.merge(a, b, offsets=offsets, weights=(torch.zeros_like(weights_a), weights_b))
    total = None if offsets is None else offsets[0] + offsets[1]
    gap = (_cdf(from_a, total) - _cdf(from_b, total)).abs()
    within = merged[..., 1:] == merged[..., :-1]  # the run of equal values continues
    if total is None:
        gap[..., :-1].masked_fill_(within, 0.0)
        return gap.amax(-1)
    rows = ecdf_torch.row_ids(total, gap.shape[0])
    gap[:-1].masked_fill_(within & (rows[1:] == rows[:-1]), 0.0)
    return gap.new_zeros(total.shape[0] - 1).scatter_reduce_(0, rows, gap, "amax")


def p_value(a: Tensor, b: Tensor, distance: float, method: str = "auto") -> float:
    """Return the probability of a distance >= ``distance`` if both samples have one continuous distribution.

    a (m,), b (n,). "exact": over all orders of the pooled samples; "asymp": Kolmogorov's distribution at the effective
    size m n / (m + n); "auto": exact up to 10,000 samples on either side. The values are those of
    `scipy.stats.ks_2samp`. Ties make the test conservative.

    Raises ValueError for another method.
    """
    from scipy.stats import ks_2samp, kstwo  # the import takes half a second

    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; expected 'auto', 'exact' or 'asymp'.")
    m = len(a)
    n = len(b)
    if method == "exact" or (method == "auto" and max(m, n) <= MOST_EXACT):
        return float(ks_2samp(a.double().cpu().numpy(), b.double().cpu().numpy(), method="exact").pvalue)
    size = round(m * n / (m + n))
    # one sample against one
    if size == 0:
        return 1.0
    return float(kstwo.sf(distance, size).clip(0.0, 1.0))


@dataclass(frozen=True)
class Comparison:
    """One row of `ks_table`: ``smaller`` samples against ``larger`` samples per prompt, over ``prompts`` prompts."""

    smaller: int
    larger: int
    prompts: int
    rejected: int
    """Number of prompts with a p-value of at most alpha."""
    statistic: float
    """Mean distance over the rejected prompts; NaN if there are none."""
    p_value: float
    """Mean p-value over the rejected prompts; NaN if there are none."""
    distance: float
    """Mean distance over all prompts, between the two estimates of one CDF."""

    @property
    def rate(self) -> float:
        return self.rejected / self.prompts

    def cells(self) -> tuple[str, ...]:
        """Return the formatted cells of the row, in the order of `COLUMNS`."""
        return (
            str(self.smaller),
            str(self.larger),
            f"{self.rejected} of {self.prompts}",
            f"{self.rate:.2%}",
            f"{self.statistic:.2f}" if self.rejected else "-",
            f"{self.p_value:.3f}" if self.rejected else "-",
            f"{self.distance:.3f}",
        )


def ks_table(
    rewards: Tensor, sizes: Sequence[int], alpha: float = 0.05, seed: int = 0, *, nested: bool = False
) -> list[Comparison]:
    """Count the prompts whose M1 and M2 samples fail a test of equal distribution, per pair M1 <= M2 of ``sizes``.

    ``rewards`` (P, K): K samples per prompt. Each comparison takes M1 random samples and M2 others (vBoN, Sec. 5.1,
    Eq. 9). Both have one distribution by construction, so the rejection rate is about alpha at every size, and lower
    for few samples or many ties. A higher rate means that the samples of a prompt are not exchangeable; a rate of alpha
    shows no difference. The mean distance shows how far apart the estimates are.

    ``nested=True`` takes the M1 samples from the M2, so that M2 may be K, as in vBoN, Table 1. The test ignores this,
    which lowers its rate: the distance shrinks by sqrt((M2 - M1) / (M2 + M1)), so that for large M1 the rate is
    2 exp(-2 c^2 (M2 + M1) / (M2 - M1)) with c = 1.358 for alpha = 0.05. Counting all choices of M1 of 600 gives the
    exact rates for any rewards without ties. The printed rates of 5,000 prompts agree with them up to noise, but for 5:

        M1          5        20       100      200      250
        exact       4.66%    3.82%    1.04%    0.11%    0.03%
        printed     6.14%    4.02%    1.14%    0.06%    0

    The rate for 5 is 5 standard errors above the exact one, which ties would only lower. The paper does not say why.

    Raises ValueError for rewards that are not (P, K) or contain a NaN, for fewer than two sizes, sizes below 1, pairs
    that need more than K samples, and an alpha outside (0, 1).
    """
    chosen = _shuffled(rewards, seed)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}: expected a level between 0 and 1, such as 0.05.")
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes={list(sizes)}: expected two or more numbers of samples, each at least 1.")
    K = rewards.shape[1]
    pairs = list(itertools.combinations(sorted(sizes), 2))
    for smaller, larger in pairs:
        needed = larger if nested else smaller + larger
        if needed > K:
            advice = "draw more" if nested else "draw more, compare fewer, or set nested=True"
            raise ValueError(f"{smaller} against {larger} needs {needed} samples per prompt, got {K}; {advice}.")
    rows = []
    for smaller, larger in pairs:
        start = 0 if nested else smaller
        rows.append(_compare(chosen[:, :smaller], chosen[:, start : start + larger], alpha))
    return rows


def _shuffled(rewards: Tensor, seed: int) -> Tensor:
    """Shuffle each row, as consecutive samples may come from one step or file."""
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise ValueError(f"rewards: expected (P, K), K samples of each of P prompts, got {tuple(rewards.shape)}.")
    if rewards.isnan().any():
        prompt, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(f"rewards[{prompt}, {sample}] is NaN; drop the prompt, or score it again first.")
    order = np.tile(np.arange(rewards.shape[1]), (len(rewards), 1))
    # not torch.rand, which with the seed of the rewards would sort them
    order = np.random.default_rng(seed).permuted(order, axis=1)
    return rewards.gather(1, torch.from_numpy(order).to(rewards.device))


def _compare(a: Tensor, b: Tensor, alpha: float) -> Comparison:
    """Return the table row of samples (P, M1) against (P, M2)."""
    P = len(a)
    m = a.shape[1]
    n = b.shape[1]
    d = distance((ecdf.sort(a), ecdf.sort(b)), (None, None), None)
    # equal distances, which are multiples of 1/(m n), have equal p-values
    steps, index = (d * m * n).round().unique(return_inverse=True)
    p_values = []
    for step in range(len(steps)):
        row = int((index == step).nonzero()[0])
        p_values.append(p_value(a[row], b[row], float(d[row])))
    p = d.new_tensor(p_values)[index]
    rejected = p <= alpha
    return Comparison(
        smaller=m,
        larger=n,
        prompts=P,
        rejected=int(rejected.sum()),
        statistic=float(d[rejected].mean()),
        p_value=float(p[rejected].mean()),
        distance=float(d.mean()),
    )


def _cdf(masses: Tensor, offsets: Tensor | None) -> Tensor:
    sums = ecdf.cumulate(masses, offsets=offsets)
    if offsets is None:
        return sums / sums[..., -1:]
    return sums / sums[offsets[1:] - 1][ecdf_torch.row_ids(offsets, sums.shape[0])]
