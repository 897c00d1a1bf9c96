"""Calibrated procedures and their fixed points compared with mpmath, SciPy, sampling and a search over densities."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import cumulative_simpson, quad
from support.truths import maximum

from nlgrpo.calibration import fixed_point, stationary
from nlgrpo.calibration.alignment import alignment_curve, at_kl, parse_transform
from nlgrpo.calibration.procedures import CalibratedProcedure
from nlgrpo.calibration.transforms import Exponential, FixedPoint, Identity, Power, ProcedureFixedPoint
from nlgrpo.objectives import BestOfN, BestOfPoisson, CVaR, Distortion, EntropicRisk, Mean, SoftBestOfN, WorstOfN
from nlgrpo.runtime import user_code


def hump(z):
    return z * (1 - z)


def step(z):
    return (z > 0.3).double() + 0.5


def root(z):
    return z.sqrt()


# Objective: weight of the rank and where it jumps, written down again.
WEIGHTS = {
    BestOfN(4): (lambda z: z**3, ()),
    WorstOfN(4): (lambda z: (1 - z) ** 3, ()),
    Mean(): (lambda z: 1, ()),
    BestOfPoisson(4.0): (lambda z: mpmath.exp(4 * z), ()),
    CVaR(0.1): (lambda z: int(z <= mpmath.mpf("0.1")), (0.1,)),
    Distortion([0, 1, 2]): (lambda z: min(int(3 * z), 2), (1 / 3, 2 / 3)),
    Distortion(hump): (lambda z: z * (1 - z), ()),
    Distortion(step): (lambda z: (z > mpmath.mpf("0.3")) + mpmath.mpf(1) / 2, (0.3,)),
    Distortion(root): (mpmath.sqrt, ()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("objective", WEIGHTS, ids=str)
def test_theorem_4_equals_mpmath(objective):
    """For Phi(u) = u, whose F is known, by mpmath's quadrature of the formula in the paper."""
    beta, (f, jumps) = 0.2, WEIGHTS[objective]
    truth = theorem_4_of_identity(beta, f, jumps)
    found = alignment_curve(Identity(), [beta], 1, [objective]).procedures[objective.name]
    assert found.tolist() == pytest.approx([truth], abs=1e-11)


def theorem_4_of_identity(beta, f, jumps):
    """InfAlign, Theorem 4, as it is printed: the density after the procedure times the mass of the reference below."""
    with mpmath.workdps(25):
        a = 1 / mpmath.mpf(beta)
        F = lambda u: mpmath.expm1(a * u) / mpmath.expm1(a)  # noqa: E731
        inverse = lambda z: mpmath.log1p(z * mpmath.expm1(a)) / a  # noqa: E731
        jumps = [mpmath.mpf(str(z)) if z in (0.1, 0.3) else mpmath.mpf(round(3 * z)) / 3 for z in jumps]
        ends = sorted({mpmath.mpf(0), *jumps, *map(inverse, jumps), mpmath.mpf("0.8"), mpmath.mpf(1)})

        def below(u):
            return mpmath.quad(f, [*[end for end in ends if end < u], u], maxdegree=5)

        def integral(g):  # from inside each piece, since f jumps at its ends
            inset = mpmath.mpf(10) ** -22
            pieces = itertools.pairwise(ends)
            return sum(mpmath.quad(g, [low + inset, high - inset], maxdegree=5) for low, high in pieces)

        after = lambda u: mpmath.exp(a * u) * f(F(u))  # noqa: E731
        return float(integral(lambda u: after(u) * below(u)) / (integral(after) * below(mpmath.mpf(1))))


def test_the_usual_columns_are_procedures_too():
    names = ["mean", "bon:4", "wor:4:unbiased"]
    for name in ("exp:10", "log", "bon_fp:4"):
        curve = at_kl(name, [0.3, 1.5], 4, names)
        assert list(curve.procedures) == names
        for column, rates in zip(("win_rate", "bon_win_rate", "won_win_rate"), curve.procedures.values(), strict=True):
            torch.testing.assert_close(rates, getattr(curve, column), atol=1e-13, rtol=0)
    assert alignment_curve("log", [0.1], 4).procedures == {}


