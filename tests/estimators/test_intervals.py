"""Intervals against SciPy's, and how often they hold the truth: between 93 and 97% of simulated evaluations.

An evaluation has 64 prompts, each with a level of its own, and 8 samples of each (64 where an estimate is plug-in).
What is true is known: integrals over order statistics and Beta laws, and the KL of normal laws.
"""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.integrate import quad
from scipy.special import betaln

from nlgrpo.estimators import (
    best_of_n,
    bootstrap,
    maj_at_k,
    paired_test,
    pass_at_k,
    procedure_value,
    two_way_interval,
    win_rate,
    worst_of_n,
)
from nlgrpo.losses import kl
from nlgrpo.objectives.registry import parse

PROMPTS, SAMPLES, TRIALS = 64, 8, 2000
NOISE = {"normal": scipy.stats.norm(), "uniform": scipy.stats.uniform(), "skewed": scipy.stats.expon()}
EASE = {"seldom right": (1, 6), "right or wrong": (0.5, 0.5), "in between": (2, 2)}  # Beta laws of the share of right


def drawn(shape, *size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(size, dtype=torch.float64)
    if shape == "normal":
        return values.normal_(generator=generator)
    return values.uniform_(generator=generator) if shape == "uniform" else values.exponential_(generator=generator)


def rewards(shape, trials=TRIALS, n=SAMPLES, seed=0):
    """(trials x prompts, n), a prompt's level and a sample's noise of the same law."""
    return drawn(shape, trials * PROMPTS, 1, seed=seed) + drawn(shape, trials * PROMPTS, n, seed=seed + 1)


def of_order(shape, density):
    """E of a reward whose noise is the quantile u with this density; the level adds its mean."""
    law = NOISE[shape]
    return law.mean() + quad(lambda u: law.ppf(u) * density(u), 0, 1)[0]


def right_or_wrong(ease, seed=20):
    """(trials x prompts, n) of 0 and 1."""
    shares = np.random.default_rng(seed).beta(*EASE[ease], (TRIALS * PROMPTS, 1))
    return (drawn("uniform", TRIALS * PROMPTS, SAMPLES, seed=seed) < torch.from_numpy(shares)).double()


def of_right(ease, r, w):
    """E of p^r (1 - p)^w: that r samples are right and w are wrong."""
    a, b = EASE[ease]
    return math.exp(betaln(a + r, b + w) - betaln(a, b))


def covered(per_prompt, truth):
    """Share of the trials whose interval holds the truth."""
    _, low, high = bootstrap(per_prompt.view(-1, PROMPTS), resamples=1000)
    return ((low <= truth + 1e-12) & (truth - 1e-12 <= high)).double().mean().item()


def assert_covered(cases):
    found = {name: covered(values, truth) for name, (values, truth) in cases.items()}
    assert all(0.93 <= share <= 0.97 for share in found.values()), found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", NOISE)
def test_values(shape):
    r = rewards(shape)
    assert_covered(
        {
            "mean": (r.mean(1), 2 * NOISE[shape].mean()),
            "best of 4": (best_of_n(r, [4])[0], of_order(shape, lambda u: 4 * u**3)),
            "worst of 4": (worst_of_n(r, [4])[0], of_order(shape, lambda u: 4 * (1 - u) ** 3)),
        }
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("objective", ["soft:1.0", "cvar:0.25", "bop:4.0", "erm:1.0"])
def test_plug_in_values_have_intervals_for_what_they_estimate(objective):
    """Which is their own mean at this number of samples: an interval over prompts does not know of a bias."""
    values = procedure_value(rewards("normal", n=64), parse(objective))
    assert_covered({objective: (values, values.mean().item())})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ease", EASE)
def test_right_and_wrong(ease):
    right, other = right_or_wrong(ease), right_or_wrong("right or wrong", seed=5)
    counts = torch.arange(SAMPLES + 1)[:, None]
    answers = (torch.arange(SAMPLES) < counts).long()  # 1 is right; as many as its row says
    majority = maj_at_k(answers, answers, [3])[0]
    chances = [1 - of_right(law, 0, 4) for law in (ease, "right or wrong")]
    cases = {
        "mean": (right.mean(1), of_right(ease, 1, 0)),
        "pass@4": (pass_at_k(right, [4])[0], chances[0]),
        "maj@3": (majority[right.sum(1).long()], 3 * of_right(ease, 2, 1) + of_right(ease, 3, 0)),
        "wins": (win_rate(right, other, 4), (1 + chances[0] - chances[1]) / 2),
    }
    assert_covered(cases)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shift", "worst"), [(0.5, False), (1.5, False), (0.5, True)])
def test_win_rates(shift, worst):
    level = drawn("normal", TRIALS * PROMPTS, 1, seed=7)
    own = shift + drawn("normal", TRIALS * PROMPTS, 1, seed=8) / 2
    a = level + own + drawn("normal", TRIALS * PROMPTS, SAMPLES, seed=9)
    b = level + drawn("normal", TRIALS * PROMPTS, SAMPLES, seed=10)
    norm, sign = scipy.stats.norm, -1 if worst else 1  # the worst of a symmetric law is the best with the other sign

    def wins(by):  # the best of 4 above another best of 4 that is lower by this much
        return quad(lambda x: 4 * norm.cdf(x) ** 3 * norm.pdf(x) * norm.cdf(x + by) ** 4, -9, 9)[0]

    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    beats = sum(w * wins(sign * (shift + z / 2)) for z, w in zip(nodes, weights, strict=True)) / weights.sum()
    assert_covered({"wins": (win_rate(a, b, 4, worst), 1 - beats if worst else beats)})


def test_kl_to_the_reference():
    """A token's log-ratio is N(k, 2k) under the policy, as it must be where it is normal and its KL is k."""
    tokens = 6
    distance = 0.5 * drawn("skewed", TRIALS * PROMPTS, 1, 1, seed=11) / tokens  # each prompt has its own
    ratio = distance + (2 * distance).sqrt() * drawn("normal", TRIALS * PROMPTS, SAMPLES, tokens, seed=12)
    estimates = {kind: kl.estimate(ratio, torch.zeros_like(ratio), kind).sum(-1).mean(1) for kind in ("k1", "k3")}
    assert_covered({kind: (values, 0.5) for kind, values in estimates.items()})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", NOISE)
def test_paired_differences_and_their_p_values(shape):
    """Two models with the prompts' levels in common: of no difference, 5% of the p-values are below 5%."""
    level = drawn("skewed", TRIALS * PROMPTS, 1, seed=13)
    a, b = (level + drawn(shape, TRIALS * PROMPTS, SAMPLES, seed=seed) for seed in (14, 15))
    values = [best_of_n(model, [4])[0].view(TRIALS, PROMPTS) for model in (a, b)]
    assert_covered({"change": (values[0] - values[1], 0.0)})
    found = [paired_test(x, y, resamples=400)[3] for x, y in zip(*(v[:800] for v in values), strict=True)]
    assert 0.03 <= sum(p <= 0.05 for p in found) / len(found) <= 0.07


@pytest.mark.parametrize("prompts", [5, 16, 64])
@pytest.mark.parametrize("shape", [*NOISE, "right or wrong"])
def test_an_interval_is_the_outer_one_of_two_of_scipys(shape, prompts):
    """BCa and the percentiles, both at the level that Student's t gives to so few."""
    values = drawn("skewed" if shape == "right or wrong" else shape, prompts, seed=prompts)
    values = (values > 1).double() if shape == "right or wrong" else values
    _, low, high = bootstrap(values, resamples=40_000)
    wide = math.sqrt(prompts / (prompts - 1)) * scipy.stats.t.ppf(0.975, prompts - 1)
    level = scipy.stats.norm.cdf(wide) - scipy.stats.norm.cdf(-wide)
    bca, plain = (
        scipy.stats.bootstrap(
            (values.numpy(),), np.mean, n_resamples=40_000, confidence_level=level, method=method, rng=1
        ).confidence_interval
        for method in ("BCa", "percentile")
    )
    near = 0.03 * (plain.high - plain.low)
    assert low.item() == pytest.approx(min(bca.low, plain.low), abs=near)
    assert high.item() == pytest.approx(max(bca.high, plain.high), abs=near)


# --- over seeds and prompts -------------------------------------------------------------------------------------------


def anova(y):
    """Mean, standard error and degrees of freedom by loops, in NumPy."""
    y = np.asarray(y)
    S, P = y.shape
    mean = y.mean()
    seeds = sum(P * (y[s].mean() - mean) ** 2 for s in range(S)) / (S - 1)
    prompts = sum(S * (y[:, p].mean() - mean) ** 2 for p in range(P)) / (P - 1)
    rest = sum((y[s, p] - y[s].mean() - y[:, p].mean() + mean) ** 2 for s in range(S) for p in range(P))
    rest /= (S - 1) * (P - 1)
    total = seeds + prompts - rest
    free = total**2 / (seeds**2 / (S - 1) + prompts**2 / (P - 1) + rest**2 / ((S - 1) * (P - 1)))
    return mean, (total / (S * P)) ** 0.5, free


def test_a_two_way_interval_is_that_of_the_random_effects_model():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 1, generator=generator), torch.randn(1, 9, generator=generator)
    y = 0.3 + 0.5 * a + b + 0.2 * torch.randn(4, 9, generator=generator)
    mean, error, free = anova(y.double())
    found, low, high, p_value = two_way_interval(y)
    assert found == pytest.approx(mean)
    assert (low, high) == pytest.approx(scipy.stats.t.interval(0.95, free, mean, error))
    assert p_value == pytest.approx(2 * scipy.stats.t.sf(abs(mean) / error, free))
    assert two_way_interval(y, level=0.8)[1:3] == pytest.approx(scipy.stats.t.interval(0.8, free, mean, error))


@pytest.mark.parametrize(("seed", "prompt", "rest"), [(0.0, 0.3, 0.1), (0.1, 0.3, 0.1), (0.05, 0.05, 0.05)])
def test_a_two_way_interval_covers_the_mean(seed, prompt, rest):
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(600):
        a, b = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((5, 1), (1, 40)))
        e = torch.randn(5, 40, generator=generator, dtype=torch.float64)
        _, low, high, _ = two_way_interval(seed * a + prompt * b + rest * e)
        hits += low <= 0 <= high
    assert 0.92 < hits / 600 < 0.98


def test_prompts_alone_would_not_cover_another_seed():
    """The fault that the interval mends: seeds that differ, seen over prompts only."""
    generator = torch.Generator().manual_seed(2)
    hits = 0
    for _ in range(300):
        a, b = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((5, 1), (1, 40)))
        _, low, high = bootstrap((0.3 * a + 0.3 * b).mean(0), resamples=200)
        hits += float(low) <= 0 <= float(high)
    assert hits / 300 < 0.7


def test_equal_values_have_an_interval_of_width_0():
    assert two_way_interval(torch.full((3, 5), 0.25)) == (0.25, 0.25, 0.25, 0.0)
    assert two_way_interval(torch.zeros(3, 5)) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1), (2, 2, 2)])
def test_fewer_seeds_or_prompts_have_no_two_way_interval(shape):
    with pytest.raises(ValueError, match=r"expected values \(S, P\) of at least 2 seeds and 2 prompts"):
        two_way_interval(torch.zeros(shape))
    with pytest.raises(ValueError, match="1 NaN or infinite values"):
        two_way_interval(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
