"""Expected policy gradient over all possible groups compared with the gradient of the objective."""

import itertools
import math

import pytest
import torch
from support import truths
from support.truths import float64, hump, normal, unit_kernel

from nlgrpo.objectives.advantages import advantages
from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    Distortion,
    DPPDiversity,
    EntropicRisk,
    MajorityVote,
    Mean,
    RaoDiversity,
    SoftBestOfN,
    WorstOfN,
    parse,
)

LOGITS = float64(0.2, -0.4, 0.9)
LETTERS = float64([0.3, -1.0, 2.0], [0.3, 0.3, 2.0], [1.0, -2.0, -2.0], [5.0, 5.0, 5.0])
SIZES = [(1, 2), (1, 4), (2, 3), (2, 5), (3, 4), (3, 6), (4, 6), (2, 2), (3, 3), (4, 4)]  # n, M
SMOOTH = [Mean(), BestOfN(2), BestOfN(4), WorstOfN(3), BestOfPoisson(2.0), SoftBestOfN(1.0), EntropicRisk(-0.7)]
SMOOTH += [Distortion(hump)]
VOTES = float64([1.0, 0.0], [0.2, 0.0], [0.7, 1.0], [-0.5, -1.0])

# objective, M, values and logits of the letters, tolerances
UNBIASED = [
    (make(n, "unbiased"), M, values, LOGITS, {"atol": 1e-13, "rtol": 1e-11})
    for make in (BestOfN, WorstOfN)
    for n, M in SIZES
    for values in LETTERS
]
UNBIASED += [
    (MajorityVote(n, "unbiased"), M, VOTES, float64(0.3, -0.2, 0.5, 0.1), {"atol": 1e-12, "rtol": 0})
    for n, M in ((2, 3), (2, 4), (3, 4), (3, 5))
]
UNBIASED += [
    (objective, objective.order + more, unit_kernel(3), LOGITS, {"atol": 1e-12, "rtol": 1e-10})
    for objective in (RaoDiversity(), DPPDiversity(2), DPPDiversity(3, eps=0.1), DPPDiversity(4, eps=0.5))
    for more in (1, 2)
]


def expected_gradient(objective, values, logits, groups, baseline="mean"):
    letters, chance = groups
    linear = objective.advantage(truths.inputs(objective, values, letters), baseline)
    return truths.expected_gradient(logits, letters, chance, advantages(linear, baseline="none"))


