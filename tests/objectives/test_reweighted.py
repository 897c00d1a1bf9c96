"""Expected policy gradient over all groups that another policy samples, compared with the gradient of the objective."""

import itertools

import pytest
import torch
from support import truths
from support.truths import float64, normal

from nlgrpo.objectives.advantages import advantages
from nlgrpo.objectives.aggregation import combine
from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    DPPDiversity,
    EntropicRisk,
    Functional,
    MajorityVote,
    Mean,
    RaoDiversity,
    Smoothed,
    SoftBestOfN,
    WorstOfN,
    linearize_present,
    value_present,
)

REWARDS = float64(0.3, -1.0, 2.0)
TIES = float64(0.3, 0.3, 2.0)
PI = float64(0.2, -0.4, 0.9)  # logits
Q = float64(0.6, 0.3, 0.1)
ANSWERS = float64(0.0, 1.0, 0.0)
KERNEL = float64([1.0, 0.6, 0.1], [0.6, 1.0, 0.3], [0.1, 0.3, 1.0])


def values_of(objective, rewards):
    """What the objective takes for the three letters."""
    if objective.pairwise:
        return KERNEL
    return torch.stack([rewards, ANSWERS], -1) if objective.voted else rewards


def inputs_of(objective, rewards, letters):
    return truths.inputs(objective, values_of(objective, rewards), letters)


def expected(letters, chance, coefficients):
    return truths.expected_gradient(PI, letters, chance, coefficients)


def expected_gradient(objective, rewards, M, baseline):
    """Over all groups that the sampler Q draws."""
    letters, chance = truths.all_groups(Q, M)
    w = (PI.softmax(0) / Q)[letters]
    A = objective.reweighted_advantage(inputs_of(objective, rewards, letters), w, baseline)
    return expected(letters, chance, w * A)


def true_gradient(objective, rewards):
    return truths.gradient(objective, values_of(objective, rewards), PI)[0]


UNBIASED = [
    (BestOfN(1, "unbiased"), 2), (BestOfN(2, "unbiased"), 2), (BestOfN(2, "unbiased"), 4), (BestOfN(4, "unbiased"), 5),
    (WorstOfN(2, "unbiased"), 3), (WorstOfN(3, "unbiased"), 3), (MajorityVote(3, "unbiased"), 5), (RaoDiversity(), 4),
    (DPPDiversity(2), 4), (DPPDiversity(3), 4), (DPPDiversity(3, subsets=5), 6),
]  # fmt: skip


@pytest.mark.parametrize("rewards", [REWARDS, TIES], ids=["distinct", "ties"])
@pytest.mark.parametrize("baseline", ["mean", "loo", "none"])
@pytest.mark.parametrize(("objective", "M"), UNBIASED, ids=lambda x: str(x))
def test_estimates_over_subsets_are_unbiased_for_any_sampler(objective, M, baseline, rewards):
    ours = expected_gradient(objective, rewards, M, baseline)
    torch.testing.assert_close(ours, true_gradient(objective, rewards), atol=1e-12, rtol=1e-10)
    if objective.fewest <= M:  # without weights the same groups give another gradient
        letters, chance = truths.all_groups(Q, M)
        uncorrected = expected(letters, chance, objective.advantage(inputs_of(objective, rewards, letters), baseline))
        assert (uncorrected - true_gradient(objective, rewards)).norm() > 1e-3


@pytest.mark.parametrize("M", [2, 3, 5])
def test_grpo_is_unbiased_for_any_sampler(M):
    truth = true_gradient(Mean(), REWARDS)
    for baseline, share in (("loo", 1), ("none", 1), ("mean", (M - 1) / M)):
        torch.testing.assert_close(expected_gradient(Mean(), REWARDS, M, baseline), share * truth)


