"""Expected policy gradient over all possible groups compared with the gradient of the objective."""

import itertools
import math

import pytest
import torch
from test_registry import NAMED, exact, hump

from nlgrpo.objectives.advantages import advantages
from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    EntropicRisk,
    Mean,
    SoftBestOfN,
    WorstOfN,
    linearize_present,
    parse,
    value_present,
)

LETTERS = [[0.3, -1.0, 2.0], [0.3, 0.3, 2.0], [1.0, -2.0, -2.0], [5.0, 5.0, 5.0]]
SIZES = [(1, 2), (1, 4), (2, 3), (2, 5), (3, 4), (3, 6), (4, 6), (2, 2), (3, 3), (4, 4)]  # n, M
SMOOTH = [Mean(), BestOfN(2), BestOfN(4), WorstOfN(3), BestOfPoisson(2.0), SoftBestOfN(1.0), EntropicRisk(-0.7)]
SMOOTH += [Distortion(hump)]


def groups_of(rewards, logits, M):
    """All groups of M letters (K, M), their probabilities (K,), and d log pi(letter) / d logits of each sample."""
    pi = logits.softmax(0)
    letters = torch.tensor(list(itertools.product(range(len(rewards)), repeat=M)))
    scores = torch.eye(len(rewards), dtype=pi.dtype)[letters] - pi
    return torch.tensor(rewards, dtype=pi.dtype)[letters], pi[letters].prod(-1), scores


def expected_gradient(objective, rewards, logits, M, baseline="mean"):
    """E (1/M) sum_j A_j d log pi(y_j), the expected gradient of the trainer, (letters,)."""
    groups, probs, scores = groups_of(rewards, logits, M)
    A = advantages(objective.advantage(groups, baseline), baseline="none")
    return (probs[:, None, None] * A[..., None] * scores).sum((0, 1)) / M


def true_gradient(objective, rewards, logits):
    logits = logits.clone().requires_grad_()
    value = exact(objective, torch.tensor(rewards, dtype=torch.float64), logits.softmax(0))
    return torch.autograd.grad(value, logits)[0], value.detach()


LOGITS = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64)