@pytest.mark.parametrize(("name", "count"), [("bop:4.0", 4), ("cvar:0.25", 1)])
def test_a_win_rate_is_how_often_sampled_answers_win(name, count):
    """Both answer through the procedure: best of a Poisson number >= 1, or one of the worst quarter."""
    rng, beta, size = np.random.default_rng(0), 0.2, 200_000

    def answers(inverse):
        if count == 1:
            return inverse(0.25 * rng.random(size))
        numbers = rng.poisson(4, 2 * size)
        numbers = numbers[numbers > 0][:size]
        return inverse(rng.random(size) ** (1 / numbers))  # largest of that many uniform ranks

    ours = answers(lambda z: beta * np.log1p(z * np.expm1(1 / beta)))  # the inverse of F for Phi(u) = u
    wins = ours > answers(lambda z: z)
    error = math.sqrt(wins.var() / size)
    (found,) = alignment_curve(Identity(), [beta], 1, [name]).procedures[name].tolist()
    assert abs(wins.mean() - found) < 4 * error


def test_small_loss_rates_keep_their_digits():
    """int_0^1 u^m dG(u) for F = u^m ("log") and G = min(u, alpha) / alpha: alpha^(m-1) / (m + 1) if F <= alpha."""
    beta = 1 / 39  # m = 40
    loss = 1 - alignment_curve("log", [beta], 1, ["cvar:0.5"]).procedures["cvar:0.5"]
    assert float(loss) == pytest.approx(0.5**39 / 41, abs=1e-15)
    procedure, u = CalibratedProcedure(CVaR(0.5)), torch.tensor([1e-300, 1e-20], dtype=torch.float64)
    torch.testing.assert_close(procedure.cdf(u), 2 * u, rtol=1e-14, atol=0)


@pytest.mark.parametrize("objective", WEIGHTS, ids=str)
def test_g_and_its_integral(objective):
    f, jumps = WEIGHTS[objective]
    procedure = CalibratedProcedure(objective)
    assert procedure.breaks == pytest.approx(jumps, abs=1e-12)
    z = torch.tensor([0.0, 0.05, 0.299, 0.301, 0.8, 1.0], dtype=torch.float64)
    below = [quad(lambda x: float(f(x)), 0, end, points=jumps or None, epsabs=1e-13)[0] for end in z.tolist()]
    np.testing.assert_allclose(procedure.cdf(z), np.array(below) / below[-1], atol=1e-11)
    g = [float(f(x)) / below[-1] for x in z.tolist()]
    np.testing.assert_allclose(procedure.density(z), g, rtol=1e-11)


@pytest.mark.parametrize(
    ("procedure", "message"),
    [
        (SoftBestOfN(0.1), "soft:0.1: expected a rank-based objective, such as"),
        (EntropicRisk(1.0), "expected a rank-based objective"),
        ("wor:4:kde", "expected a rank-based objective"),
        (None, "None: expected a rank-based objective"),
        ("cvar:2", "expected a number in"),
        ("bonn:4", "did you mean 'bon:N'"),
        ("distortion:1,-1", r"f\(.*\) = -1; a procedure needs f >= 0"),
        (Distortion(lambda z: z - 0.1, named="low"), r"low: f\(0\) = -0.1; a procedure needs f >= 0"),
        (
            Distortion(lambda z: 0.1 - (z - 0.40004).abs().clamp(max=2e-4) * 500.1, named="dip"),
            "a procedure needs f >=",
        ),
        ("distortion:0,0", "f is 0 everywhere"),
        (Distortion(lambda z: (1e5 * z).floor() % 2, named="comb"), "at too many places"),
    ],
)
def test_what_is_no_procedure(procedure, message):
    with pytest.raises(ValueError, match=message):
        alignment_curve(Identity(), [0.1], 1, [procedure])
    with pytest.raises(ValueError, match=message):
        at_kl(Identity(), [0.1], 1, procedures=[procedure])


def test_procedures_are_a_sequence():
    with pytest.raises(ValueError, match=r"expected a sequence, such as \['bon:4'\]"):
        alignment_curve(Identity(), [0.1], 1, "bon:4")


# --- power:N ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_best_of_n_of_u_to_the_n_is_the_win_rate(n, beta):
    """InfAlign's Definition 5: E max over N samples of Phi(u) = u^N, with F by Simpson's rule, for three densities."""
    u = np.linspace(0, 1, 200_001)
    for phi in (Power(n), Exponential(3.0), FixedPoint(n, beta)):
        density = np.exp((phi(torch.from_numpy(u)).numpy() - float(phi(torch.ones(1).double()))) / beta)
        F = cumulative_simpson(density, x=u, initial=0)
        masses = np.diff(F / F[-1])
        middle = parse_transform(f"power:{n}")(torch.from_numpy((u[1:] + u[:-1]) / 2))
        value = float(BestOfN(n).value(middle[None], torch.from_numpy(masses)))
        assert value == pytest.approx(float(alignment_curve(phi, [beta], n).bon_win_rate), abs=2e-5)


