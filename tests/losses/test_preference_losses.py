"""Losses of pairs against TRL's own code, and against the policies that they must end in, by enumeration."""

import itertools
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad
from support.truths import all_groups, float64, normal
from torch.nn.functional import logsigmoid
from trl import DPOTrainer

from nlgrpo.losses.preference import best_of_n_sft, bonbon, bonbon_margin, dpo, ipo, pairs, winners


def random_logps(rows, columns=None, seed=0):
    shape = (rows,) if columns is None else (rows, columns)
    return -3 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trl_loss(loss_type, token_logps, ref_logps, mask, beta):
    """What TRL 1.16.0's DPOTrainer makes of log-probs of tokens (2 B, L), chosen first; the mean over the pairs."""

    def model(**_):
        empty = torch.zeros_like(token_logps)
        return SimpleNamespace(
            log_probs=token_logps * mask[:, 1:], entropy=empty, mean_logits=empty, is_top1=empty.bool()
        )

    model.training = False
    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=model, accelerator=same, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, beta=beta,
        f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
    )  # fmt: skip
    reference = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), ref_logps.chunk(2), strict=True))
    inputs = {"input_ids": torch.zeros_like(mask), "completion_mask": mask, "attention_mask": mask} | reference
    return DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)


@pytest.mark.parametrize("beta", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_and_ipo_are_those_of_trl(loss_type, beta):
    B, L = 5, 8
    generator = torch.Generator().manual_seed(1)
    start, end = (
        torch.randint(1, 4, (2 * B, 1), generator=generator),
        torch.randint(4, L + 2, (2 * B, 1), generator=generator),
    )
    at = torch.arange(L + 1)
    mask = ((at >= start) & (at < end)).long()
    tokens = random_logps(2 * B, L).requires_grad_()
    ref = (random_logps(2 * B, L, seed=2) * mask[:, 1:]).sum(1)
    truth = trl_loss(loss_type, tokens, ref, mask, beta)

    own = (tokens * mask[:, 1:]).sum(1)
    lengths = mask.sum(1) if loss_type == "ipo" else 1
    given = (*(own / lengths).chunk(2), *(ref / lengths).chunk(2))
    ours = {"sigmoid": dpo, "ipo": ipo}[loss_type](*given, beta)
    assert ours.shape == (B,)
    torch.testing.assert_close(ours.mean(), truth)
    gradients = [torch.autograd.grad(loss, tokens)[0] for loss in (ours.mean(), truth)]
    assert gradients[1].abs().max() > 1e-3
    torch.testing.assert_close(*gradients)


def test_losses_by_hand():
    given = [torch.tensor([x]) for x in (-3.0, -4.0, -5.0, -4.5)]  # chosen, rejected; of the reference
    h = (-3 + 5) - (-4 + 4.5)
    assert dpo(*given, 0.2).item() == pytest.approx(math.log1p(math.exp(-0.2 * h)))
    assert ipo(*given, 0.2).item() == pytest.approx((h - 2.5) ** 2)
    assert bonbon_margin(4) == pytest.approx(3 * (1 + 1 / 2 + 1 / 3))
    assert bonbon(*given, n=4, alpha=0.3).item() == pytest.approx(0.3 * 3 + 0.7 * (h - 5.5) ** 2)
    assert best_of_n_sft(given[0]).item() == 3
    far = [1e4 * x for x in given]
    assert dpo(*far, 1.0).item() == 0
    assert dpo(far[1], far[0], far[3], far[2], 1.0).item() == pytest.approx(1e4 * h)


A = 6
RANK = torch.arange(A)  # atoms in the order of their reward
REF = float64(0.1, 0.25, 0.3, 0.05, 0.2, 0.1)


def ends_of(n):
    """Best (S,), worst (S,) and chance (S,) of every n draws of the reference."""
    draws, chance = all_groups(REF, n)
    return draws.amax(1), draws.amin(1), chance


def best_of(n):
    return REF.cumsum(0) ** n - (REF.cumsum(0) - REF) ** n


def slope_at(policy, loss):
    """Gradient in the logits of an expected loss at a policy; 0 where it is stationary."""
    logits = policy.log().clone().requires_grad_()
    loss(logits.log_softmax(0)).backward()
    return logits.grad


def test_dpo_ends_in_the_tilted_reference():
    """Preferences of Bradley and Terry with rewards r: pi_ref e^{r / beta} (Rafailov et al., eq. 4)."""
    r, beta = torch.tensor([0.0, 2.0, -1.0, 0.5, 1.0, 0.3], dtype=torch.float64), 0.7
    one, two = torch.cartesian_prod(RANK, RANK).T
    chance = REF[one] * REF[two] * (r[one] - r[two]).sigmoid()

    def loss(log_pi):
        return (chance * dpo(log_pi[one], log_pi[two], REF[one].log(), REF[two].log(), beta)).sum()

    optimum = REF * (r / beta).exp()
    assert slope_at(optimum / optimum.sum(), loss).abs().max() < 1e-15
    assert slope_at(REF, loss).abs().max() > 1e-2


def least_squares(best, worst, chance, target):
    """The log-ratio, up to a constant, of least expected (h_best - h_worst - target)^2: the normal equations."""
    rows = torch.zeros(len(best), A, dtype=torch.float64)
    rows[torch.arange(len(best)), best] += 1
    rows[torch.arange(len(best)), worst] -= 1
    weighted = rows * chance[:, None]
    found = torch.linalg.lstsq(rows.T @ weighted, weighted.T @ torch.full((len(best),), target, dtype=torch.float64))
    return found.solution if found.solution.ndim == 1 else found.solution[:, 0]


def normalised(log_ratio):
    policy = REF * log_ratio.exp()
    return policy / policy.sum()


def test_ipo_ends_in_what_its_docstring_says():
    one, two = torch.cartesian_prod(RANK, RANK).T
    kept = one > two
    chance, beta = (REF[one] * REF[two])[kept], 0.4
    below = REF.cumsum(0) - REF / 2  # an atom is half below itself

    def loss(log_pi):
        best, worst = one[kept], two[kept]
        return (chance * ipo(log_pi[best], log_pi[worst], REF[best].log(), REF[worst].log(), beta)).sum()

    # pairs of the same string, in which h = 0, are missing from the pairs and in the mean: they cancel
    assert slope_at(normalised(below / beta), loss).abs().max() < 1e-15
    assert slope_at(REF, loss).abs().max() > 1e-2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_best_of_n_sft_ends_in_the_best_of_n(n):
    best, _, chance = ends_of(n)
    slope = slope_at(best_of(n), lambda log_pi: (chance * best_of_n_sft(log_pi[best])).sum())
    assert slope.abs().max() < 1e-15
    if n > 1:
        assert slope_at(REF, lambda log_pi: (chance * best_of_n_sft(log_pi[best])).sum()).abs().max() > 1e-2


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bonbon_asks_for_the_mean_margin_of_the_best_of_n(n):
    """By quadrature over the least and the greatest of n uniform numbers, whose density is n (n-1) (v - u)^(n-2)."""
    density = lambda v, u: n * (n - 1) * (v - u) ** (n - 2) * (n - 1) * math.log(v / u)  # noqa: E731
    truth, _ = dblquad(density, 0, 1, lambda u: u, 1, epsabs=1e-10)
    assert bonbon_margin(n) == pytest.approx(truth, rel=1e-7)


@pytest.mark.parametrize("n", [2, 4])
def test_bonbon_is_stationary_where_it_should_be(n):
    best, worst, chance = ends_of(n)

    def loss(alpha):
        def of(log_pi):
            given = log_pi[best], log_pi[worst], REF[best].log(), REF[worst].log()
            return (chance * bonbon(*given, n=n, alpha=alpha)).sum()

        return of

    assert slope_at(best_of(n), loss(1)).abs().max() < 1e-15
    kept = best != worst
    pulled = normalised(least_squares(best[kept], worst[kept], chance[kept], bonbon_margin(n)))
    assert slope_at(pulled, loss(0)).abs().max() < 1e-12
    assert slope_at(best_of(n), loss(0)).abs().max() > 1e-2  # the margin of single pairs varies
    mixed = slope_at(pulled, loss(0.25))
    torch.testing.assert_close(mixed, 0.25 * slope_at(pulled, loss(1)), atol=1e-12, rtol=1e-12)


def rewards_of(P, K, ties=False):
    rewards = normal(P, K, seed=3)
    return rewards.round() if ties else rewards


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_pairs_are_the_ends_of_sets_that_share_nothing(n):
    rewards = rewards_of(400, 12)
    found = pairs(rewards, n)
    assert len(found.prompt) == 400 * (12 // n)
    assert found.prompt.tolist() == sorted(found.prompt.tolist())
    ours = list(zip(*(x.tolist() for x in (found.prompt, found.chosen, found.rejected)), strict=True))
    assert len({(p, c) for p, c, _ in ours} | {(p, r) for p, _, r in ours}) == 2 * len(ours)
    won = (rewards.argsort(1).argsort(1)).double()
    places = won[found.prompt, found.chosen], won[found.prompt, found.rejected]
    assert (places[0] > places[1]).all()
    # expected ranks of the greatest and the least of n of 12: (13 n / (n + 1) and 13 / (n + 1)) - 1
    for place, truth in zip(places, (13 * n / (n + 1) - 1, 13 / (n + 1) - 1), strict=True):
        assert place.mean().item() == pytest.approx(truth, abs=4 * place.std().item() / math.sqrt(len(place)) + 1e-12)


def test_another_sample_is_any_of_the_others():
    found = pairs(rewards_of(6000, 3), 3, rejected="random")
    ranks = rewards_of(6000, 3).argsort(1).argsort(1)
    assert (ranks[found.prompt, found.chosen] == 2).all()
    assert ranks[found.prompt, found.rejected].double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert len(found.prompt) == 6000
    tied = pairs(torch.tensor([1.0, 1.0, 0.0]).expand(4000, 3), 3, rejected="random")
    assert len(tied.prompt) / 4000 == pytest.approx(0.5, abs=0.04)  # the other is the equal one as often as the worse


@pytest.mark.parametrize("rejected", ["worst", "random"])
def test_pairs_without_a_preference_are_left_out(rejected):
    rewards = rewards_of(300, 6, ties=True)
    found = pairs(rewards, 2, rejected=rejected)
    assert 300 < len(found.prompt) < 900
    assert (rewards[found.prompt, found.chosen] > rewards[found.prompt, found.rejected]).all()
    assert len(pairs(torch.zeros(3, 4), 2, rejected=rejected).prompt) == 0


def test_all_pairs_of_each_set():
    rewards = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0, 5.0]], dtype=torch.float64)
    found = pairs(rewards, 6, rejected="all")
    ours = set(zip(found.chosen.tolist(), found.rejected.tolist(), strict=True))
    expected = {(a, b) for a in range(6) for b in range(6) if rewards[0, a] > rewards[0, b]}
    assert ours == expected
    assert len(found.prompt) == len(expected) == 14  # 15, less the pair of equal rewards
    many = pairs(rewards_of(40, 12), 4, rejected="all", seed=2)
    assert len(many.prompt) == 40 * 3 * 6
    assert many.prompt.tolist() == sorted(many.prompt.tolist())
    used = Counter(zip(many.prompt.tolist(), many.chosen.tolist(), strict=True))
    used += Counter(zip(many.prompt.tolist(), many.rejected.tolist(), strict=True))
    assert set(used.values()) == {3}  # each sample with the three others of its set
    two = pairs(rewards_of(40, 12), 2, rejected="all", seed=2)
    one = pairs(rewards_of(40, 12), 2, seed=2)
    assert torch.equal(two.chosen, one.chosen)


