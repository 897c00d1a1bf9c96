"""Kernel density smoothing compared with SciPy: CDF, bandwidth, and integrals by adaptive quadrature."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import iqr, norm

from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    Mean,
    Smoothed,
    SoftBestOfN,
    WorstOfN,
    parse,
)

REWARDS = torch.tensor([[0.3, -1.0, 2.0, 0.31, 0.3], [5.0, 5.0, 5.0, 9.0, -40.0]], dtype=torch.float64)
F = {
    "mean": lambda z: np.ones_like(z),
    "bon:4": lambda z: 4 * z**3,
    "wor:3": lambda z: 3 * (1 - z) ** 2,
    "bop:2.0": lambda z: 2 * np.exp(2 * (z - 1)),
}


def silverman(x):
    spread = min(np.std(x, ddof=1), iqr(x) / 1.34) or np.std(x, ddof=1)
    return 0.9 * spread * len(x) ** -0.2


def integral(f, points):
    points = np.unique(points)
    return sum(quad(f, a, b, epsabs=1e-13, epsrel=1e-12, limit=200)[0] for a, b in itertools.pairwise(points))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bandwidth", ["silverman", 0.05, 3.0])
@pytest.mark.parametrize("name", F)
def test_values_equal_quadrature(name, bandwidth):
    objective, f = Smoothed(parse(name), bandwidth), F[name]
    for row in REWARDS:
        x = row.numpy()
        h = silverman(x) if bandwidth == "silverman" else bandwidth
        cdf = lambda r: norm.cdf((r - x) / h).mean()  # noqa: E731
        density = lambda r: norm.pdf((r - x) / h).mean() / h  # noqa: E731
        near = np.concatenate([x + k * h for k in range(-9, 10, 3)])
        truth = [-integral(lambda r: f(cdf(r)), [p for p in near if r_j <= p <= x.max()] + [r_j]) for r_j in x]
        np.testing.assert_allclose(objective.linearize(row[None])[0], truth, rtol=1e-9, atol=1e-11)
        value = integral(lambda r: r * f(cdf(r)) * density(r), near)
        np.testing.assert_allclose(objective.value(row[None])[0], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "inner", [Mean(), BestOfN(4), WorstOfN(2), BestOfPoisson(3.0), Distortion(lambda z: 6 * z * (1 - z))], ids=str
)
def test_a_tiny_bandwidth_gives_the_plugin_estimate(inner):
    rewards = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for method in ("linearize", "value", "advantage"):
        ours, plain = (getattr(o, method)(rewards) for o in (Smoothed(inner, 1e-7), inner))
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)
    # each step of the smoothed CDF is centred at a sample; between samples both CDFs are k/M
    none = Smoothed(inner, 1e-7).advantage(rewards, "none")
    torch.testing.assert_close(none, inner.advantage(rewards, "none"), atol=1e-6, rtol=0)


def test_cvar_of_fewer_samples_than_its_tail_needs():
    rewards = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    h, x = silverman(rewards[0].numpy()), rewards[0].numpy()
    f = lambda r: float(norm.cdf((r - x) / h).mean() <= 0.3) / 0.3  # noqa: E731
    truth = [-quad(f, r, 3.0, limit=2000, epsabs=1e-8)[0] for r in x]
    np.testing.assert_allclose(Smoothed(CVaR(0.3)).linearize(rewards)[0], truth, atol=0.1 * h / 0.3)


def test_equal_rewards_and_single_ones():
    for M in (1, 2, 7):
        equal = torch.full((2, M), 0.1)
        assert (Smoothed(BestOfN(4)).linearize(equal) == 0).all()
        torch.testing.assert_close(Smoothed(BestOfN(4)).value(equal), torch.full((2,), 0.1))
    mixed = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1e-30, 1e30]])
    assert Smoothed(BestOfN(4)).linearize(mixed).isfinite().all()
    assert (Smoothed(BestOfN(4)).advantage(mixed)[0] == 0).all()


def test_shifted_and_scaled_rewards():
    rewards = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    objective = Smoothed(BestOfN(4))
    torch.testing.assert_close(objective.linearize(7 * rewards - 3), 7 * objective.linearize(rewards))
    torch.testing.assert_close(objective.value(7 * rewards - 3), 7 * objective.value(rewards) - 3)


def test_nothing_is_smoothed_with_probs():
    probs = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1], dtype=torch.float64)
    assert torch.equal(Smoothed(BestOfN(4)).linearize(REWARDS, probs), BestOfN(4).linearize(REWARDS, probs))
    assert torch.equal(Smoothed(BestOfN(4)).value(REWARDS, probs), BestOfN(4).value(REWARDS, probs))


def test_refused():
    for inner in (SoftBestOfN(1.0), BestOfN(2, "unbiased"), "bon:4"):
        with pytest.raises(ValueError, match="expected a rank-based objective"):
            Smoothed(inner)
    for bandwidth in (0, -1.0, math.nan, "scott"):
        with pytest.raises(ValueError, match="bandwidth="):
            Smoothed(BestOfN(4), bandwidth)
    with pytest.raises(ValueError, match="infinite"):
        Smoothed(BestOfN(4)).linearize(torch.tensor([[0.0, math.inf]]))
