"""Diversity objectives compared with enumeration: values, first variations and expected policy gradients."""

import itertools
import math

import pytest
import torch

from nlgrpo.objectives.diversity import DPPDiversity, RaoDiversity, _subsets
from nlgrpo.objectives.registry import linearize_present, value_present

LOGITS = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64)
OBJECTIVES = [RaoDiversity(), DPPDiversity(2), DPPDiversity(3, eps=0.1), DPPDiversity(4, eps=0.5)]


def kernel_of(letters, seed=0, width=4):
    features = torch.randn(letters, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    features = features / features.norm(dim=1, keepdim=True)
    return features @ features.T


def exact(objective, kernel, probs):
    """E h(y_1, .., y_n) over all tuples of letters, differentiable in ``probs``."""
    n = 2 if isinstance(objective, RaoDiversity) else objective.n
    total = probs.new_zeros(())
    for letters in itertools.product(range(len(kernel)), repeat=n):
        K = kernel[list(letters)][:, list(letters)]
        h = (
            -K[0, 1]
            if n == 2 and isinstance(objective, RaoDiversity)
            else torch.logdet(K + objective.eps * torch.eye(n, dtype=torch.float64))
        )
        total = total + probs[list(letters)].prod() * h
    return total


def groups_of(kernel, logits, M):
    """Kernels of all groups of M letters (K, M, M), their probabilities, and d log pi / d logits of each sample."""
    pi = logits.softmax(0)
    letters = torch.tensor(list(itertools.product(range(len(kernel)), repeat=M)))
    return (
        kernel[letters[:, :, None], letters[:, None, :]],
        pi[letters].prod(-1),
        torch.eye(len(kernel), dtype=pi.dtype)[letters] - pi,
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_value_and_first_variation_of_a_policy(objective):
    kernel, logits = kernel_of(3), LOGITS.clone().requires_grad_()
    probs = logits.softmax(0)
    value = exact(objective, kernel, probs)
    (truth,) = torch.autograd.grad(value, logits)
    probs = probs.detach()
    torch.testing.assert_close(objective.value(kernel[None], probs), value.detach()[None])
    linear = objective.linearize(kernel[None], probs)[0]
    torch.testing.assert_close(probs * (linear - (probs * linear).sum()), truth, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_derivative_along_a_mixture(objective):
    kernel, g = kernel_of(4), torch.Generator().manual_seed(3)
    here, there = torch.rand(2, 4, generator=g, dtype=torch.float64).softmax(1)
    h = 1e-4
    slope = (
        exact(objective, kernel, here + h * (there - here)) - exact(objective, kernel, here - h * (there - here))
    ) / (2 * h)
    torch.testing.assert_close(
        ((there - here) * objective.linearize(kernel[None], here)[0]).sum(), slope, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("more", [1, 2])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_value_and_gradient_are_unbiased(objective, more):
    M, kernel = objective.order + more, kernel_of(3)
    logits = LOGITS.clone().requires_grad_()
    value = exact(objective, kernel, logits.softmax(0))
    (truth,) = torch.autograd.grad(value, logits)
    groups, chance, scores = groups_of(kernel, LOGITS, M)
    torch.testing.assert_close((chance * objective.value(groups)).sum(), value.detach())
    for baseline in ("mean", "loo", "none"):
        A = objective.advantage(groups, baseline)
        ours = (chance[:, None, None] * A[..., None] * scores).sum((0, 1)) / M
        torch.testing.assert_close(ours, truth, atol=1e-12, rtol=1e-10)
    linear = objective.linearize(groups)
    plain = (linear - linear.mean(1, keepdim=True))[..., None] * scores
    share = (M - objective.order) / M
    torch.testing.assert_close((chance[:, None, None] * plain).sum((0, 1)) / M, share * truth, atol=1e-12, rtol=1e-10)


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
    kernel = kernel_of(3)
    all_of_them, few = DPPDiversity(2, eps=0.1), DPPDiversity(2, eps=0.1, subsets=1, seed=3)
    groups, chance, scores = groups_of(kernel, LOGITS, 5)
    assert len(_subsets(5, 2, 1, 3)) < math.comb(5, 2)
    assert not torch.allclose(all_of_them.linearize(groups), few.linearize(groups))
    torch.testing.assert_close((chance * few.value(groups)).sum(), (chance * all_of_them.value(groups)).sum())
    gradients = [
        (chance[:, None, None] * o.advantage(groups)[..., None] * scores).sum((0, 1)) for o in (few, all_of_them)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("objective", [RaoDiversity(), DPPDiversity(2)], ids=str)
def test_missing_samples_make_groups_smaller(objective):
    kernel = torch.stack([kernel_of(5, seed) for seed in range(3)])
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
