"""Calibrated rewards, transforms and Theorem 3 compared with mpmath; fixed points with quadrature and a search."""

import itertools
import math
import statistics

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import cumulative_simpson
from support.truths import maximum

from nlgrpo.calibration import fixed_point
from nlgrpo.calibration.alignment import (
    alignment_curve,
    at_kl,
    calibrate,
    calibrate_by_median,
    calibrate_pooled,
    parse_transform,
    suggest,
)
from nlgrpo.calibration.transforms import Custom, Exponential, FixedPoint, Identity, Log
from nlgrpo.runtime import user_code

COLUMNS = ("kl", "win_rate", "bon_win_rate", "won_win_rate")


def columns(curve):
    return np.array([getattr(curve, name).tolist() for name in COLUMNS])


# --- calibration ------------------------------------------------------------------------------------------------------


def of_ranks(shape, generator, dtype=torch.float64):
    """Rewards with many ties."""
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def share_below(r, others):
    """Fraction of the other rewards that r beats, ties counting 1/2."""
    return sum((r > z) + 0.5 * (r == z) for z in others) / len(others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_calibrated_rewards_are_fractions_of_pairs(dtype):
    """Of the prompt's own reference samples, or of those of all prompts, other ones too."""
    generator = torch.Generator().manual_seed(0)
    rewards, reference = (of_ranks((5, n), generator, dtype) for n in (7, 11))
    pool = reference[:4]
    found, pooled = calibrate(rewards, reference), calibrate_pooled(rewards, pool)
    assert found.dtype == pooled.dtype == torch.float64
    for p, j in itertools.product(range(5), range(7)):
        assert found[p, j] == share_below(float(rewards[p, j]), reference[p].tolist())
        assert pooled[p, j] == share_below(float(rewards[p, j]), pool.flatten().tolist())
    assert torch.equal(found, calibrate((3 * rewards).exp(), (3 * reference).exp()))  # Lemma 3


@pytest.mark.parametrize(
    ("rewards", "reference", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 1), "K >= 2"),
        (torch.zeros(2, 3), torch.zeros(3, 5), "rewards of 2, reference of 3"),
        (torch.zeros(3), torch.zeros(3, 5), r"rewards \(P, M\), got \(3,\)"),
        (torch.zeros(2, 3), torch.zeros(5), r"reference \(P, K\), got \(5,\)"),
        (torch.tensor([[0.0, math.nan]]), torch.zeros(1, 4), "reward of group 0, sample 1 is NaN"),
        (torch.zeros(1, 2), torch.tensor([[0.0, 1.0, math.nan]]), "reference's reward of group 0, sample 2 is NaN"),
    ],
)
def test_calibrate_refuses_invalid_rewards(rewards, reference, message):
    with pytest.raises(ValueError, match=message):
        calibrate(rewards, reference)


@pytest.mark.parametrize("K", [1, 6, 7])
def test_calibration_by_the_median_is_a_preference_over_it(K):
    generator = torch.Generator().manual_seed(0)
    rewards, reference = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (3, K))
    found = calibrate_by_median(rewards, reference)
    for p, j in itertools.product(range(5), range(3)):
        margin = float(rewards[p, j]) - statistics.median(reference[p].tolist())
        assert float(found[p, j]) == pytest.approx(1 / (1 + math.exp(-margin)), rel=1e-14)
    shifts = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(found, calibrate_by_median(rewards + shifts, reference + shifts), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("calibrated", "message"),
    [
        (lambda nan: calibrate_pooled(nan, torch.zeros(3)), "reward of group 0, sample 1 is NaN"),
        (lambda nan: calibrate_pooled(torch.zeros(1, 3), nan), "reference's reward of group 0, sample 1 is NaN"),
        (lambda nan: calibrate_pooled(torch.zeros(3), nan[0]), "reference's reward of group 0, sample 1 is NaN"),
        (lambda nan: calibrate_pooled(nan[None], torch.zeros(3)), "reward of group 0, sample 1 is NaN"),
        (lambda nan: calibrate_pooled(nan, torch.zeros(1)), "expected S >= 2"),
        (lambda nan: calibrate_by_median(nan, torch.zeros(1, 3)), "reward of group 0, sample 1 is NaN"),
        (lambda nan: calibrate_by_median(torch.zeros(1, 3), nan), "reference's reward of group 0, sample 1 is NaN"),
        (lambda nan: calibrate_by_median(torch.zeros(2, 3), nan), r"got \(2, 3\) and \(1, 2\)"),
        (lambda nan: calibrate_by_median(torch.zeros(2, 3), torch.zeros(2, 0)), "K >= 1"),
    ],
)
def test_other_calibrations_refuse_invalid_rewards(calibrated, message):
    with pytest.raises(ValueError, match=message):
        calibrated(torch.tensor([[0.0, math.nan]]))


