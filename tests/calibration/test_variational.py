"""Variational best-of-N compared with mpmath and enumerated best-of-N; its order with that of Python tuples."""

import hashlib
import itertools
import math
import struct

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from support import truths
from support.truths import float64

from nlgrpo.calibration.variational import (
    bound,
    log_bon_density,
    log_strict_cdf,
    objective,
    strict_counts,
    strict_order,
    string_keys,
    vbon_reward,
)

fuzz = settings(derandomize=True, max_examples=100, deadline=None, database=None)
NS = [1, 1.5, 2, 3, 10, 512, 10_000]
LOGS = [-math.inf, -1e4, -9999.5, -745.2, -100.0, -44.0, -36.5, -35.5, -20.0, -2.0, -0.71, -math.log(2), -0.69, -0.1]
LOGS += [-1e-8, -1e-17, -1e-300, 0.0]


def big(x):
    return mpmath.mpf(x)


def exact(a, b, n):
    """log[(F + p)^n - F^n] with 60 digits."""
    F, p = mpmath.exp(big(a)) if a > -math.inf else big(0), mpmath.exp(big(b)) if b > -math.inf else big(0)
    if p == 0:
        return -mpmath.inf
    return n * mpmath.log(F) + mpmath.log(mpmath.expm1(n * mpmath.log1p(p / F))) if F else n * big(b)


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def assert_exact(log_cdf, log_p, n):
    found = log_bon_density(log_cdf, log_p, n)
    assert found.dtype == torch.float64
    for a, b, x in zip(log_cdf.tolist(), log_p.tolist(), found.tolist(), strict=True):
        truth = exact(a, b, n)
        if math.isinf(truth):
            assert x == -math.inf, (a, b, n)
        else:
            assert abs(big(x) - truth) <= 1e-12 * max(1, abs(truth)), (a, b, n, x, truth)


@pytest.mark.parametrize("n", NS)
def test_density_equals_60_digits(n):
    """All pairs of F and p, also with F + p > 1, which an estimated F may give."""
    assert_exact(*torch.cartesian_prod(*2 * [torch.tensor(LOGS, dtype=torch.float64)]).T, n)