def test_a_mixture_of_objectives_is_unbiased_for_any_sampler():
    """A weighted sum of several users' objectives, linearised and combined as a training step does."""
    users = [(BestOfN(2, "unbiased"), REWARDS, 0.5), (WorstOfN(2, "unbiased"), TIES, 0.3), (Mean(), -REWARDS, 0.2)]
    M = 4
    letters, chance = truths.all_groups(Q, M)
    w = (PI.softmax(0) / Q)[letters]
    terms = torch.stack([linearize_present(o, r[letters], "loo", w) for o, r, _ in users])
    linear = combine(terms, float64(*(weight for *_, weight in users)))
    ours = expected(letters, chance, w * advantages(linear, baseline="none"))
    truth = sum(weight * true_gradient(o, r) for o, r, weight in users)
    torch.testing.assert_close(ours, truth, atol=1e-12, rtol=1e-10)


PLUG_IN = [Mean(), BestOfN(4), WorstOfN(3), BestOfPoisson(2.0), SoftBestOfN(1.0), EntropicRisk(-0.7)]
PLUG_IN += [Distortion([0.5, 2.0, 0.5]), MajorityVote(3), Functional(lambda p, r: (p * r.exp()).sum(-1).log())]


@pytest.mark.parametrize("objective", PLUG_IN, ids=str)
def test_a_plug_in_is_taken_at_the_weighted_distribution(objective):
    """A group with every letter once, weighted by pi / q for a uniform q, has exactly the distribution pi."""
    letters, pi = torch.arange(3)[None], PI.softmax(0)
    atoms, w = inputs_of(objective, REWARDS, letters), 3 * pi[None]
    linear = objective.linearize(atoms, pi)
    ours = objective.reweighted_advantage(atoms, w, "mean")
    torch.testing.assert_close(ours, linear - linear.mean(-1, keepdim=True))
    torch.testing.assert_close(objective.reweighted_value(atoms, w), objective.value(atoms, pi))
    A = objective.reweighted_advantage(atoms, w, "none")
    ours = (w * A)[0] @ (torch.eye(3, dtype=PI.dtype) - pi) / 3
    logits = PI.clone().requires_grad_()
    truth = torch.autograd.grad((linear[0] * logits.softmax(0)).sum(), logits)[0]
    torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("objective", [o for o, _ in UNBIASED] + [*PLUG_IN, CVaR(0.5), CVaR(0.05)], ids=str)