# --- transforms -------------------------------------------------------------------------------------------------------


def test_values_of_transforms():
    u = torch.tensor([[0.0, 0.005, 0.3], [0.5, 0.995, 1.0]], dtype=torch.float64)
    truth = {
        "identity": lambda x: x,
        "log": lambda x: math.log(max(x, 1 / 200)),
        "exp:10": lambda x: math.exp(10 * x),
        "exp:-10": lambda x: -math.exp(-10 * x),
    }
    for name, f in truth.items():
        expected = np.vectorize(f)(u.numpy())
        np.testing.assert_allclose(parse_transform(name, references=100)(u), expected, rtol=1e-14)
        single = parse_transform(name, references=100)(u.float())
        assert single.dtype == torch.float32
        np.testing.assert_allclose(single, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "text", ["identity", "log", "exp:10", "exp:-0.5", "exp:17.123456789", "bon_fp:4", "won_fp:2:0.1"]
)
def test_transform_names_round_trip(text):
    assert str(parse_transform(text)) == text
    assert parse_transform(str(parse_transform(text))) == parse_transform(text)


def test_fixed_points_use_default_n_and_beta():
    assert parse_transform("bon_fp", n=4, beta=0.1) == parse_transform("bon_fp:4:0.1") == FixedPoint(4, 0.1)
    assert parse_transform("won_fp:2", n=4) == FixedPoint(2, worst=True)
    assert parse_transform("won_fp:2").at(0.5) == parse_transform("won_fp:2:0.5")
    assert parse_transform("won_fp:2:0.1").at(0.5).beta == 0.1
    with pytest.raises(ValueError, match=r"bon_fp:4 depends on beta; write 'bon_fp:4:0.1'"):
        parse_transform("bon_fp:4")(torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("identiti", "did you mean 'identity'"),
        ("exp", "expected 'exp:T' with numbers"),
        ("exp:ten", "expected 'exp:T'"),
        ("exp:0", "other than 0"),
        ("exp:nan", "other than 0"),
        ("exp:900", r"\[-500, 500\]"),
        ("bon_fp", "expected 'bon_fp:N:BETA' with numbers"),
        ("bon_fp:1", "N = 1; expected an integer >= 2"),
        ("bon_fp:4:0", "beta = 0.0; expected a number in"),
        ("won_fp:4:-1", "beta = -1.0; expected a number in"),
        ("bon_fp:4:nan", "beta = nan"),
        ("bon_fp:4:1e-21", "beta = 1e-21"),
        ("bon_fp:4:0.1:2", "expected 'bon_fp:N:BETA' with numbers"),
        ("bon_fp:four", "expected 'bon_fp:N:BETA' with numbers"),
        ("log:3", "'log:3' takes no argument; write 'log'"),
        ("absent.py:f", "there is no file 'absent.py'"),
        ("", "is not known"),
    ],
)
def test_invalid_transform_names(text, message):
    with pytest.raises(ValueError, match=message):
        parse_transform(text, function=user_code.function)


def test_log_of_0_needs_the_number_of_references():
    with pytest.raises(ValueError, match="give references=K"):
        Log()(torch.tensor([0.0, 0.5]))
    assert Log()(torch.tensor([1.0])) == 0
    for K in (1, 0, 2.5, True):
        with pytest.raises(ValueError, match="expected an integer >= 2"):
            Log(K)


@pytest.mark.parametrize("wrong", [-0.01, 1.01, math.nan])
def test_transforms_refuse_values_outside_0_to_1(wrong):
    with pytest.raises(ValueError, match=r"expected calibrated rewards in \[0, 1\]"):
        Identity()(torch.tensor([0.5, wrong]))


def test_transforms_refuse_integers():
    with pytest.raises(ValueError, match=r"log: expected a floating-point dtype, got torch.int64"):
        Log(5)(torch.tensor([0, 1]))