@pytest.mark.parametrize("n", [2, 10_000])
@pytest.mark.parametrize("reach", ["one", "few", "far"])
def test_density_at_random(n, reach):
    """F + p = 1 up to rounding, where errors of log(F + p) are multiplied by n, and p down to e^-10000."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.rand(2, 1500, generator=generator, dtype=torch.float64)
    a, b = {"one": (u.log(), (-u).log1p()), "few": (u.log(), v.log()), "far": (-1e4 * u, -1e4 * v)}[reach]
    assert_exact(a, b, n)


def test_density_at_limits():
    p = torch.tensor([-1e4, -100.0, -1e-3, 0.0], dtype=torch.float64)
    nothing = torch.tensor(-math.inf)
    for n in (1, 2, 512):
        torch.testing.assert_close(log_bon_density(nothing, p, n), n * p, rtol=0, atol=0)
    torch.testing.assert_close(log_bon_density(torch.tensor(-3.0), p, 1), p)
    assert log_bon_density(torch.tensor([-3.0, -math.inf]), nothing, 4).tolist() == [-math.inf, -math.inf]
    rounded = torch.tensor([1 - 1e-16, 1.0], dtype=torch.float64).log()  # F of the best string, exact and rounded
    found = log_bon_density(rounded, torch.tensor(math.log(1e-16)), 4)
    torch.testing.assert_close(found, torch.full((2,), math.log(4e-16), dtype=torch.float64), rtol=1e-7, atol=0)


def test_density_broadcasts():
    a, b = torch.rand(3, 1).log(), torch.rand(4).log()
    found = log_bon_density(a, b, 5)
    assert found.shape == (3, 4)
    assert found[2, 1] == log_bon_density(a[2, 0], b[1], 5)


@pytest.mark.parametrize("n", [1, 2, 512, 10_000])
def test_density_has_finite_gradients(n):
    """n F [(F + p)^(n-1) - F^(n-1)] / pi_bon in log F, and n p (F + p)^(n-1) / pi_bon in log p."""
    a, b = torch.cartesian_prod(*2 * [torch.tensor(LOGS, dtype=torch.float64)]).T
    kept = b > -math.inf
    a, b = a[kept].clone().requires_grad_(), b[kept].clone().requires_grad_()
    ours = torch.autograd.grad(log_bon_density(a, b, n).sum(), (a, b))
    for x, y, da, db in zip(*(part.tolist() for part in (a, b, *ours)), strict=True):
        F, p = mpmath.exp(big(x)) if x > -math.inf else big(0), mpmath.exp(big(y))
        others = (n - 1) * mpmath.log(F + p) if F else (n - 1) * big(y)
        shrunk = (
            1 - mpmath.exp((1 - n) * mpmath.log1p(p / F)) if p / max(F, p) > 1e-40 and F else (n - 1) * p / max(F, p)
        )
        in_F = n * mpmath.exp(x + others - exact(x, y, n)) * shrunk if F else 0
        assert da == pytest.approx(float(in_F), rel=1e-9, abs=1e-12 * n), (x, y)
        assert db == pytest.approx(float(n * mpmath.exp(y + others - exact(x, y, n))), rel=1e-9, abs=1e-12 * n), (x, y)


REWARDS = float64(0.3, 0.3, -1.0, 2.0, 0.3, -1.0)  # ties of three and of two
PROBS = float64(0.1, 0.25, 0.3, 0.05, 0.2, 0.1)
KEYS = torch.tensor([7, -3, 0, 0, 2**62, -(2**62)])
ORDER = sorted(range(6), key=lambda i: (REWARDS[i].item(), KEYS[i].item()))


def true_log_cdf():
    below = torch.zeros(6, dtype=torch.float64)
    for place, atom in enumerate(ORDER):
        below[atom] = sum(PROBS[lower] for lower in ORDER[:place])
    return below.log()


def true_bon(n):
    """Probability that each atom is the highest in the order among n draws, from all 6^n tuples."""
    found = torch.zeros(6, dtype=torch.float64)
    for draws, chance in zip(*(x.tolist() for x in truths.all_groups(PROBS, n)), strict=True):
        found[max(draws, key=ORDER.index)] += chance
    return found


def atoms_by_probability(policy):
    """Atoms (1, M), repeated in proportion to their probability, so that a mean over them is an expectation."""
    return torch.arange(6).repeat_interleave(torch.tensor(policy))[None]


def kl(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_density_equals_best_of_n(n):
    torch.testing.assert_close(log_bon_density(true_log_cdf(), PROBS.log(), n).exp(), true_bon(n), rtol=1e-13, atol=0)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    "policy", [[1, 1, 1, 1, 1, 1], [5, 1, 2, 40, 1, 3], [0, 0, 0, 10, 0, 0], [0, 3, 0, 5, 1, 0]], ids=str
)
def test_objective_equals_minus_kl_and_exceeds_its_bound(policy, n):
    at, pi = atoms_by_probability(policy), torch.tensor(policy, dtype=torch.float64) / sum(policy)
    log_cdf, seen = true_log_cdf(), pi > 0
    given = (pi.log()[at], PROBS.log()[at], log_cdf[at], n)
    truth = -kl(pi[seen], true_bon(n)[seen])
    torch.testing.assert_close(objective(*given), truth[None], rtol=1e-12, atol=1e-13)
    lower = (n - 1) * log_cdf[seen] @ pi[seen] - kl(pi[seen], PROBS[seen]) if n > 1 else -kl(pi[seen], PROBS[seen])
    torch.testing.assert_close(bound(*given), lower[None], rtol=1e-12, atol=1e-13)
    upper = lower + (n - 1) * (pi[seen] * ((log_cdf.exp() + PROBS).log() - log_cdf)[seen]).sum() if n > 1 else lower
    assert lower + math.log(n) <= objective(*given) + 1e-12  # Theorem 2, with the log n that its proof drops
    if lower > -math.inf:
        assert objective(*given) <= upper + math.log(n) + 1e-12


@pytest.mark.parametrize("n", [2, 4, 16])
def test_optimal_policies_of_both_rewards(n):
    """Maximise E reward - KL(pi | pi_ref) over softmax policies: pi_bon, value 0 (Eq. 5), or pi_ref F^(n-1) (Eq. 8)."""
    best = log_bon_density(true_log_cdf(), PROBS.log(), n).exp()
    tilted = PROBS * true_log_cdf().exp() ** (n - 1)
    for rewards, peak, value in (
        (vbon_reward(true_log_cdf(), PROBS.log(), n), best, 0.0),
        (vbon_reward(true_log_cdf(), PROBS.log(), n, bound=True), tilted / tilted.sum(), float(tilted.sum().log())),
    ):
        finite = rewards.isfinite()

        def gain(logits, finite=finite, rewards=rewards):
            log_pi = logits.log_softmax(-1)
            return (log_pi.exp() * (rewards[finite] - (log_pi - PROBS[finite].log()))).sum()

        # Without a bound on the improvement of a step: the objective is flat at its maximum.
        largest, logits = truths.maximum(gain, PROBS[finite].log().numpy(), ftol=0.0, gtol=1e-12)
        torch.testing.assert_close(logits.softmax(-1), peak[finite] / peak[finite].sum(), rtol=1e-3, atol=1e-6)
        assert largest == pytest.approx(value, abs=1e-9)


def test_rewards_agree_for_strings_of_small_probability():
    log_cdf, n = torch.linspace(-3, -0.01, 20, dtype=torch.float64), 64
    exact_one, below = (vbon_reward(log_cdf, torch.tensor(-80.0), n, bound=b) for b in (False, True))
    torch.testing.assert_close(exact_one - below, torch.full((20,), math.log(n), dtype=torch.float64))
    assert vbon_reward(log_cdf, torch.tensor(-2.0), 1).abs().max() < 1e-15
    assert (vbon_reward(torch.tensor(-math.inf), torch.tensor(-2.0), 1, bound=True) == 0).all()


def test_estimated_probabilities_are_at_most_1():
    log_cdf, log_p = torch.tensor([0.55, 0.5]).log(), torch.tensor([0.5, 0.5]).log()
    assert log_bon_density(log_cdf, log_p, 512)[0] > 20
    torch.testing.assert_close(vbon_reward(log_cdf, log_p, 512), -log_p.double(), atol=1e-4, rtol=0)


words = st.lists(st.integers(0, 3), max_size=3)


@fuzz
@given(st.lists(words, max_size=30))
def test_keys_of_different_strings_differ(strings):
    keys = string_keys(strings)
    assert keys.dtype == torch.int64
    for (one, key), (other, its) in itertools.combinations(zip(strings, keys.tolist(), strict=True), 2):
        assert (key == its) == (one == other)


def test_keys_are_reproducible():
    ids = [3, 2**31, 0]
    digest = hashlib.blake2b(struct.pack("<3q", *ids), digest_size=8).digest()
    assert string_keys([[1], ids])[1] == struct.unpack("<q", digest)[0]
    assert string_keys([ids, torch.tensor(ids), np.array(ids)]).unique().tolist() == [3388984754172770896]


values = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 0.1])
marks = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])


@fuzz
@given(st.data(), st.integers(1, 3), st.integers(1, 6), st.integers(1, 8))
def test_order_and_counts_equal_those_of_python_tuples(data, P, M, K):
    def draw(size):
        rows = st.lists(st.tuples(values, marks), min_size=size, max_size=size)
        rows = [data.draw(rows) for _ in range(P)]
        rewards = torch.tensor([[r for r, _ in row] for row in rows], dtype=torch.float64)
        return rows, rewards, torch.tensor([[k for _, k in row] for row in rows])

    rows, rewards, keys = draw(M)
    others, reference, reference_keys = draw(K)
    for row, place in zip(rows, strict_order(rewards, keys).tolist(), strict=True):
        assert place == [sorted(set(row)).index(pair) for pair in row]
    counts = strict_counts(rewards, keys, reference, reference_keys)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [
        [sum(o < pair for o in of) for pair in row] for row, of in zip(rows, others, strict=True)
    ]
    log_F = log_strict_cdf(rewards, keys, reference, reference_keys)
    torch.testing.assert_close(log_F, ((counts + 0.5) / (K + 1)).double().log())
    exact_F = log_strict_cdf(rewards, keys, reference, reference_keys, None).exp()
    torch.testing.assert_close(exact_F, counts.double() / K)


def test_estimated_cdf_is_unbiased_with_ties():
    """Without the order of ties, a mid-rank CDF would be off by half the mass of a tie, a strict CDF by all of it."""
    draws = torch.multinomial(PROBS, 20_000, replacement=True, generator=torch.Generator().manual_seed(0))[None]
    F = log_strict_cdf(REWARDS[None], KEYS[None], REWARDS[draws], KEYS[draws], None).exp()[0]
    torch.testing.assert_close(F, true_log_cdf().exp(), atol=0.015, rtol=0)


def test_exponential_smoother_equals_scipy():
    """Compare with SciPy's least squares on the same points; five equal rewards have five values of F."""
    rewards = torch.tensor([[0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 2.0]], dtype=torch.float64)
    keys = torch.arange(8)[None]
    y, x = np.log(np.arange(1, 8) / 8), rewards[0, 1:].numpy()
    fit = minimize(lambda t: ((y + t[0] * np.exp(-t[1] * x)) ** 2).sum(), [2.0, 1.0], method="Nelder-Mead", tol=1e-12)
    at = torch.tensor([[-1.0, 0.5, 3.0]], dtype=torch.float64)
    found = log_strict_cdf(at, torch.tensor([[5, 6, 7]]), rewards, keys, "exponential")
    np.testing.assert_allclose(found[0], -fit.x[0] * np.exp(-fit.x[1] * at[0].numpy()), rtol=1e-5)


