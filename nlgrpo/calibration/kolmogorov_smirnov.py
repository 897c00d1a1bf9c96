"""Two-sample Kolmogorov-Smirnov: the distance of two sorted samples, and the probability of one as large by chance.

`ks_table` asks it of every prompt: do so many samples give another CDF than so many (vBoN, Table 1)?
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
MOST_EXACT = 10_000  # samples of the larger side up to which "auto" is exact, as in SciPy
COLUMNS = ("M", "against", "rejected", "rejection rate", "statistic", "p-value", "mean distance")


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


@dataclass(frozen=True)
class Comparison:
    """One row of `ks_table`: the CDFs of ``smaller`` and of ``larger`` samples per prompt, over ``prompts``."""

    smaller: int
    larger: int
    prompts: int
    rejected: int
    """Prompts whose two CDFs differ, by a p-value of at most alpha."""
    statistic: float
    """Mean distance of the rejected ones, NaN without any; so is the next."""
    p_value: float
    distance: float
    """Mean distance of all prompts: how far the two estimates of one CDF are apart."""

    @property
    def rate(self) -> float:
        return self.rejected / self.prompts

    def cells(self) -> tuple[str, ...]:
        """The row for people, under `COLUMNS`."""
        few = ["-", "-"] if self.rejected == 0 else [f"{self.statistic:.2f}", f"{self.p_value:.3f}"]
        counts = str(self.smaller), str(self.larger), f"{self.rejected} of {self.prompts}", f"{self.rate:.2%}"
        return (*counts, *few, f"{self.distance:.3f}")


def ks_table(
    rewards: Tensor, sizes: Sequence[int], alpha: float = 0.05, seed: int = 0, *, nested: bool = False
) -> list[Comparison]:
    """How many prompts reject that M1 and M2 samples are of one distribution, for every pair of ``sizes``, M1 <= M2.

    ``rewards`` (P, K): K samples per prompt, of which each comparison takes a random choice of M1 and one of M2 others
    (vBoN, Sec. 5.1, Eq. 9). Both are of one distribution by construction, so the rate is about alpha at every size,
    below it for few samples or many ties: a higher one says that the samples of a prompt are not alike, a rate of alpha
    that the test sees nothing, and the mean distance how far the estimates are apart.

    ``nested=True`` takes the M1 from among the M2, so that M2 may be K: the paper's Table 1. The test does not know
    this, and its rate falls by arithmetic alone. The distance shrinks by sqrt((M2 - M1) / (M2 + M1)), so that for large
    M1 the rate is 2 exp(-2 c^2 (M2 + M1) / (M2 - M1)) with c = 1.358 for alpha = 0.05: 1.1% for 100 of 600 and
    0.1% for 200, as printed there (1.14%, 0.06%), whatever the rewards.

    Raises ValueError for rewards that are not (P, K) or hold a NaN, for fewer than two sizes, sizes below 1, pairs that
    need more than K samples, and an alpha outside of (0, 1).
    """
    chosen = _shuffled(rewards, seed)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}: expected a level between 0 and 1, such as 0.05.")
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes={list(sizes)}: expected two or more numbers of samples, each at least 1.")
    pairs = list(itertools.combinations(sorted(sizes), 2))
    for smaller, larger in pairs:
        needed = larger if nested else smaller + larger
        if needed > rewards.shape[1]:
            advice = "draw more" if nested else "draw more, compare fewer, or take nested=True"
            there = rewards.shape[1]
            raise ValueError(f"{smaller} against {larger} needs {needed} samples of a prompt, got {there}; {advice}.")
    return [_compare(chosen[:, :m], chosen[:, 0 if nested else m :][:, :n], alpha) for m, n in pairs]


def _shuffled(rewards: Tensor, seed: int) -> Tensor:
    """Each row in a random order: what was drawn first may be from another step or file."""
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise ValueError(f"rewards: expected (P, K), K samples of each of P prompts, got {tuple(rewards.shape)}.")
    if rewards.isnan().any():
        prompt, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(f"rewards[{prompt}, {sample}] is NaN; drop the prompt, or score it again, before this.")
    places = np.tile(np.arange(rewards.shape[1]), (len(rewards), 1))
    places = np.random.default_rng(seed).permuted(places, axis=1)  # torch.rand would sort what its seed has drawn
    return rewards.gather(1, torch.from_numpy(places).to(rewards.device))


def _compare(a: Tensor, b: Tensor, alpha: float) -> Comparison:
    """The row of samples (P, M1) against (P, M2)."""
    P, m, n = len(a), a.shape[1], b.shape[1]
    found = distance((ecdf.sort(a), ecdf.sort(b)), (None, None), None)
    steps, of = (found * m * n).round().unique(return_inverse=True)  # a p-value depends on the distance alone
    owners = [int((of == step).nonzero()[0]) for step in range(len(steps))]
    p = found.new_tensor([p_value(a[row], b[row], float(found[row])) for row in owners])[of]
    few = p <= alpha
    return Comparison(m, n, P, int(few.sum()), float(found[few].mean()), float(p[few].mean()), float(found.mean()))


def _cdf(masses: Tensor, offsets: Tensor | None) -> Tensor:
    sums = ecdf.cumulate(masses, offsets=offsets)
    if offsets is None:
        return sums / sums[..., -1:]
    return sums / sums[offsets[1:] - 1][ecdf_torch.row_ids(offsets, sums.shape[0])]