def test_a_function_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def cube(u):\n    return u ** 3\n\ndef hill(u):\n    return u * (1.2 - u)\n")
    u = torch.tensor([0.0, 0.5, 1.0])
    cube = parse_transform("mine.py:cube", function=user_code.function)
    assert torch.equal(cube(u), u**3)
    assert cube.name == "mine.py:cube"
    with pytest.raises(ValueError, match=r"mine.py:hill decreases from f\(0.599609\)"):
        parse_transform("mine.py:hill", function=user_code.function)
    with pytest.raises(ValueError, match=r"'mine.py:cube' is not known"):
        parse_transform("mine.py:cube")  # functions need a loader


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda u: u.log(), r"f\(0\) = -inf; expected finite numbers"),
        (lambda u: torch.full_like(u, 2.0), "is 2 everywhere"),
        (lambda u: u.sum(), r"must be a tensor of that shape, got \(\)"),
        (lambda u: None, "got NoneType"),
    ],
)
def test_invalid_functions_are_refused(f, message):
    with pytest.raises(ValueError, match=message):
        Custom(f, "mine")


# --- Theorem 3 --------------------------------------------------------------------------------------------------------


def integral(f, width):
    """Integrate f over [0, 1] with mpmath; f varies within ``width`` of u = 1."""
    near = [1 - width * mpmath.mpf(2) ** k for k in range(8, -7, -1) if width * 2**k < 0.5]
    return mpmath.quad(f, [0, 0.02, 0.1, 0.25, 0.5, *near, 1])


def theorem_3(F, kl, n, width):
    bon = 1 - n * integral(lambda u: F(u) ** n * u ** (n - 1), width)
    won = n * integral(lambda u: (1 - F(u)) ** n * (1 - u) ** (n - 1), width)
    return [float(x) for x in (kl, 1 - integral(F, width), bon, won)]


def exponential_truth(t, beta, n):
    """By the exponential integral: int_0^u e^{a e^{tv}} dv = (Ei(a e^{tu}) - Ei(a)) / t, a = sign(t)/beta."""
    t, a = mpmath.mpf(t), mpmath.sign(t) / mpmath.mpf(beta)
    low, high = mpmath.ei(a), mpmath.ei(a * mpmath.exp(t))
    F = lambda u: (mpmath.ei(a * mpmath.exp(t * u)) - low) / (high - low)  # noqa: E731
    Z = (high - low) / t
    mean = (mpmath.exp(a * mpmath.exp(t)) - mpmath.exp(a)) / (t * Z)  # of a e^{tu}
    return theorem_3(F, mean - mpmath.log(Z), n, min(1, 1 / abs(a * t * mpmath.exp(t))))


def identity_truth(beta, n):
    a = 1 / mpmath.mpf(beta)
    F = lambda u: mpmath.expm1(a * u) / mpmath.expm1(a)  # noqa: E731
    Z = mpmath.expm1(a) / a
    return theorem_3(F, (mpmath.exp(a) * (a - 1) + 1) / (a * Z) - mpmath.log(Z), n, min(1, 1 / a))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("beta", [0.01, 0.3, 20.0, 5000.0])
@pytest.mark.parametrize("name", ["identity", "exp:10", "exp:-10", "exp:3"])
def test_theorem_3_equals_mpmath(name, beta):
    with mpmath.workdps(30):
        truth = identity_truth(beta, 4) if name == "identity" else exponential_truth(float(name[4:]), beta, 4)
    np.testing.assert_allclose(columns(alignment_curve(parse_transform(name), [beta], 4))[:, 0], truth, atol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 4, 32])
def test_log_equals_best_of_m_of_the_reference(n):
    betas = [1e-15, 0.01, 0.2, 1.0, 50.0]
    found = columns(alignment_curve(Log(), torch.tensor(betas, dtype=torch.float64), n))
    for (kl, single, bon, won), beta in zip(found.T, betas, strict=True):
        m = 1 + 1 / beta
        assert (single, bon) == pytest.approx((m / (m + 1), m / (m + 1)), abs=1e-12)
        assert kl == pytest.approx(math.log(m) - (m - 1) / m, abs=1e-12)
        with mpmath.workdps(80):  # expand (1 - u^m)^n; each power gives a Beta function
            terms = [(-1) ** k * mpmath.binomial(n, k) * mpmath.beta(k * mpmath.mpf(m) + 1, n) for k in range(n + 1)]
            assert won == pytest.approx(float(n * mpmath.fsum(terms)), abs=1e-12)