def test_exponential_smoother_falls_back_to_add_half_and_stays_finite():
    keys, sample_keys = torch.arange(4)[None], torch.arange(10, 13)[None]
    rewards = torch.tensor([[1.0, 1.0, -1e30]], dtype=torch.float64)
    for reference in ([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]):
        tied = torch.tensor([reference], dtype=torch.float64)
        ours = log_strict_cdf(rewards, sample_keys, tied, keys, "exponential")
        assert torch.equal(ours, log_strict_cdf(rewards, sample_keys, tied, keys, "add-half"))
    reference = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    at = torch.tensor([[-3.0, -4.0, -1e30]], dtype=torch.float64)  # at the limit of extrapolation, 0 - 3, and below
    far = log_strict_cdf(at, sample_keys, reference, keys, "exponential")
    assert far.isfinite().all()
    assert (
        far[0, 0] == far[0, 1] == far[0, 2] < log_strict_cdf(at + 2, sample_keys, reference, keys, "exponential")[0, 0]
    )
    cliff = torch.tensor([[0.0, 1.0, 1.001, 50.0]], dtype=torch.float64)
    assert float(log_strict_cdf(at, sample_keys, cliff, keys, "exponential").min()) >= -1e4


def test_rewards_of_two_dtypes_are_compared_in_the_wider():
    reference = torch.tensor([[0.1, 0.3]], dtype=torch.float64)
    keys = torch.tensor([[5, 5]])
    assert strict_counts(reference.float(), keys, reference, keys).tolist() == [[1, 2]]  # 0.1 and 0.3 are rounded up