@pytest.mark.parametrize("baseline", ["mean", "loo", "none"])
def test_weights_of_1_change_nothing(objective, baseline):
    letters = torch.randint(0, 3, (6, 7), generator=torch.Generator().manual_seed(0))
    inputs, ones = inputs_of(objective, REWARDS, letters), torch.ones(6, 7)
    plain = objective.advantage(inputs, baseline)
    ours = objective.reweighted_advantage(inputs, ones, baseline)
    if baseline == "none":  # up to a constant per group
        plain, ours = plain - plain[:, :1], ours - ours[:, :1]
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(objective.reweighted_value(inputs, ones), objective.value(inputs))


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5, 0.8])
def test_cvar_averages_its_jump_over_the_part_of_each_sample(alpha):
    """The gap above the k-th smallest reward is weighted by the mean of f over that sample's part of [0, 1]."""
    rewards = float64([-1.0, 0.5, 2.0, 3.0])
    w = float64([0.3, 1.1, 0.0, 0.6])
    ranks = torch.arange(200_000, dtype=torch.float64).add(0.5) / 200_000
    f = (ranks <= alpha).double() / alpha
    cdf = torch.cat([torch.zeros(1, dtype=torch.float64), (w / w.sum())[0].cumsum(0)])
    within = [f[(ranks > low) & (ranks <= high)] for low, high in itertools.pairwise(cdf.tolist())]
    means = torch.stack([part.mean() if len(part) else (cdf[2] <= alpha) / alpha for part in within])
    A = CVaR(alpha).reweighted_advantage(rewards, w, "none")
    torch.testing.assert_close(A.diff(dim=-1), means[:-1] * rewards.diff(dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("objective", [BestOfN(3, "unbiased"), BestOfN(3), WorstOfN(2, "unbiased"), Mean()], ids=str)
def test_a_masked_sample_is_as_absent_to_the_others(objective):
    rewards = normal(4, 6, seed=1)
    w = torch.rand(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    w[:, 2] = 0
    kept = [0, 1, 3, 4, 5]
    full = objective.reweighted_advantage(rewards, w, "none")[:, kept]
    alone = objective.reweighted_advantage(rewards[:, kept], w[:, kept], "none")
    scale = 1.0
    if getattr(objective, "estimator", "plugin") == "unbiased":  # the mean over subsets of 6 has more of them
        n = objective.n
        scale = torch.tensor([(5 - d) / (6 - d) for d in range(1, n)], dtype=torch.float64).prod()
        torch.testing.assert_close(full, scale * alone)
    else:
        torch.testing.assert_close(full - full[:, :1], alone - alone[:, :1])
    torch.testing.assert_close(
        objective.reweighted_value(rewards, w), objective.reweighted_value(rewards[:, kept], w[:, kept])
    )


@pytest.mark.parametrize("objective", [BestOfN(2, "unbiased"), BestOfN(2), RaoDiversity()], ids=str)
def test_a_group_without_weights_has_no_advantage_after_the_loss_weights_it(objective):
    inputs = inputs_of(objective, REWARDS, torch.tensor([[0, 1, 2]]))
    A = objective.reweighted_advantage(inputs, torch.zeros(1, 3))
    assert A.isfinite().all()
    assert objective.reweighted_value(inputs, torch.zeros(1, 3)).isnan().all()


@pytest.mark.parametrize("objective", [BestOfN(2, "unbiased"), WorstOfN(3, "unbiased"), BestOfN(2), Mean()], ids=str)
def test_equal_rewards_have_advantages_of_0(objective):
    w = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = objective.reweighted_advantage(torch.full((3, 5), 0.7, dtype=torch.float64), w)
    torch.testing.assert_close(A, torch.zeros_like(A), atol=1e-15, rtol=0)


def test_missing_rewards_and_their_weights_are_left_out():
    rewards = float64([1.0, torch.nan, 3.0, 0.0], [2.0, 1.0, 5.0, 4.0])
    w = float64([0.5, 9.0, 1.5, 2.0], [1.0, 0.2, 0.7, 1.1])
    objective, kept = BestOfN(2, "unbiased"), [0, 2, 3]
    linear = linearize_present(objective, rewards, "mean", w)
    alone = objective.reweighted_advantage(rewards[:1, kept], w[:1, kept])
    torch.testing.assert_close(linear[:1, kept], alone)
    assert linear[0, 1] == 0
    values = value_present(objective, rewards, w)
    torch.testing.assert_close(values[:1], objective.reweighted_value(rewards[:1, kept], w[:1, kept]))
    torch.testing.assert_close(linear[1:], objective.reweighted_advantage(rewards[1:], w[1:]))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(1, 2), r"expected weights \(1, 3\), got \(1, 2\)"),
        (torch.tensor([[1.0, -1.0, 1.0]]), "group 0, sample 1 is not a finite number >= 0"),
        (torch.tensor([[1.0, 1.0, torch.inf]]), "group 0, sample 2 is not a finite number >= 0"),
        (torch.tensor([[torch.nan, 1.0, 1.0]]), "group 0, sample 0 is not a finite number >= 0"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    for method in (BestOfN(2).reweighted_advantage, BestOfN(2).reweighted_value):
        with pytest.raises(ValueError, match=message):
            method(torch.tensor([[1.0, 2.0, 3.0]]), weights)


def test_a_kernel_smoother_takes_no_weights():
    for method in (Smoothed(BestOfN(2)).reweighted_advantage, Smoothed(BestOfN(2)).reweighted_value):
        with pytest.raises(ValueError, match="bon:2:kde: the kernel smoother takes no importance weights; use bon:2"):
            method(REWARDS[None], torch.ones(1, 3))