def test_a_jump_and_a_kink():
    """1[u > 0.9]: density 1/Z below and e^{1/beta}/Z above. max(u, 0.4): by integrals of its two parts."""
    beta, c, n = 0.4, 0.9, 2
    high = math.exp(1 / beta)
    Z = c + (1 - c) * high
    F = lambda u: u / Z if u < c else (c + (u - c) * high) / Z  # noqa: E731
    mass = (1 - c) * high / Z
    truth = [mass / beta - math.log(Z)]
    parts = [0, c, 1]
    truth.append(float(1 - mpmath.quad(F, parts)))
    truth.append(float(1 - n * mpmath.quad(lambda u: F(u) ** n * u ** (n - 1), parts)))
    truth.append(float(n * mpmath.quad(lambda u: (1 - F(u)) ** n * (1 - u) ** (n - 1), parts)))
    found = columns(alignment_curve(Custom(lambda u: (u > c).double()), [beta], n))[:, 0]
    np.testing.assert_allclose(found, truth, atol=1e-11)

    with mpmath.workdps(25):
        f = lambda u: mpmath.exp(max(u, mpmath.mpf("0.4")) / 0.05)  # noqa: E731
        Z = mpmath.quad(f, [0, 0.4, 0.7, 0.9, 1])
        mean = mpmath.quad(lambda u: max(u, mpmath.mpf("0.4")) * f(u), [0, 0.4, 0.7, 0.9, 1]) / (0.05 * Z)
    kink = alignment_curve(Custom(lambda u: u.clamp(min=0.4)), [0.05], 1)
    assert float(kink.kl) == pytest.approx(float(mean - mpmath.log(Z)), abs=1e-11)


def test_one_sample_is_best_of_one():
    for name in ("identity", "exp:10", "won_fp:3"):
        curve = alignment_curve(parse_transform(name), [0.1, 1.0], 1)
        assert torch.equal(curve.win_rate, curve.bon_win_rate)
        torch.testing.assert_close(curve.win_rate, curve.won_win_rate, atol=1e-13, rtol=0)


def test_large_beta_gives_the_reference():
    for name in ("identity", "log", "exp:-10", "bon_fp:8", "won_fp:8"):
        (kl, *rates) = columns(alignment_curve(parse_transform(name), [1e9], 8))[:, 0]
        assert kl == pytest.approx(0, abs=1e-14)
        assert rates == pytest.approx([0.5] * 3, abs=1e-7)


@pytest.mark.parametrize("beta", [0, -1.0, math.nan, math.inf, "0.1"])
def test_beta_must_be_positive(beta):
    with pytest.raises(ValueError, match="expected a finite number > 0, the weight of the KL"):
        alignment_curve(Identity(), [beta], 4)


def test_transforms_without_a_curve_are_refused():
    for n in (0, 2.0, True):
        with pytest.raises(ValueError, match="expected an integer >= 1"):
            alignment_curve(Identity(), [0.1], n)
    with pytest.raises(ValueError, match="too narrow or too rough"):
        alignment_curve(Identity(), [1e-40], 4)


@pytest.mark.parametrize("compute", [alignment_curve, at_kl])
def test_curves_take_the_name_of_a_transform(compute):
    for name in ("log", "exp:10", "bon_fp:4", "won_fp:3:0.1"):
        of_object = compute(parse_transform(name), [0.5], 4)
        np.testing.assert_array_equal(columns(compute(name, [0.5], 4)), columns(of_object))
        assert torch.equal(compute(name, [0.5], 4).beta, of_object.beta)
    np.testing.assert_array_equal(columns(compute("bon_fp", [0.5], 4)), columns(compute("bon_fp:4", [0.5], 4)))
    for name, message in {
        "bonfp": r"'bonfp' is not known; did you mean 'bon_fp'\? Expected one of identity, ",
        "exp:ten": "expected 'exp:T' with numbers",
        "mine.py:f": "is not known",
        "": "is not known",
    }.items():
        with pytest.raises(ValueError, match=message):
            compute(name, [0.5], 4)
    for other in (None, 4, torch.exp, Identity, ["log"]):
        with pytest.raises(ValueError, match="expected a Transform, or a name such as 'log'"):
            compute(other, [0.5], 4)


