"""Planted faults in what InfAlign, vBoN, IRO and IAMA's Theorem 5.3 need make the claims of `nlgrpo verify` fail."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from scipy.integrate import quad
from support.truths import float64
from support.verify_faults import of_the_mean, too_far

from nlgrpo.apps.verify import calibrated, check_inexact, check_infalign, check_iro, check_vbon, exact, tabular, tree
from nlgrpo.calibration import alignment, fixed_point, transforms, variational
from nlgrpo.engine import chunked_decoding, guided_search
from nlgrpo.objectives import rank_based
from nlgrpo.objectives.registry import BestOfN

PI = float64(0.5, 0.2, 0.3)

# --- the faults -------------------------------------------------------------------------------------------------------

calibrate, solve = alignment.calibrate, fixed_point.solve
losses, aligned = alignment._Aligned.losses, alignment._aligned
density, reward = variational.log_bon_density, variational.vbon_reward
linearize = BestOfN.linearize
score, expand, select = guided_search._Tree._score, guided_search._Tree._expand, guided_search.select
noise, reweighted = chunked_decoding.uniform_noise, tree.reweighted


def strict(rewards, reference):
    """Ties lose."""
    return (rewards[..., None] > reference[:, None]).double().mean(-1)


def by_distance(rewards, reference):
    """A z-score in place of a rank."""
    return ((rewards - reference.mean(1, keepdim=True)) / reference.std(1, keepdim=True)).sigmoid()


def constant(rewards, reference):
    return torch.full_like(rewards, 0.5)


def half_the_samples(rewards, reference):
    return calibrate(rewards, reference[:, ::2])


def wrong_factors(self, n):
    """Factors other than N before the integrals of Eq. 8 and 9."""
    single, best, worst = losses(self, n)
    return single, best * n / (n - 1), worst * (n - 1) / n


def squared(self, n):
    _, best, worst = losses(self, n)
    return float(self.panels.total(self.F**2)), best, worst


def larger_kl(transform, beta, *procedures):
    optimum = aligned(transform, beta, *procedures)
    return replace(optimum, kl=optimum.kl + 1e-3)


def without_sign(self, u):
    return (self.t * u).exp()


def for_another_n(n, beta, worst=False):
    """The solution for N - 1 in place of N."""
    return solve(n - 1 if n > 2 else 3, beta, worst)


def for_the_other_side(n, beta, worst=False):
    return solve(n, beta, not worst)


def concave(self, u, w):
    return -(w**2)


def one_power_less(self, z):
    return z ** (self.n - 1)


def of_ranks(self, rewards, probs=None):
    return linearize(self, rewards.argsort().argsort().to(rewards), probs)


def negative(self, rewards, probs=None):
    return -linearize(self, rewards, probs)


def one_draw_less(log_cdf, log_p, n):
    return density(log_cdf, log_p, n - 1 if n > 1 else 2)


def first_term(log_cdf, log_p, n):
    """n F^(n-1) p, the first term of the sum of Eq. 4."""
    return math.log(n) + (n - 1) * log_cdf + log_p


def normalised(log_cdf, log_p, n):
    return density(log_cdf, log_p, n).log_softmax(-1)


def by_reward(rewards, keys):
    """Ties in the order of the samples, whatever the strings."""
    return rewards.argsort(dim=-1, stable=True).argsort(dim=-1)


def without_entropy(log_pi, log_ref, log_cdf, n):
    return (reward(log_cdf, log_ref, n) + log_ref).mean(-1)


def powers_of_n(shift):
    def bound(log_pi, log_ref, log_cdf, n):
        return ((n + shift) * log_cdf - (log_pi - log_ref)).mean(-1)

    bound.__name__ = f"bound_with_n{shift:+d}"
    return bound


def once(self, new):
    """Queries are counted once for all values."""
    before = self.cost.queries
    score(self, new)
    self.cost.queries = before + len(new)


def one_token_more(self, beams, successors, tokens):
    self.cost.tokens += 1
    return expand(self, beams, successors, tokens)


def same_noise(seed, prompts, samples, positions):
    return noise(seed, prompts, torch.zeros_like(samples), positions)


def lowest(values, groups, beams, *, diverse=True):
    return select([-value for value in values], groups, beams, diverse=diverse)


def with_duplicates(values, groups, beams, *, diverse=True):
    return select(values, groups, beams, diverse=False)


def as_one_beam(B, H, A):
    return check_iro.one_beam(2 * B, H, A)


def best_first(self, candidates, length):
    return [beam.value for beam in candidates]


def unchanged(policy, of, beta):
    return policy


def backwards(policy, of, beta):
    return reweighted(policy, of, -beta)


Aligned, Tree = alignment._Aligned, guided_search._Tree
THEOREM_5_3 = check_inexact.theorem_5_3
CALIBRATION, THEOREM_3 = check_infalign.calibration, check_infalign.theorem_3
COROLLARY_2, DEFINITION_5 = check_infalign.corollary_2, check_infalign.definition_5
DISTRIBUTION, BOUNDS = check_vbon.proposition_1, check_vbon.lower_bounds
COST, ITERATED, SEARCH = check_iro.proposition_1, check_iro.theorem_1, check_iro.iterated_search

FINITE, CONTINUOUS = (f"The error exceeds the bound at most at rate delta: {name}" for name in ("3", "con"))
KOLMOGOROV, PAIRS, FLAT = "Its rate is", "Calibrated rewards are", "A function that is not"
PI_BON, TIES, NO_ORDER, EQ_4 = "pi_bon is", "Also with ties", "With ties and without", "log pi_bon equals"
BON, ONE, CHUNKS, TWO = "Best-of-N finds", "One beam finds", "Also with chunks", "Two beams find"

# What is replaced, its replacement, the check, and the claims that fail: these and no others.
FAULTS = [
    (rank_based.BestOfN, "linearize", negative, THEOREM_5_3, ["Expected gap", "The gap that"]),
    (rank_based.BestOfN, "linearize", of_the_mean, THEOREM_5_3, ["Expected gap", "The gap that"]),
    (tabular, "proximal_step", too_far, THEOREM_5_3, ["Expected gap", "Each run", "The gap that", "The computed"]),
    (alignment, "calibrate", strict, CALIBRATION, [PAIRS, FINITE]),
    (alignment, "calibrate", by_distance, CALIBRATION, ["No increasing function", PAIRS, CONTINUOUS, KOLMOGOROV]),
    (alignment, "calibrate", constant, CALIBRATION, [FLAT, PAIRS, FINITE, CONTINUOUS, KOLMOGOROV]),
    (alignment, "calibrate", half_the_samples, CALIBRATION, [PAIRS, CONTINUOUS, KOLMOGOROV]),
    (Aligned, "losses", wrong_factors, THEOREM_3, ["Best-of-N win", "Worst-of-N win", "A policy over K"]),
    (Aligned, "losses", squared, THEOREM_3, ["Win rate of one sample"]),
    (alignment, "_aligned", larger_kl, THEOREM_3, ["KL of the optimum"]),
    (transforms.Exponential, "_phi", without_sign, THEOREM_3, ["A policy over K"]),
    (fixed_point, "solve", for_another_n, COROLLARY_2, ["bon_fp solves", "won_fp solves"]),
    (fixed_point, "solve", for_the_other_side, COROLLARY_2, ["bon_fp", "won_fp"]),
    (transforms.Identity, "below_top", concave, COROLLARY_2, ["identity has"]),
    (rank_based.BestOfN, "_integral", one_power_less, DEFINITION_5, ["bon:N on the calibrated"]),
    (rank_based.WorstOfN, "_integral", one_power_less, DEFINITION_5, ["wor:N on the calibrated"]),
    (fixed_point, "solve", for_another_n, DEFINITION_5, ["bon:2 on", "bon:4 on u^N", "bon:8 on", "wor:4 on"]),
    (rank_based.BestOfN, "linearize", of_ranks, DEFINITION_5, ["bon:4 on u wins less", "bon:2 on", "bon:4 on u^N",
                                                               "bon:8 on"]),
    (variational, "log_bon_density", one_draw_less, DISTRIBUTION, [PI_BON, TIES, EQ_4]),
    (variational, "strict_order", by_reward, DISTRIBUTION, [TIES]),
    (variational, "log_bon_density", normalised, DISTRIBUTION, [NO_ORDER, EQ_4]),
    (variational, "log_bon_density", first_term, DISTRIBUTION, [PI_BON, TIES, NO_ORDER, EQ_4]),
    (variational, "log_bon_density", first_term, BOUNDS, ["J is"]),
    (variational, "objective", without_entropy, BOUNDS, ["J is", "J >= L_1", "J >= L + log N"]),
    (variational, "bound", powers_of_n(0), BOUNDS, ["L is", "L >= L_1"]),
    (variational, "bound", powers_of_n(-2), BOUNDS, ["L is", "L >= L_1", "J >= L + log N"]),
    (Tree, "_expand", one_token_more, COST, ["The search samples U H"]),
    (Tree, "_score", once, COST, ["Value models score", "Without complete"]),
    (chunked_decoding, "uniform_noise", same_noise, COST, [BON, ONE, CHUNKS, TWO]),
    (guided_search, "select", lowest, COST, [ONE, CHUNKS, TWO]),
    (guided_search, "select", with_duplicates, COST, [TWO]),
    (check_iro, "two_beams", as_one_beam, COST, [TWO, "Eq. 38 is"]),
    (check_iro, "one_beam", lambda U, chunks, A: U / A / chunks, COST, ["Best-of-N needs", BON, CHUNKS]),
    (tree, "reweighted", unchanged, ITERATED, ["The gap is within", "The weighted mean"]),
    (tree, "reweighted", backwards, ITERATED, ["The gap is within", "The weighted mean", "No update lowers"]),
    (Tree, "_keys", best_first, SEARCH, ["The search samples from"]),
    (Tree, "_expand", one_token_more, SEARCH, ["Guided search visits 8"]),
    (guided_search, "select", lowest, SEARCH, ["The search samples from", "Its values find"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "fault", "check", "claims"),
    [pytest.param(*fault, marks=[pytest.mark.records] if i % 3 else []) for i, fault in enumerate(FAULTS)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_planted_fault_is_found(monkeypatch, where, name, fault, check, claims):
    monkeypatch.setattr(where, name, fault)
    failed = [result.claim for result in check(True).results if not result.holds]
    assert all(any(text.startswith(claim) for text in failed) for claim in claims), failed
    assert [text for text in failed if not text.startswith(tuple(claims))] == []


@pytest.mark.slow
def test_every_claim_has_a_planted_fault():
    for check in {check for *_, check, _ in FAULTS}:
        planted = tuple(claim for *_, of, claims in FAULTS if of is check for claim in claims)
        results = check(True).results
        assert all(result.holds for result in results)
        assert [result.claim for result in results if not result.claim.startswith(planted)] == []


# --- functions the checks use -----------------------------------------------------------------------------------------


def test_what_best_of_n_chooses_by_hand():
    order, rewards = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]).double()
    other = float64(0.2, 0.5, 0.3)
    draws = list(itertools.product(range(3), repeat=2))
    by_hand = [sum(PI[i] * PI[j] for i, j in draws if max(i, j, key=lambda a: order[a]) == a) for a in range(3)]
    torch.testing.assert_close(exact.chosen(order, PI, 2), torch.stack(by_hand))
    ranked = PI[[1, 2, 0]].cumsum(0)  # from the lowest
    torch.testing.assert_close(exact.best_of_masses(ranked, 2), torch.stack(by_hand)[[1, 2, 0]])
    for worst, choose in ((False, max), (True, min)):
        ours = [(PI[i] * PI[j], choose(rewards[i], rewards[j])) for i, j in draws]
        theirs = [(other[i] * other[j], choose(rewards[i], rewards[j])) for i, j in draws]
        wins = sum(p * q * ((r > s) + 0.5 * (r == s)) for (p, r), (q, s) in itertools.product(ours, theirs))
        assert exact.win_rate(rewards, PI, other, 2, worst=worst).item() == pytest.approx(float(wins))
    kl = sum(p * math.log(p / q) for p, q in zip(PI.tolist(), other.tolist(), strict=True))
    assert exact.divergence(PI[None], other).tolist() == pytest.approx([kl])


def test_densities_equal_quadrature():
    """The density 3 u^2 of best-of-3: F = u^3."""
    u, w = calibrated.points()
    torch.testing.assert_close(u + w, torch.ones_like(u))
    policy = calibrated.Density.of(2 * u.log())
    assert pytest.approx(u.numpy() ** 3, abs=1e-12) == policy.F
    assert policy.kl == pytest.approx(quad(lambda x: 3 * x**2 * math.log(3 * x**2), 0, 1)[0])
    best = quad(lambda x: 4 * 3 * x**2 * x**9 * x**4, 0, 1)[0]
    worst = quad(lambda x: 4 * 3 * x**2 * (1 - x**3) ** 3 * (1 - (1 - x) ** 4), 0, 1)[0]
    assert (policy.win_rate(4), policy.win_rate(4, worst=True)) == pytest.approx((best, worst))
    at = 20_000
    inner = quad(lambda x: (x * x**3) ** 3, u[at], 1)[0], quad(lambda x: ((1 - x) * (1 - x**3)) ** 3, u[at], 1)[0]
    assert [policy.corollary_2(4, worst=worst)[at] for worst in (False, True)] == pytest.approx(
        [-16 * x for x in inner]
    )


def test_trees_equal_a_sum_over_leaves():
    policy = tree.random_policy(2, 3, 1.0, 0)
    rewards = torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = list(itertools.product(range(2), repeat=3))
    chance = [math.prod(policy[h][tree.number(y[:h], 2), y[h]].item() for h in range(3)) for y in leaves]
    assert tree.leaf_probs(policy).tolist() == pytest.approx(chance)
    assert tree.values(policy, rewards)[0].item() == pytest.approx((float64(*chance) * rewards).sum().item())
    assert tree.best_values(policy, rewards)[1].tolist() == [rewards[:4].max().item(), rewards[4:].max().item()]
    assert tree.concentrability(policy, rewards) == pytest.approx(1 / chance[int(rewards.argmax())])
    once = tree.reweighted(policy, tree.values(policy, rewards), 0.5)
    after = tree.values(policy, rewards)[1]
    weights = [policy[0][0, a].item() * math.exp(2 * after[a].item()) for a in range(2)]
    assert once[0][0].tolist() == pytest.approx([weight / sum(weights) for weight in weights])
    betas = torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]
    both = tree.reweighted(policy, tree.values(policy, rewards), betas)
    torch.testing.assert_close(both[2][0], once[2])


def test_the_looser_bound_by_hand():
    reference, F = torch.tensor([0.5, 0.2, 0.3]).double(), torch.tensor([0.1, 0.4, 0.7]).double()
    logs = [sum(math.log(F[a] ** (3 - i) * reference[a] ** i) for i in (1, 2, 3)) for a in range(3)]
    by_hand = sum(p * (log - math.log(p)) for p, log in zip(PI.tolist(), logs, strict=True))  # Eq. 19a
    assert check_vbon.looser_bound(PI[None], reference, F, 3).item() == pytest.approx(by_hand)


def test_the_success_of_two_beams_equals_drawn_searches():
    generator, trials = torch.Generator().manual_seed(0), 20_000
    hits = 0
    for _ in range(trials):
        beams = [True]  # whether a beam is the best prefix
        for step in range(3):
            each = 4 if step == 0 else 2
            drawn = torch.randint(3, (len(beams), each), generator=generator).tolist()
            found = [best and token == 0 for best, row in zip(beams, drawn, strict=True) for token in row]
            beams = [any(found), all(found)]  # a second beam with the best prefix only if there is no other
        hits += beams[0]
    truth = check_iro.two_beams(2, 3, 3)
    assert abs(hits / trials - truth) < 4.5 * math.sqrt(truth * (1 - truth) / trials)