def test_any_of_equal_rewards_wins():
    rewards = torch.tensor([1.0, 1.0, 0.0]).expand(4000, 3)
    for places in (pairs(rewards, 3).chosen, winners(rewards, 3)[1]):
        assert np.bincount(places, minlength=3)[2] == 0
        assert (places == 0).double().mean().item() == pytest.approx(0.5, abs=0.04)


def test_winners_are_those_of_the_pairs():
    rewards = rewards_of(50, 9)
    found = pairs(rewards, 4, seed=5)
    prompt, best = winners(rewards, 4, seed=5)
    assert torch.equal(prompt, found.prompt)
    assert torch.equal(best, found.chosen)
    assert not torch.equal(best, winners(rewards, 4, seed=6)[1])
    prompt, every = winners(rewards, 1)
    assert sorted(zip(prompt.tolist(), every.tolist(), strict=True)) == list(itertools.product(range(50), range(9)))
    tied = winners(torch.zeros(3, 4), 2)
    assert tied[0].tolist() == [0, 0, 1, 1, 2, 2]  # a best one there is, also where nothing is preferred


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: dpo(ONE, ONE, ONE, torch.zeros(1, 1), 0.1), r"\(1,\), \(1,\), \(1,\), \(1, 1\)"),
        (lambda: ipo(*4 * [torch.zeros(1, 2)], 0.1), r"expected four .* \(1, 2\)"),
        (lambda: dpo(ONE, ONE, ONE, ONE, 0.0), "beta=0.0"),
        (lambda: ipo(ONE, ONE, ONE, ONE, math.inf), "beta=inf"),
        (lambda: bonbon(ONE, ONE, ONE, ONE, n=1, alpha=0.1), "n=1: expected an integer >= 2"),
        (lambda: bonbon(ONE, ONE, ONE, ONE, n=2, alpha=1.1), "alpha=1.1"),
        (lambda: bonbon_margin(2.5), "n=2.5"),
        (lambda: pairs(torch.zeros(2, 3), 4), r"K >= n = 4, got \(2, 3\)"),
        (lambda: pairs(torch.zeros(3), 2), r"got \(3,\)"),
        (lambda: pairs(torch.tensor([[0.0, math.nan]]), 2), r"rewards\[0, 1\] is NaN"),
        (lambda: pairs(torch.zeros(2, 3), 2, rejected="best"), "rejected='best'"),
        (lambda: pairs(torch.zeros(2, 3), 1), "n=1"),
        (lambda: winners(torch.zeros(2, 3), 0), "n=0: expected an integer >= 1"),
    ],
)
def test_invalid_input_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_dpo_of_a_margin_is_the_likelihood_of_the_choice():
    given = [random_logps(40, seed=s) for s in range(4)]
    h = (given[0] - given[2]) - (given[1] - given[3])
    torch.testing.assert_close(dpo(*given, 0.3), -logsigmoid(0.3 * h))