# --- at a given KL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["identity", "log", "exp:500", "exp:-500", "exp:10", "bon_fp:4", "won_fp:32"])
def test_a_curve_at_given_kls(name):
    kls = [1e-3, 1.5]
    curve = at_kl(parse_transform(name), kls, 4)
    assert curve.kl.tolist() == pytest.approx(kls, abs=1e-9)
    assert (curve.beta.diff() < 0).all()
    again = alignment_curve(parse_transform(name), curve.beta, 4)
    np.testing.assert_array_equal(columns(again), columns(curve))


def test_at_kl_of_a_transform_that_is_constant_above_the_median():
    flat = Custom(lambda u: u.clamp(max=0.4))
    assert float(at_kl(flat, [0.3], 4).kl) == pytest.approx(0.3, abs=1e-9)
    with pytest.raises(ValueError, match=r"the furthest is 0.511"):  # log(1 / 0.6)
        at_kl(flat, [0.52], 4)


def test_unreachable_kls_are_refused():
    step = Custom(lambda u: (u > 0.9).double(), "step")
    assert float(at_kl(step, [2.3], 4).kl) == pytest.approx(2.3)
    with pytest.raises(ValueError, match=r"step: KL = 2.4 is out of reach, the furthest is 2.3"):
        at_kl(step, [2.4], 4)
    with pytest.raises(ValueError, match=r"won_fp:128: KL = 3 is out of reach, the furthest is 1.1.*expected a number"):
        at_kl(parse_transform("won_fp:128"), [3.0], 4)
    for kl in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="expected a finite number > 0, in nats"):
            at_kl(Identity(), [kl], 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("n", "kl", "worst"), [(2, 1.0, False), (4, 1.0, False), (4, 0.3, True), (8, 2.0, False)])
def test_no_other_t_wins_more_than_the_suggested_one(n, kl, worst):
    t = suggest(n, kl, worst=worst)
    assert (t < 0) == worst
    column = "won_win_rate" if worst else "bon_win_rate"
    best = float(getattr(at_kl(Exponential(t), [kl], n), column))
    others = [getattr(at_kl(Exponential(math.copysign(s, t)), [kl], n), column) for s in np.geomspace(0.2, 400, 25)]
    assert best >= float(max(others))
    beside = [getattr(at_kl(Exponential(t * factor), [kl], n), column) for factor in (0.8, 1.25)]
    assert best > float(max(beside)) + 1e-7
    assert float(getattr(at_kl(FixedPoint(n, worst=worst), [kl], n), column)) > best


def test_suggest_with_a_loss_rate_of_0():
    assert -500 <= suggest(2000, 3.0, worst=True) < 0


def test_suggest_refuses_a_single_sample():
    with pytest.raises(ValueError, match="expected an integer >= 2"):
        suggest(1, 1.0)


# --- the fixed points -------------------------------------------------------------------------------------------------

HARD = [(2, 0.01), (4, 0.01), (4, 0.1), (4, 1e3), (32, 0.01), (32, 1.0)]


@pytest.mark.parametrize("worst", [False, True], ids=["bon", "won"])
@pytest.mark.parametrize(("n", "beta"), HARD)
def test_fixed_points_solve_corollary_2(n, beta, worst):
    """Check both equations by Simpson's rule on an independent grid."""
    transform = parse_transform(f"{'won' if worst else 'bon'}_fp:{n}:{beta}")
    assert transform.residual <= 1e-11
    w = np.unique(np.concatenate((np.geomspace(1e-10, 1, 100_001), np.linspace(0, 1, 100_001))))
    u = np.unique(1 - w)
    phi = transform(torch.from_numpy(u)).numpy()
    assert abs(phi[-1]) < 1e-15  # Phi(1)
    F = cumulative_simpson(np.exp(phi / beta), x=u, initial=0)
    F /= F[-1]
    inner = ((1 - u) * (1 - F)) ** (n - 1) if worst else (u * F) ** (n - 1)
    below = n**2 * cumulative_simpson(inner, x=u, initial=0)
    np.testing.assert_allclose(phi, below - below[-1], atol=1e-8)