def test_the_optimum_of_bon_on_power_is_bon_fp():
    """The first variation of best-of-N on u^N at the optimum of bon_fp is bon_fp's Phi, up to a constant."""
    n, beta, size = 4, 0.1, 20_000
    phi = FixedPoint(n, beta)
    u = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    probs = (phi(u) / beta).softmax(0)
    linear = BestOfN(n).linearize(Power(n)(u)[None], probs)[0]
    torch.testing.assert_close(linear - linear[-1], phi(u) - phi(u)[-1], atol=1e-3, rtol=0)


def test_values_of_powers():
    u = torch.tensor([0.0, 1e-200, 0.3, 1.0], dtype=torch.float64)
    assert parse_transform("power:2.5")(u).tolist() == pytest.approx([0, 0, 0.3**2.5, 1], abs=1e-16)
    assert str(parse_transform("power:4")) == "power:4"
    assert parse_transform(str(Power(1.23456789))) == Power(1.23456789)
    w = torch.tensor([1e-18, 0.5, 1.0], dtype=torch.float64)
    assert Power(4).below_top(1 - w, w).tolist() == pytest.approx([-4e-18, 0.5**4 - 1, -1], rel=1e-15)
    one, identity = (alignment_curve(name, [0.1, 2.0], 4) for name in ("power:1", "identity"))
    torch.testing.assert_close(one.kl, identity.kl, atol=1e-13, rtol=0)
    for text in ("power:0", "power:-1", "power:nan", "power:1e7"):
        with pytest.raises(ValueError, match=r"expected a number in \[1e-06, 1e\+06\]"):
            parse_transform(text)
    for text in ("power", "power:x", "power:1:2"):
        with pytest.raises(ValueError, match="expected 'power:T' with numbers"):
            parse_transform(text)


# --- fixed points -----------------------------------------------------------------------------------------------------

PROCEDURES = [
    *WEIGHTS,
    Distortion([2, 1, 0, 3]),
    Distortion(lambda z: (-50 * (z - 0.5) ** 2).exp(), named="bell"),
]


def fixed(objective, beta):
    return ProcedureFixedPoint(objective, beta)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("beta", [1.0, 0.05])
@pytest.mark.parametrize("objective", PROCEDURES, ids=str)
def test_fixed_points_solve_theorem_1(objective, beta):
    """Check both equations on an independent grid: F by Simpson's rule, Phi by the trapezoidal rule over G."""
    phi, procedure = fixed(objective, beta), CalibratedProcedure(objective)
    assert phi.residual <= 1e-11
    u = np.linspace(0, 1, 400_001)
    values = phi(torch.from_numpy(u)).numpy()
    F = cumulative_simpson(np.exp(values / beta), x=u, initial=0)
    F /= F[-1]
    G = procedure.cdf(torch.from_numpy(u)).numpy()
    g = procedure.density(torch.from_numpy(F.clip(0, 1))).numpy()
    above = np.cumsum(((g[1:] + g[:-1]) / 2 * np.diff(G))[::-1])[::-1]
    of_jumps = len(procedure.breaks) * u[1] * g.max() ** 2  # a jump of g lies within one interval
    np.testing.assert_allclose(values[:-1], -above, atol=1e-8 + of_jumps)
    assert abs(values[-1]) < 1e-15