@pytest.mark.parametrize(
    ("objective", "M", "values", "logits", "close"),
    UNBIASED,
    ids=[f"{o}-{M}-{k}" for k, (o, M, *_) in enumerate(UNBIASED)],
)
def test_unbiased_estimator_is_unbiased(objective, M, values, logits, close):
    truth, value = truths.gradient(objective, values, logits)
    groups = truths.all_groups(logits.softmax(0), M)
    for baseline in ("mean", "loo", "none"):
        ours = expected_gradient(objective, values, logits, groups, baseline)
        torch.testing.assert_close(ours, truth, **close)
    letters, chance = groups
    expected = (chance * objective.value(truths.inputs(objective, values, letters))).sum()
    torch.testing.assert_close(expected, value, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("rewards", LETTERS[:3], ids=str)
@pytest.mark.parametrize("M", [2, 3, 5])
def test_reinforce_is_unbiased_with_leave_one_out_or_no_baseline(M, rewards):
    truth, _ = truths.gradient(Mean(), rewards, LOGITS)
    groups = truths.all_groups(LOGITS.softmax(0), M)
    for baseline, share in (("loo", 1), ("none", 1), ("mean", (M - 1) / M)):
        torch.testing.assert_close(expected_gradient(Mean(), rewards, LOGITS, groups, baseline), share * truth)
    torch.testing.assert_close(Mean().advantage(rewards[None], "none"), rewards[None])


@pytest.mark.parametrize("rewards", LETTERS[:3], ids=str)
@pytest.mark.parametrize("objective", SMOOTH, ids=str)
def test_plugin_is_biased_at_order_1_over_M(objective, rewards):
    """M times the bias converges: twice the samples halve the bias. The bias of plain GRPO is 1/M of the gradient."""
    pi = LOGITS.softmax(0)
    truth, _ = truths.gradient(objective, rewards, LOGITS)
    of_four = [
        expected_gradient(objective, rewards, LOGITS, groups(pi, 4))
        for groups in (truths.counted_groups, truths.all_groups)
    ]
    torch.testing.assert_close(*of_four)
    few, many = (expected_gradient(objective, rewards, LOGITS, truths.counted_groups(pi, M)) - truth for M in (32, 64))
    assert many.norm() > 1e-6
    torch.testing.assert_close(2 * many, few, rtol=0.15, atol=0.15 * few.norm().item())
    if objective == Mean():
        torch.testing.assert_close(few, -truth / 32)


def without_each(rewards):
    """The group (P, M - 1) without sample j, for each j."""
    M = rewards.shape[1]
    return [rewards[:, [k for k in range(M) if k != j]] for j in range(M)]


@pytest.mark.parametrize(("n", "M"), [(2, 5), (3, 6), (4, 6), (1, 3)])
def test_unbiased_equals_the_leave_one_out_estimator(n, M):
    """M times the decrease of the mean over all subsets of n without the sample; for n = M, of the maximum."""
    rewards = normal(5, M)
    rewards[0, :2] = rewards[0].max()

    def value(r):
        subsets = itertools.combinations(range(r.shape[1]), n)
        return torch.stack([r[:, list(subset)].amax(1) for subset in subsets]).mean(0)

    without = torch.stack([value(others) for others in without_each(rewards)], 1)
    torch.testing.assert_close(BestOfN(n, "unbiased").advantage(rewards), M * (value(rewards)[:, None] - without))
    torch.testing.assert_close(BestOfN(n, "unbiased").value(rewards), value(rewards))
    all_others = torch.stack([others.amax(1) for others in without_each(rewards)], 1)
    of_all = BestOfN(M, "unbiased").advantage(rewards)
    torch.testing.assert_close(of_all, M * (rewards.amax(1, keepdim=True) - all_others))
    assert (of_all != 0).sum(1).tolist() == [0, 1, 1, 1, 1], "the first has two best ones"


@pytest.mark.parametrize(("n", "M"), SIZES)
def test_unbiased_weights_equal_exact_binomials(n, M):
    best = [n * math.comb(k - 1, n - 1) / math.comb(M - 1, n - 1) for k in range(1, M + 1)]
    worst = [n * math.comb(M - k - 1, n - 1) / math.comb(M - 1, n - 1) for k in range(1, M)]
    torch.testing.assert_close(BestOfN(n, "unbiased").weights(M), float64(*best))
    torch.testing.assert_close(WorstOfN(n, "unbiased").weights(M), float64(*worst, 0))


@pytest.mark.parametrize("make", [BestOfN, WorstOfN])
def test_unbiased_with_probs_is_exact(make):
    rewards, probs = torch.tensor([[1.0, 4.0, -2.0]]), torch.tensor([0.2, 0.5, 0.3])
    for n in (1, 2, 9):
        assert torch.equal(make(n, "unbiased").value(rewards, probs), make(n).value(rewards, probs))
        assert torch.equal(make(n, "unbiased").linearize(rewards, probs), make(n).linearize(rewards, probs))


@pytest.mark.parametrize("make", [BestOfN, WorstOfN])
def test_unbiased_needs_n_samples(make):
    objective = make(4, "unbiased")
    assert parse(str(objective)) == objective
    assert objective.fewest == 4
    for method in (objective.value, objective.linearize, objective.advantage, lambda r: objective.weights(r.shape[1])):
        with pytest.raises(ValueError, match=f"{objective}: 4 of 3 samples"):
            method(torch.ones(2, 3))
    assert make(1, "unbiased").advantage(torch.ones(2, 1)).tolist() == [[0.0], [0.0]]
    for M in (4, 7):
        assert (objective.advantage(torch.full((2, M), 0.1)) == 0).all()