class Cells:
    """Exact W - beta KL of densities that are constant on cells of [0, 1]; cells are small near u = 1."""

    def __init__(self, n, beta, worst, cells):
        w = torch.cat((torch.zeros(1), torch.logspace(-4, 0, cells))).double()
        w = torch.cat((w, torch.linspace(0, 1, cells + 1).double())).unique()
        self.edges = 1 - w.flip(0)
        self.widths = self.edges.diff()
        self.n, self.beta, self.worst = n, beta, worst
        nodes, weights = np.polynomial.legendre.leggauss(n + 1)  # exact for F^n u^{n-1}, of degree 2n - 1
        self.x, self.weights = torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)

    def win_rate(self, masses):
        F = torch.cat((torch.zeros(1).double(), masses.cumsum(0)))[:-1, None] + masses[:, None] * self.x
        u, n = self.edges[:-1, None] + self.widths[:, None] * self.x, self.n
        values = (1 - F) ** n * (1 - u) ** (n - 1) if self.worst else F**n * u ** (n - 1)
        total = n * (values @ self.weights * self.widths).sum()
        return total if self.worst else 1 - total

    def kl(self, masses):
        return torch.special.xlogy(masses, masses / self.widths).sum()

    def objective(self, masses):
        return self.win_rate(masses) - self.beta * self.kl(masses)

    def best(self, start):
        def objective(logits):
            return self.objective((logits + self.widths.log()).softmax(0))

        return maximum(objective, start, maxiter=3000, ftol=1e-15)[0]

    def masses_of(self, phi):
        """Masses of the cells under the density e^{phi / beta}, by 8 nodes per cell."""
        nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(8))
        u = self.edges[:-1, None] + self.widths[:, None] * (nodes + 1) / 2
        masses = (phi.below_top(u, 1 - u) / self.beta).exp() @ weights * self.widths
        return masses / masses.sum()


@pytest.mark.parametrize("worst", [False, True], ids=["bon", "won"])
@pytest.mark.parametrize(("n", "beta"), [(2, 0.05), (4, 0.1), (4, 0.02)])
def test_no_density_is_better_than_the_fixed_point(n, beta, worst):
    """Neither a perturbed density nor a search from several starts is better; worst-of-n is not concave."""
    phi = FixedPoint(n, beta, worst)
    curve = alignment_curve(phi, [beta], n)
    optimum = float(curve.won_win_rate if worst else curve.bon_win_rate) - beta * float(curve.kl)
    fine, coarse = Cells(n, beta, worst, 4000), Cells(n, beta, worst, 40)
    masses = fine.masses_of(phi)
    assert float(fine.objective(masses)) == pytest.approx(optimum, abs=1e-6)  # error of the cells
    generator = torch.Generator().manual_seed(0)
    middle = (fine.edges[1:] + fine.edges[:-1]) / 2
    for k, size in itertools.product(range(1, 9), (-0.05, 0.05)):
        phase = 2 * math.pi * torch.rand(1, generator=generator).double()
        other = masses * (size * torch.cos(k * math.pi * middle + phase)).exp()
        assert float(fine.objective(other / other.sum())) < float(fine.objective(masses))
    rng = np.random.default_rng(0)
    cells = len(coarse.widths)
    slope = np.linspace(0, 3, cells)
    starts = [np.zeros(cells), slope, -slope, 2 * rng.normal(size=cells)]
    found = [coarse.best(start) for start in starts]
    assert max(found) <= optimum + 1e-12
    assert min(found) >= optimum - 2e-3  # all starts converge to it, up to the error of 80 cells


def test_best_of_4_win_rate_at_kl_1_exceeds_094():
    """A density on cells, whose KL and win rate are exact, has KL <= 1 and the same win rate."""
    beta = float(at_kl(FixedPoint(4), [1.0], 4).beta)
    cells = Cells(4, beta, False, 2000)
    masses = cells.masses_of(FixedPoint(4, beta))
    assert float(cells.kl(masses)) < 1.0
    assert float(cells.win_rate(masses)) == pytest.approx(0.94112, abs=1e-5)


def test_a_residual_above_the_tolerance_is_refused(monkeypatch):
    fixed_point.solve.cache_clear()
    curve = fixed_point._curve
    monkeypatch.setattr(fixed_point, "_curve", lambda n, worst: lambda tau: curve(n, worst)(tau) * (1 + 1e-6))
    with pytest.raises(ValueError, match=r"has a residual of .* over 1e-08"):
        parse_transform("bon_fp:4:0.1")
    assert fixed_point.solve.cache_info().currsize == 0