@pytest.mark.parametrize("rewards", LETTERS, ids=str)
@pytest.mark.parametrize("make", [BestOfN, WorstOfN])
@pytest.mark.parametrize(("n", "M"), SIZES)
def test_unbiased_estimator_is_unbiased(n, M, make, rewards):
    objective = make(n, "unbiased")
    truth, value = true_gradient(make(n), rewards, LOGITS)
    torch.testing.assert_close(expected_gradient(objective, rewards, LOGITS, M), truth, atol=1e-13, rtol=1e-11)
    groups, probs, _ = groups_of(rewards, LOGITS, M)
    torch.testing.assert_close((probs * objective.value(groups)).sum(), value, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("rewards", LETTERS, ids=str)
@pytest.mark.parametrize("baseline", ["loo", "none"])
@pytest.mark.parametrize(("n", "M"), [(1, 2), (2, 3), (3, 4), (2, 2), (4, 4)])
def test_unbiased_with_every_baseline(n, M, baseline, rewards):
    for make in (BestOfN, WorstOfN):
        truth, _ = true_gradient(make(n), rewards, LOGITS)
        ours = expected_gradient(make(n, "unbiased"), rewards, LOGITS, M, baseline)
        torch.testing.assert_close(ours, truth, atol=1e-13, rtol=1e-11)


@pytest.mark.parametrize("rewards", LETTERS[:3], ids=str)
@pytest.mark.parametrize("M", [2, 3, 5])
def test_reinforce_is_unbiased_with_leave_one_out_or_no_baseline(M, rewards):
    truth, _ = true_gradient(Mean(), rewards, LOGITS)
    for baseline, share in (("loo", 1), ("none", 1), ("mean", (M - 1) / M)):
        torch.testing.assert_close(expected_gradient(Mean(), rewards, LOGITS, M, baseline), share * truth)
    raw = torch.tensor([rewards], dtype=torch.float64)
    torch.testing.assert_close(Mean().advantage(raw, "none"), raw)


def expected_gradient_by_counts(objective, rewards, logits, M):
    """As `expected_gradient`, for three letters and larger M: sums over the counts of the letters."""
    counts = [(a, b, M - a - b) for a in range(M + 1) for b in range(M + 1 - a)]
    letters = torch.tensor([[0] * a + [1] * b + [2] * c for a, b, c in counts])
    log_pi = logits.log_softmax(0)
    arrangements = [math.lgamma(M + 1) - sum(math.lgamma(n + 1) for n in count) for count in counts]
    probs = (torch.tensor(arrangements, dtype=logits.dtype) + log_pi[letters].sum(1)).exp()
    A = advantages(objective.advantage(torch.tensor(rewards, dtype=logits.dtype)[letters]), baseline="none")
    scores = torch.eye(3, dtype=logits.dtype)[letters] - log_pi.exp()
    return (probs[:, None, None] * A[..., None] * scores).sum((0, 1)) / M


@pytest.mark.parametrize("rewards", LETTERS[:3], ids=str)
@pytest.mark.parametrize("objective", SMOOTH, ids=str)
def test_plugin_is_biased_at_order_1_over_M(objective, rewards):
    """M times the bias converges: twice the samples halve the bias. The bias of plain GRPO is 1/M of the gradient."""
    torch.testing.assert_close(
        expected_gradient_by_counts(objective, rewards, LOGITS, 4), expected_gradient(objective, rewards, LOGITS, 4)
    )
    truth, _ = true_gradient(objective, rewards, LOGITS)
    bias = {M: expected_gradient_by_counts(objective, rewards, LOGITS, M) - truth for M in (32, 64)}
    assert bias[64].norm() > 1e-6
    torch.testing.assert_close(2 * bias[64], bias[32], rtol=0.15, atol=0.15 * bias[32].norm().item())
    if objective == Mean():
        torch.testing.assert_close(bias[32], -truth / 32)


@pytest.mark.parametrize(("n", "M"), [(2, 5), (3, 6), (4, 6), (1, 3)])
def test_unbiased_equals_the_leave_one_out_estimator(n, M):
    """M times the decrease of the mean over all subsets of n without the sample; for n = M, of the maximum."""
    rewards = torch.randn(5, M, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[0, :2] = rewards[0].max()
    value = lambda r: torch.stack([r[:, list(s)].amax(1) for s in itertools.combinations(range(r.shape[1]), n)]).mean(0)  # noqa: E731
    without = torch.stack([value(rewards[:, [k for k in range(M) if k != j]]) for j in range(M)], 1)
    torch.testing.assert_close(BestOfN(n, "unbiased").advantage(rewards), M * (value(rewards)[:, None] - without))
    torch.testing.assert_close(BestOfN(n, "unbiased").value(rewards), value(rewards))
    all_others = torch.stack([rewards[:, [k for k in range(M) if k != j]].amax(1) for j in range(M)], 1)
    of_all = BestOfN(M, "unbiased").advantage(rewards)
    torch.testing.assert_close(of_all, M * (rewards.amax(1, keepdim=True) - all_others))
    assert (of_all != 0).sum(1).tolist() == [0, 1, 1, 1, 1], "the first has two best ones"


@pytest.mark.parametrize(("n", "M"), SIZES)
def test_unbiased_weights_equal_exact_binomials(n, M):
    truth = [n * math.comb(k - 1, n - 1) / math.comb(M - 1, n - 1) for k in range(1, M + 1)]
    torch.testing.assert_close(BestOfN(n, "unbiased").weights(M), torch.tensor(truth, dtype=torch.float64))
    truth = [n * math.comb(M - k - 1, n - 1) / math.comb(M - 1, n - 1) for k in range(1, M)] + [0]
    torch.testing.assert_close(WorstOfN(n, "unbiased").weights(M), torch.tensor(truth, dtype=torch.float64))


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
    assert (objective.advantage(torch.full((2, 4), 0.1)) == 0).all()
    assert (objective.advantage(torch.full((2, 7), 0.1)) == 0).all()


def test_unbiased_with_missing_rewards():
    nan = math.nan
    rewards = torch.tensor([[1.0, 3.0, nan, 7.0], [nan, nan, 1.0, nan], [5.0, 1.0, 2.0, 4.0], [nan, 2.0, nan, 3.0]])
    objective = BestOfN(2, "unbiased")
    linear, value = linearize_present(objective, rewards), value_present(objective, rewards)
    for row, ours, estimate in zip(rewards, linear, value, strict=True):
        present_rewards = row[~row.isnan()]
        assert (ours[row.isnan()] == 0).all()
        if len(present_rewards) < 2:
            assert estimate.isnan()
            assert (ours == 0).all()
        else:
            torch.testing.assert_close(ours[~row.isnan()], objective.advantage(present_rewards[None])[0])
            torch.testing.assert_close(estimate, objective.value(present_rewards[None])[0])


@pytest.mark.parametrize("objective", [o for o in NAMED if o != CVaR(1)], ids=str)
def test_plugin_baselines(objective):
    rewards = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    linear = objective.linearize(rewards)
    torch.testing.assert_close(objective.advantage(rewards), linear - linear.mean(1, keepdim=True))
