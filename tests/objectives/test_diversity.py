"""Diversity objectives: their baselines, random subsets, and what is refused.

Values, first variations and expected gradients are compared with enumeration in test_registry and
test_gradient_estimators.
"""

import math

import pytest
import torch
from support import truths
from support.truths import float64, unit_kernel

from nlgrpo.objectives.diversity import DPPDiversity, RaoDiversity, _subsets
from nlgrpo.objectives.registry import linearize_present, value_present

LOGITS = float64(0.2, -0.4, 0.9)
OBJECTIVES = [RaoDiversity(), DPPDiversity(2), DPPDiversity(3, eps=0.1), DPPDiversity(4, eps=0.5)]


@pytest.mark.parametrize("more", [1, 2])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_mean_of_a_group_as_baseline_would_shrink_the_gradient(objective, more):
    """By (M - n) / M, which the factor of `advantage` corrects (test_gradient_estimators)."""
    M = objective.order + more
    kernel = unit_kernel(3)
    letters, chance = truths.all_groups(LOGITS.softmax(0), M)
    linear = objective.linearize(truths.inputs(objective, kernel, letters))
    ours = truths.expected_gradient(LOGITS, letters, chance, linear - linear.mean(1, keepdim=True))
    truth, _ = truths.gradient(objective, kernel, LOGITS)
    torch.testing.assert_close(ours, (M - objective.order) / M * truth, atol=1e-12, rtol=1e-10)


def test_rao_by_hand():
    kernel = torch.tensor([[[1.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 1.0]]])
    assert RaoDiversity().linearize(kernel).tolist() == [[-0.5, -0.75, -0.25]]
    assert RaoDiversity().value(kernel).tolist() == [-0.25]
    torch.testing.assert_close(RaoDiversity().advantage(kernel), torch.tensor([[0.0, -0.75, 0.75]]))
    # the identity kernel of a policy over letters: the Gini-Simpson index minus 1
    probs = torch.tensor([0.5, 0.3, 0.2])
    torch.testing.assert_close(RaoDiversity().value(torch.eye(3)[None], probs), -probs.square().sum()[None])


def test_dpp_by_hand():
    same, apart = torch.ones(1, 2, 2), torch.eye(2)[None]
    assert DPPDiversity(2, eps=0.1).value(apart).item() == pytest.approx(2 * math.log(1.1))
    assert DPPDiversity(2, eps=0.1).value(same).item() == pytest.approx(math.log(1.1**2 - 1))


@pytest.mark.parametrize(("M", "n"), [(9, 3), (12, 4), (10, 10), (7, 2), (64, 5)])
def test_random_subsets_contain_every_sample_equally_often(M, n):
    for most in (1, 30, 200):
        chosen = _subsets(M, n, most, seed=1)
        assert len(chosen) >= min(most, math.comb(M, n))
        assert all(len(set(row)) == n for row in chosen.tolist())
        assert chosen.flatten().bincount(minlength=M).tolist() == [len(chosen) * n // M] * M
    assert torch.equal(_subsets(M, n, 30, seed=1), _subsets(M, n, 30, seed=1))


def test_random_subsets_are_unbiased():
    """Averaged over groups of independent samples, the results equal those of all subsets."""
    all_of_them, few = DPPDiversity(2, eps=0.1), DPPDiversity(2, eps=0.1, subsets=1, seed=3)
    letters, chance = truths.all_groups(LOGITS.softmax(0), 5)
    groups = truths.inputs(few, unit_kernel(3), letters)
    assert len(_subsets(5, 2, 1, 3)) < math.comb(5, 2)
    assert not torch.allclose(all_of_them.linearize(groups), few.linearize(groups))
    torch.testing.assert_close((chance * few.value(groups)).sum(), (chance * all_of_them.value(groups)).sum())
    gradients = [
        truths.expected_gradient(LOGITS, letters, chance, objective.advantage(groups))
        for objective in (few, all_of_them)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("objective", [RaoDiversity(), DPPDiversity(2)], ids=str)
def test_missing_samples_make_groups_smaller(objective):
    kernel = torch.stack([unit_kernel(5, seed) for seed in range(3)])
    kernel[0, 1], kernel[0, :, 1] = math.nan, math.nan
    kernel[1] = math.nan
    kernel[1, 0, 0] = kernel[1, 2, 2] = 1.0
    kernel[1, 0, 2] = kernel[1, 2, 0] = 0.5
    linear, value = linearize_present(objective, kernel), value_present(objective, kernel)
    there = [0, 2, 3, 4]
    own = kernel[0][there][:, there][None]
    torch.testing.assert_close(linear[0, there], objective.advantage(own)[0])
    torch.testing.assert_close(value[0], objective.value(own)[0])
    assert linear[0, 1] == 0
    assert (linear[1] == 0).all(), "two samples have no baseline"
    assert value[1].isnan()
    torch.testing.assert_close(linear[2], objective.advantage(kernel[2:])[0])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_equal_samples_have_advantage_0(objective):
    kernel = 0.1 + 0.2 * torch.eye(6).expand(2, 6, 6)
    torch.testing.assert_close(objective.advantage(kernel), torch.zeros(2, 6), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("objective", "kernel", "message"),
    [
        (RaoDiversity(), torch.ones(2, 3), r"rao: expected a kernel matrix per prompt, \(P, M, M\).*got \(2, 3\)"),
        (RaoDiversity(), torch.ones(2, 3, 4), r"got \(2, 3, 4\)"),
        (RaoDiversity(), torch.ones(2, 1, 1), "rao: 2 of 1 samples"),
        (DPPDiversity(4), torch.ones(2, 3, 3), "dpp:4: 4 of 3 samples"),
        (
            RaoDiversity(),
            torch.tensor([[[1.0, math.nan], [0, 1]]]),
            "group 0, samples 0 and 1 is nan and is not finite",
        ),
        (
            RaoDiversity(),
            torch.tensor([[[1.0, 0.5], [0.2, 1]]]),
            "is 0.5 and differs from the entry of the same two samples in the other order",
        ),
        (
            DPPDiversity(2),
            torch.tensor([[[1.0, 2.0], [2.0, 1]]]),
            r"not positive semidefinite: samples \[0, 1\] have.* -1",
        ),
    ],
)
def test_refused_kernels(objective, kernel, message):
    with pytest.raises(ValueError, match=message):
        objective.linearize(kernel)


def test_refused_use():
    with pytest.raises(ValueError, match="all samples of a group of 2 have the same advantage; expected M >= 3"):
        RaoDiversity().advantage(torch.eye(2)[None])
    with pytest.raises(ValueError, match="baseline='median'"):
        RaoDiversity().advantage(torch.eye(3)[None], "median")
    with pytest.raises(ValueError, match="too many to enumerate"):
        DPPDiversity(5).value(torch.eye(60)[None], torch.full((60,), 1 / 60))
    with pytest.raises(ValueError, match="sum to 1"):
        RaoDiversity().value(torch.eye(3)[None], torch.ones(3))
    for wrong in (
        {"n": 1},
        {"n": 2.0},
        {"n": 2, "eps": 0.0},
        {"n": 2, "eps": math.nan},
        {"n": 2, "subsets": 0},
        {"n": 2, "seed": 0.5},
    ):
        with pytest.raises(ValueError, match=f"{list(wrong)[-1]}="):
            DPPDiversity(**wrong)