ONE, TWO = torch.zeros(1, 1), torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: log_bon_density(torch.tensor([0.0, math.nan]), ONE, 2), r"log_cdf\[1\] is nan; expected log F"),
        (lambda: log_bon_density(ONE, torch.tensor(math.nan), 2), "log_p is nan"),
        (lambda: log_bon_density(ONE, torch.tensor(math.inf), 2), "log_p is inf"),
        (lambda: log_bon_density(ONE, ONE, 0), "n=0: expected a finite number >= 1"),
        (lambda: log_bon_density(ONE, ONE, 0.99), "n=0.99"),
        (lambda: log_bon_density(ONE, ONE, math.nan), "n=nan"),
        (lambda: log_bon_density(ONE, ONE, True), "n=True"),
        (lambda: vbon_reward(ONE, torch.tensor(-math.inf), 2), "is infinite here"),
        (lambda: objective(ONE, TWO, ONE, 2), r"\(1, 1\), \(1, 2\), \(1, 1\)"),
        (lambda: bound(TWO[:, :0], TWO[:, :0], TWO[:, :0], 2), "M >= 1"),
        (lambda: objective(ONE - math.inf, ONE, ONE, 2), r"log_pi\[0, 0\] is -inf"),
        (lambda: strict_order(ONE, ONE), r"expected int64 \(1, 1\), .* got float32 \(1, 1\)"),
        (lambda: strict_order(TWO, TWO[:, :1].long()), r"got int64 \(1, 1\)"),
        (lambda: strict_order(TWO * math.nan, TWO.long()), r"rewards\[0, 0\] is nan"),
        (lambda: strict_counts(ONE, ONE.long(), TWO[:, :0], TWO[:, :0].long()), "K >= 1"),
        (lambda: strict_counts(ONE, ONE.long(), torch.zeros(2, 3), torch.zeros(2, 3).long()), r"\(1, 1\) and \(2, 3\)"),
        (lambda: log_strict_cdf(ONE, ONE.long(), TWO, TWO.long(), "kde"), "smoother='kde'"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
