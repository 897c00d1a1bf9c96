"""Bias of estimators in groups: against enumeration of all groups, closed forms, and a table of other work."""

import itertools
import math

import pytest
import torch

from nlgrpo.objectives import parse
from nlgrpo.objectives.estimator_bias import gain_for_binary, gain_for_normal

OBJECTIVES = ["mean", "bon:3", "bon:3:unbiased", "wor:2", "wor:2:unbiased", "cvar:0.6", "bop:2.0", "soft:0.5",
              "erm:2.0", "distortion:0,1,4", "bon:3:kde"]  # fmt: skip
STEP = 1e-5


def value_at(objective, p):
    atoms = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    return float(objective.value(atoms, torch.tensor([1 - p, p], dtype=torch.float64)))


def enumerated(objective, M, p, baseline):
    """E 1/M sum_j A_j d log P(r_j)/dp, by a sum over all 2^M groups."""
    total = 0.0
    for group in itertools.product([0.0, 1.0], repeat=M):
        rewards = torch.tensor([group], dtype=torch.float64)
        advantages = objective.advantage(rewards, baseline)[0].tolist()
        probability = math.prod(p if reward else 1 - p for reward in group)
        scores = [1 / p if reward else -1 / (1 - p) for reward in group]
        total += probability * sum(a * score for a, score in zip(advantages, scores, strict=True)) / M
    return total


@pytest.mark.parametrize("baseline", ["mean", "loo", "none"])
@pytest.mark.parametrize("text", OBJECTIVES)
def test_the_gain_is_that_of_all_groups(text, baseline):
    objective = parse(text)
    for p, gain in zip((0.1, 0.7), gain_for_binary(objective, 5, (0.1, 0.7), baseline).tolist(), strict=True):
        exact = (value_at(objective, p + STEP) - value_at(objective, p - STEP)) / (2 * STEP)
        expected = enumerated(objective, 5, p, baseline) / exact if abs(exact) > 1e-9 else math.nan
        assert gain == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_the_factors_of_the_plug_in_for_the_best_of_four():
    """Computed for FIDELITY by other code; with M = 16 the bias is smaller and of the same kind."""
    assert gain_for_binary(parse("bon:4"), 8).tolist() == pytest.approx([0.596, 0.638, 0.796, 1.449, 3.751], abs=5e-4)
    small, large = gain_for_binary(parse("bon:4"), 16)[[0, -1]].tolist()
    assert small == pytest.approx(0.779, abs=5e-4)
    assert large == pytest.approx(2.339, abs=5e-4)


@pytest.mark.parametrize("text", ["bon:4:unbiased", "wor:4:unbiased", "bon:8:unbiased"])
def test_unbiased_estimators_have_a_gain_of_one(text):
    torch.testing.assert_close(gain_for_binary(parse(text), 8), torch.ones(5, dtype=torch.float64), atol=1e-10, rtol=0)


def test_the_mean_has_the_same_gain_everywhere():
    assert gain_for_binary(parse("mean"), 8).tolist() == pytest.approx([7 / 8] * 5)
    assert gain_for_binary(parse("mean"), 8, baseline="loo").tolist() == pytest.approx([1.0] * 5)
    found = gain_for_normal(parse("mean"), 8)
    assert found.size == pytest.approx(7 / 8, abs=0.01)
    assert found.cosine > 0.999


def test_where_the_exact_gradient_is_0_there_is_no_gain():
    gains = gain_for_binary(parse("cvar:0.1"), 8, (0.5, 0.95))
    assert gains.isnan().tolist() == [True, False]


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_gain_for_normal_rewards_is_that_of_a_direct_simulation(n):
    """The expected plug-in advantage of a reward r of M has a closed form: the others are M - 1 draws around it."""
    found = gain_for_normal(parse(f"bon:{n}"), 8)
    generator = torch.Generator().manual_seed(5)
    rewards = torch.randn(200_000, 8, generator=generator, dtype=torch.float64)
    advantages = parse(f"bon:{n}").advantage(rewards).flatten()
    cdf = torch.special.ndtr(rewards.flatten())
    grid = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    slope = n * torch.special.ndtr(grid) ** (n - 1)  # dR/dpi rises with it
    exact = torch.cumulative_trapezoid(slope, grid)
    place = ((rewards.flatten() + 9) / 18 * 20_000).long()
    target = exact[place] - exact[place].mean()
    assert float((advantages * target).mean() / target.square().mean()) == pytest.approx(found.size, abs=0.02)
    bins = (cdf * 64).long().clamp(max=63)
    counts = torch.bincount(bins, minlength=64)
    ours = torch.zeros(64, dtype=torch.float64).index_add(0, bins, advantages) / counts
    theirs = torch.zeros(64, dtype=torch.float64).index_add(0, bins, target) / counts
    assert float(ours @ theirs / (ours.norm() * theirs.norm())) == pytest.approx(found.cosine, abs=0.02)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, math.nan])
def test_probabilities_outside_of_0_and_1_are_refused(probability):
    with pytest.raises(ValueError, match=r"expected probabilities in \(0, 1\)"):
        gain_for_binary(parse("bon:4"), 8, (probability,))


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="no unbiased estimate"):
        gain_for_binary(parse("bon:4:unbiased"), 3)