@pytest.mark.sampled(4)
@pytest.mark.parametrize("beta", [1e6, 1.0, 0.1, 0.02, 1e-3])
@pytest.mark.parametrize("objective", [BestOfN(4), WorstOfN(4), BestOfN(32)], ids=str)
def test_the_fixed_points_of_corollary_2(objective, beta):
    """The same equations were solved by another method there."""
    w = torch.cat((torch.logspace(-12, 0, 200), torch.zeros(1))).double()
    other = fixed_point.solve(objective.n, beta, isinstance(objective, WorstOfN))(w)
    torch.testing.assert_close(stationary.solve(objective, beta)(w), other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("beta", [1e6, 0.3, 0.01])
def test_the_fixed_points_of_cvar_and_the_mean_have_a_closed_form(beta):
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    torch.testing.assert_close(fixed(Mean(), beta)(u), u - 1, atol=1e-12, rtol=0)
    torch.testing.assert_close(fixed(BestOfN(1), beta)(u), u - 1, atol=1e-12, rtol=0)
    for alpha in (0.25, 0.9):
        truth = (u.clamp(max=alpha) - alpha) / alpha**2
        torch.testing.assert_close(fixed(CVaR(alpha), beta)(u), truth, atol=1e-10, rtol=0)


class Grid:
    """W - beta KL of densities that are constant on cells, for a smooth or piecewise linear G, by midpoints in u."""

    def __init__(self, objective, beta, cells, inner=24):
        self.objective, self.beta, self.cells = objective, beta, cells
        self.x = (torch.arange(inner, dtype=torch.float64) + 0.5) / inner
        u = (torch.arange(cells)[:, None] + self.x) / cells
        edges = (torch.arange(cells * inner + 1, dtype=torch.float64) / (cells * inner)).view(-1)
        self.steps = self.G(edges).diff().view(cells, inner)
        assert u.shape == self.steps.shape

    def G(self, z):
        if isinstance(self.objective, CVaR):
            return z.clamp(max=self.objective.alpha) / self.objective.alpha
        if isinstance(self.objective, WorstOfN):
            return 1 - (1 - z) ** self.objective.n
        if isinstance(self.objective, BestOfPoisson):
            return torch.expm1(self.objective.rate * z) / math.expm1(self.objective.rate)
        table = torch.tensor(self.objective.f, dtype=torch.float64)  # a table: sum of ramps
        K = len(table)
        ramps = [weight * (K * z - k).clamp(0, 1) for k, weight in enumerate(table)]
        return sum(ramps) / table.sum()

    def value(self, masses):
        F = torch.cat((torch.zeros(1).double(), masses.cumsum(0)))[:-1, None] + masses[:, None] * self.x
        win = 1 - (self.G(F) * self.steps).sum()
        return win - self.beta * torch.special.xlogy(masses, masses * self.cells).sum()

    def best(self, start):
        return maximum(lambda logits: self.value(logits.softmax(0)), start, maxiter=4000, maxfun=8000)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("objective", "beta"),
    [
        (CVaR(0.25), 0.3),
        (CVaR(0.25), 0.05),
        (WorstOfN(4), 0.05),
        (BestOfPoisson(4.0), 0.2),
        (Distortion([0, 1, 2]), 0.1),
        (Distortion([2, 1, 0, 3]), 0.1),
        (Distortion([3, 0, 0, 1]), 0.02),
    ],
    ids=str,
)
def test_no_density_is_better_than_the_fixed_point(objective, beta):
    """A direct maximization on a grid from several starts reaches it, up to the error of the cells, and not more."""
    phi = fixed(objective, beta)
    curve = alignment_curve(phi, [beta], 1, [objective])
    optimum = float(curve.procedures[objective.name]) - beta * float(curve.kl)
    assert optimum == pytest.approx(stationary.solve(objective, beta).value, abs=1e-12)
    grid, rng = Grid(objective, beta, 60), np.random.default_rng(0)
    slope = np.linspace(0, 6, 60)
    starts = [np.zeros(60), slope, -slope, *(2 * rng.normal(size=(3, 60)))]
    found = [grid.best(start) for start in starts]
    assert max(found) <= optimum + 1e-4  # error of the midpoints
    assert max(found) >= optimum - 2e-3


@pytest.mark.parametrize(("beta", "upper"), [(0.1, False), (0.05, True)])
def test_the_best_of_several_stationary_points_is_taken(beta, upper):
    """f is high at both ends: for a large beta the policy avoids the lowest ranks, else it gathers at the highest."""
    objective = Distortion([2, 0, 0, 1])
    found = stationary.solve(objective, beta)
    assert found.others == 2
    assert (alignment_curve(fixed(objective, beta), [beta], 1).kl > 0.5) == upper
    grid, slope = Grid(objective, beta, 60), np.linspace(0, 6, 60)
    reached = [grid.best(start) for start in (np.zeros(60), slope, 3 * slope, np.minimum(slope, 1.5) * 8)]
    assert found.value - 2e-3 <= max(reached) <= found.value + 1e-4
    assert min(reached) < found.value - 0.02  # other starts end at the other


def test_a_solution_that_lies_close_to_the_grid_is_not_missed():
    """The best of three, at which R(u = 0) is within 0.004 of 1 at a value of s of the grid."""
    objective, beta = Distortion([0.3673, 2.8505, 0.04206, 0.6471, 0.014, 0, 0, 0, 0, 0.1354, 0.05773]), 0.00154197
    found = stationary.solve(objective, beta)
    assert found.others == 2
    top = torch.zeros(1100, dtype=torch.float64)
    top[-10:] = 0.1  # mass on the highest hundredth alone, which wins less but more than the other two
    assert 0.98 < float(Grid(objective, beta, 1100).value(top)) <= found.value


@pytest.mark.slow
@pytest.mark.records  # the search for beta halves an interval 45 times
def test_a_kl_that_the_optimum_jumps_over():
    with pytest.raises(ValueError, match=r"no optimum has KL = 0.7: the best stationary point changes at beta = 0.08"):
        at_kl("fp:distortion:2,0,0,1", [0.7], 4)


@pytest.mark.slow
def test_a_curve_of_a_fixed_point_is_above_all_others():
    for objective in (BestOfPoisson(4.0), Distortion([0, 1, 2])):
        own, *others = (
            float(at_kl(phi, [0.7], 4, [objective]).procedures[objective.name])
            for phi in (fixed(objective, None), "identity", "log", "exp:3", "exp:10", "bon_fp:4", "won_fp:2", "power:3")
        )
        assert own > max(others) + 1e-5


def test_names_of_fixed_points(tmp_path, monkeypatch):
    assert parse_transform("fp:bon:4") == parse_transform("bon_fp:4") == FixedPoint(4)
    assert parse_transform("fp:wor:4:0.1") == parse_transform("won_fp:4:0.1")
    assert parse_transform("fp:bon:4:unbiased:0.5") == parse_transform("bon_fp:4:0.5")
    assert parse_transform("fp:cvar:0.25") == fixed(CVaR(0.25), None)
    assert parse_transform("fp:cvar:0.25:0.5") == parse_transform("fp:cvar:0.25", beta=0.5) == fixed(CVaR(0.25), 0.5)
    assert parse_transform("fp:mean:0.1") == fixed(Mean(), 0.1)
    assert parse_transform("fp:distortion:0,1,2:0.5") == fixed(Distortion([0, 1, 2]), 0.5)
    for text in ("fp:bop:4.0", "fp:cvar:0.25:0.5", "fp:distortion:0.0,1.0", "fp:distortion:0.0,1.0:0.5"):
        assert str(parse_transform(text)) == text
        assert parse_transform(str(parse_transform(text))) == parse_transform(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(z):\n    return z * z\n")
    mine = parse_transform("fp:distortion:mine.py:f:0.5", function=user_code.function)
    assert (mine.name, mine.beta) == ("fp:distortion:mine.py:f:0.5", 0.5)
    u = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(mine(u), parse_transform("bon_fp:3:0.5")(u), atol=1e-10, rtol=0)
    assert fixed(CVaR(0.25), None).at(0.5) == fixed(CVaR(0.25), 0.5)
    assert fixed(CVaR(0.25), 0.1).at(0.5).beta == 0.1
    with pytest.raises(ValueError, match=r"fp:cvar:0.25 depends on beta; write 'fp:cvar:0.25:0.1'"):
        parse_transform("fp:cvar:0.25")(torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp", "expected 'fp:PROCEDURE:BETA' with a rank-based objective"),
        ("fp:", "expected 'fp:PROCEDURE:BETA'"),
        ("fp:log", "expected 'fp:PROCEDURE:BETA'"),
        ("fp:soft:0.1", "soft:0.1: expected a rank-based objective"),
        ("fp:cvar", "expected 'cvar:ALPHA' with a number"),
        ("fp:cvar:2", r"expected a number in \(0, 1\]"),
        ("fp:cvar:0.25:0", r"beta = 0.0; expected a number in \[1e-12, 1e\+12\]"),
        ("fp:cvar:0.25:nan", "beta = nan"),
        ("fp:distortion:1,-1", "a procedure needs f >= 0"),
        ("fp:distortion:absent.py:f:0.1", "distortion:"),
    ],
)
def test_invalid_fixed_points(text, message):
    with pytest.raises(ValueError, match=message):
        parse_transform(text)


def test_a_residual_above_the_tolerance_is_refused(monkeypatch):
    stationary.solve.cache_clear()
    shoot = stationary._slopes

    def planted(procedure, beta, *rest):
        slopes = shoot(procedure, beta, *rest)
        return lambda w, y: (slopes(w, y)[0], 1.0001 * slopes(w, y)[1])

    monkeypatch.setattr(stationary, "_slopes", planted)
    with pytest.raises(
        ValueError, match=r"fp:bop:4.0: the solution for beta = 0.1 has a residual of .* over 1e-08; use"
    ):
        parse_transform("fp:bop:4.0:0.1")
    assert stationary.solve.cache_info().currsize == 0
