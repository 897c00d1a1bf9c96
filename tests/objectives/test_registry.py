"""Objectives compared with enumeration, autograd through the exact functional, and closed forms of the paper."""

import math

import pytest
import torch
from support import truths
from support.truths import float64, hump, normal, unit_kernel

from nlgrpo.objectives.registry import (
    BestOfN,
    BestOfPoisson,
    CVaR,
    Distortion,
    DPPDiversity,
    EntropicRisk,
    Form,
    MajorityVote,
    Mean,
    RaoDiversity,
    Smoothed,
    SoftBestOfN,
    WorstOfN,
    linearize_present,
    parse,
    parse_name,
    split_name,
    value_present,
)

NAMED = [Mean(), BestOfN(1), BestOfN(2), BestOfN(4), BestOfN(9), WorstOfN(1), WorstOfN(3), WorstOfN(8)]
NAMED += [BestOfPoisson(0.3), BestOfPoisson(4.0), CVaR(0.05), CVaR(0.35), CVaR(1)]
NAMED += [SoftBestOfN(0.1), SoftBestOfN(3), EntropicRisk(2.0), EntropicRisk(-0.7), EntropicRisk(0.01)]
OBJECTIVES = [*NAMED, Distortion(hump), Distortion((0.5, 2.0, 0.5))]
LETTERS = torch.tensor([[0.3, -1.0, 0.3, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1e-3, -1e-3, 7.0]], dtype=torch.float64)


KERNEL = unit_kernel(4)
VOTES = float64([1.0, 0.0], [0.2, 0.0], [0.7, 1.0], [-0.5, -1.0])
DIVERSITIES = [RaoDiversity(), DPPDiversity(2), DPPDiversity(3, eps=0.1), DPPDiversity(4, eps=0.5)]
EVERY = [*OBJECTIVES, *DIVERSITIES, MajorityVote(2), MajorityVote(3)]


def letters_of(objective):
    """Values of four letters to test an objective on, without and with ties."""
    if objective.pairwise:
        return [KERNEL]
    return [VOTES] if objective.voted else list(LETTERS)


@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_value_and_first_variation_at_a_softmax_policy(objective):
    logits = float64(0.2, -0.7, 1.1, 0.0)
    probs = logits.softmax(0)
    for values in letters_of(objective):
        gradient, value = truths.gradient(objective, values, logits)
        ours = objective.linearize(values[None], probs)[0]
        # d value / d logit_y = pi(y) (r~(y) - E r~): the policy gradient with the linearised rewards
        torch.testing.assert_close(probs * (ours - (probs * ours).sum()), gradient, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(objective.value(values[None], probs[None])[0], value)


@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_derivative_along_a_mixture(objective):
    """(R[pi + h (pi' - pi)] - R[pi]) / h = E_pi' r~ - E_pi r~, by central differences of the exact functional."""
    g = torch.Generator().manual_seed(3)
    rewards = torch.randn(4, generator=g, dtype=torch.float64)
    here, there = torch.rand(2, 4, generator=g, dtype=torch.float64).softmax(1)
    values = letters_of(objective)[0] if objective.pairwise or objective.voted else rewards
    slope = truths.slope(lambda probs: truths.functional(objective, values, probs), here, there)
    ours = objective.linearize(values[None], here)[0]
    torch.testing.assert_close(((there - here) * ours).sum(), slope, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probs_are_uniform_by_default(objective, dtype):
    rewards = torch.randn(5, 6, generator=torch.Generator().manual_seed(4), dtype=dtype)
    jumps = objective in (CVaR(0.05), CVaR(0.35), Distortion((0.5, 2.0, 0.5)))
    for probs in (torch.full((6,), 1 / 6), torch.full((5, 6), 1 / 6, dtype=torch.float64)):
        if not jumps:  # else f(C_k) differs from the average of f between samples, and from rounding
            torch.testing.assert_close(
                objective.linearize(rewards), objective.linearize(rewards, probs), atol=1e-4, rtol=1e-4
            )
        torch.testing.assert_close(objective.value(rewards), objective.value(rewards, probs), atol=1e-5, rtol=1e-5)
    assert objective.linearize(rewards).dtype == objective.value(rewards).dtype == dtype


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_splitting_an_atom_changes_nothing(objective):
    """Two atoms with one reward equal one atom with the sum of their probabilities."""
    rewards, probs = torch.tensor([[1.0, 2.0, 4.0]]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    twice, parts = rewards[:, [0, 1, 1, 2]], torch.tensor([0.5, 0.1, 0.2, 0.2]).double()
    torch.testing.assert_close(objective.linearize(twice, parts), objective.linearize(rewards, probs)[:, [0, 1, 1, 2]])
    torch.testing.assert_close(objective.value(twice, parts), objective.value(rewards, probs))


def test_mean_is_plain_grpo():
    rewards = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(Mean().linearize(rewards), rewards - rewards.amax(1, keepdim=True))
    torch.testing.assert_close(Mean().value(rewards), rewards.mean(1))
    torch.testing.assert_close(BestOfN(1).linearize(rewards), Mean().linearize(rewards))


def test_best_of_n_of_a_group_by_hand():
    """M = 3, n = 2: w = 2/3, 4/3, 2; the rewards 1, 2, 5 have the gaps 1, 3."""
    rewards = torch.tensor([[5.0, 1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(BestOfN(2).weights(3), torch.tensor([2 / 3, 4 / 3, 2], dtype=torch.float64))
    torch.testing.assert_close(BestOfN(2).linearize(rewards)[0], torch.tensor([0, -2 / 3 - 4, -4], dtype=torch.float64))
    torch.testing.assert_close(BestOfN(2).value(rewards)[0], torch.tensor((1 + 2 * 3 + 5 * 5) / 9, dtype=torch.float64))


@pytest.mark.parametrize(("n", "a"), [(2, 1.0), (4, 1.0), (4, 2.5)])
def test_best_of_n_of_a_beta_distribution(n, a):
    """For rewards Beta(a, 1), R = a n / (a n + 1): C(r) = r^a on fine cells."""
    edges = torch.linspace(0, 1, 20001, dtype=torch.float64)
    middles = (edges[1:] + edges[:-1])[None] / 2
    value = BestOfN(n).value(middles, (edges**a).diff())
    assert value.item() == pytest.approx(a * n / (a * n + 1), abs=1e-7)


@pytest.mark.parametrize("N", [2, 4, 8])
@pytest.mark.parametrize("K", [10, 101])
def test_iama_proposition_3_1(N, K):
    """At the optimum for -y^2 and -(1 - y)^2 the linearised rewards of the two sum to a constant."""
    a = 1 / (N - 1)
    edges = torch.linspace(0, 1, K + 1, dtype=torch.float64)
    masses = (edges**a / (edges**a + (1 - edges) ** a)).diff()
    y = (edges[1:] + edges[:-1]) / 2
    total = sum(0.5 * BestOfN(N).linearize(r[None], masses)[0] for r in (-(y**2), -((1 - y) ** 2)))
    assert total.max() - total.min() < 1e-12
    uniform = sum(0.5 * BestOfN(N).linearize(r[None])[0] for r in (-(y**2), -((1 - y) ** 2)))
    assert N == 2 or uniform.max() - uniform.min() > 1e-2, "for N > 2 the uniform policy is not the optimum"


def test_worst_of_n_is_the_negative_of_best_of_n():
    rewards = normal(7, 6, seed=1)
    probs = torch.rand(7, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(1)
    for n in (1, 2, 5):
        for p in (None, probs):
            torch.testing.assert_close(WorstOfN(n).value(rewards, p), -BestOfN(n).value(-rewards, p))
            worst, best = WorstOfN(n).linearize(rewards, p), -BestOfN(n).linearize(-rewards, p)
            torch.testing.assert_close(worst - worst[:, :1], best - best[:, :1])
    assert WorstOfN(2).weights(4).tolist() == [1.5, 1.0, 0.5, 0.0]


def test_worst_of_n_of_a_beta_distribution():
    """1 - Beta(a, 1) is Beta(1, a), so that R of the worst is 1 - a n / (a n + 1)."""
    edges = torch.linspace(0, 1, 20001, dtype=torch.float64)
    middles = 1 - (edges[1:] + edges[:-1])[None] / 2
    value = WorstOfN(3).value(middles, (edges**2).diff())
    assert value.item() == pytest.approx(1 - 6 / 7, abs=1e-7)


def test_cvar_is_the_mean_of_the_lower_tail():
    rewards = torch.tensor([[3.0, -1.0, 2.0, 0.0]], dtype=torch.float64)
    for alpha, value in ((0.25, -1.0), (0.5, -0.5), (0.6, (-1 - 0 + 0.4 * 2) / 2.4), (1, 1.0), (1e-3, -1.0)):
        assert CVaR(alpha).value(rewards).item() == pytest.approx(value)
    torch.testing.assert_close(CVaR(1).linearize(rewards), Mean().linearize(rewards))
    # Less than one sample is in the tail: the gap above the worst counts fully, as for a tail of one sample.
    assert CVaR(0.1).weights(4).tolist() == [4.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(CVaR(0.6).weights(4), torch.tensor([1, 1, 0.4, 0], dtype=torch.float64) / 0.6)
    assert (CVaR(0.6).weights(4) / 4).sum() == pytest.approx(1), "f integrates to 1"
    assert CVaR(0.1).linearize(rewards).tolist() == [[0.0, -4.0, 0.0, 0.0]]


def test_best_of_poisson_may_draw_nothing():
    rewards = normal(3, 5, seed=1)
    moved = BestOfPoisson(2.0).value(rewards + 10) - BestOfPoisson(2.0).value(rewards)
    torch.testing.assert_close(moved, torch.full((3,), 10 * (1 - math.exp(-2)), dtype=torch.float64))
    torch.testing.assert_close(BestOfPoisson(2.0).linearize(rewards + 10), BestOfPoisson(2.0).linearize(rewards))
    torch.testing.assert_close(BestOfPoisson(1e-9).value(rewards) / 1e-9, rewards.mean(1), atol=1e-6, rtol=0)


def test_entropic_risk_between_minimum_mean_and_maximum():
    rewards = torch.tensor([[300.0, -700.0, 299.0, 5.0]], dtype=torch.float64)
    for beta, value in ((1e3, 300.0), (-1e3, -700.0), (1e-13, -24.0), (-1e-13, -24.0)):
        assert EntropicRisk(beta).value(rewards).item() == pytest.approx(value, abs=0.01)
        assert EntropicRisk(beta).linearize(rewards.float()).isfinite().all()
    centre = rewards - rewards.mean()
    torch.testing.assert_close(EntropicRisk(1e-13).linearize(rewards), centre, rtol=1e-9, atol=1e-9)
    # An atom of probability 0 does not contribute, even if it has the highest reward.
    massless = torch.tensor([0.0, 0.5, 0.25, 0.25], dtype=torch.float64)
    assert EntropicRisk(1e3).value(rewards, massless).item() == pytest.approx(299, abs=0.01)
    with pytest.raises(ValueError, match="group 0, sample 1 is infinite; erm:1 needs finite"):
        EntropicRisk(1).linearize(torch.tensor([[0.0, torch.inf]]))


def test_a_distortion_by_function_and_by_table():
    g = torch.Generator().manual_seed(6)
    rewards, probs = torch.randn(4, 7, generator=g, dtype=torch.float64), torch.rand(7, generator=g).double().softmax(0)
    for p in (None, probs):
        for other, f in ((BestOfN(3), lambda z: 3 * z**2), (WorstOfN(2), lambda z: 2 * (1 - z))):
            torch.testing.assert_close(Distortion(f).value(rewards, p), other.value(rewards, p))
            torch.testing.assert_close(Distortion(f).linearize(rewards, p), other.linearize(rewards, p))
    table = BestOfN(3).weights(7)
    for M in (7, 700):  # a table with K = M contains the weights of the group
        assert torch.equal(Distortion(table.tolist()).weights(M), table.repeat_interleave(M // 7))
    torch.testing.assert_close(Distortion(table.tolist()).linearize(rewards), BestOfN(3).linearize(rewards))
    torch.testing.assert_close(Distortion([2.0, 0, 0]).value(rewards) / 2 * 3, CVaR(1 / 3).value(rewards))
    assert Distortion([1, 2]) == Distortion((1.0, 2.0))


def test_soft_best_of_n_between_mean_and_maximum():
    rewards = torch.tensor([[300.0, -700.0, 299.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(SoftBestOfN(1e9).value(rewards), rewards.mean(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(SoftBestOfN(1e-3).value(rewards), rewards.amax(1))
    assert SoftBestOfN(1e-3).linearize(rewards.float()).isfinite().all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_edges(objective):
    assert objective.linearize(torch.tensor([[3.0], [4.0]])).tolist() == [[0.0], [0.0]]
    drawn = 1 - math.exp(-objective.rate) if isinstance(objective, BestOfPoisson) else 1
    torch.testing.assert_close(objective.value(torch.tensor([[3.0], [4.0]])), drawn * torch.tensor([3.0, 4.0]))
    assert objective.linearize(torch.ones(0, 4)).shape == (0, 4)
    assert objective.value(torch.ones(0, 4)).shape == (0,)
    assert (objective.linearize(torch.full((2, 7), 0.1)) == 0).all(), "equal rewards, exactly"
    rewards = torch.randn(2, 5, requires_grad=True)
    assert not objective.linearize(rewards).requires_grad
    assert not objective.value(rewards).requires_grad
    assert rewards.grad is None


def test_infinite_rewards():
    rewards = torch.tensor([[-torch.inf, 1.0, 2.0]])
    assert BestOfN(2).linearize(rewards)[0].tolist() == [-torch.inf, pytest.approx(-4 / 3), 0]
    assert BestOfN(2).value(rewards, torch.tensor([0.0, 0.5, 0.5])).item() == pytest.approx(1.75)
    with pytest.raises(ValueError, match="group 0, sample 0 is infinite"):
        SoftBestOfN(1.0).value(rewards)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("method", ["linearize", "value"])
@pytest.mark.parametrize(
    ("rewards", "probs", "message"),
    [
        (torch.ones(3), None, r"rewards \(P, M\)"),
        (torch.ones(3, 0), None, "M >= 1"),
        (torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]), None, "group 1, sample 0 is NaN"),
        (torch.ones(2, 3), torch.ones(2), r"probs \(2, 3\) or \(3,\)"),
        (torch.ones(2, 3), torch.ones(3), "sum to 1"),
        (torch.ones(2, 3), torch.tensor([1.0, 0.5, -0.5]), "-0.5"),
        (torch.ones(2, 3), torch.tensor([1.0, torch.nan, 0]), "nan"),
    ],
)
def test_refused_inputs(objective, method, rewards, probs, message):
    with pytest.raises(ValueError, match=message):
        getattr(objective, method)(rewards, probs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BestOfN(0), "n=0"),
        (lambda: BestOfN(2.0), r"n=2\.0"),
        (lambda: BestOfN(True), "n=True"),
        (lambda: BestOfN(4, estimator="exact"), "expected 'plugin' or 'unbiased'"),
        (lambda: WorstOfN(0), r"WorstOfN\(n=0\)"),
        (lambda: WorstOfN(4, estimator="best"), "'best'"),
        (lambda: BestOfPoisson(0), "rate=0"),
        (lambda: BestOfPoisson(math.inf), "rate=inf"),
        (lambda: CVaR(0), "alpha=0"),
        (lambda: CVaR(1.1), r"alpha=1\.1"),
        (lambda: CVaR(True), "alpha=True"),
        (lambda: EntropicRisk(0), "beta=0"),
        (lambda: EntropicRisk(math.nan), "beta=nan"),
        (lambda: Distortion([]), "a table of finite numbers"),
        (lambda: Distortion([1.0, math.inf]), "a table of finite numbers"),
        (lambda: Distortion(["1"]), "a table of finite numbers"),
        (lambda: Distortion(torch.sum), r"of that shape, got \(\)"),
        (lambda: Distortion(lambda z: 1.0), "got float"),
        (lambda: Distortion(lambda z: 1 / z), "finite"),
        (lambda: SoftBestOfN(0), "tau=0"),
        (lambda: SoftBestOfN(-1.0), "tau=-1"),
        (lambda: SoftBestOfN(math.nan), "tau=nan"),
        (lambda: SoftBestOfN(math.inf), "tau=inf"),
        (lambda: SoftBestOfN("1"), "tau='1'"),
    ],
)
def test_refused_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


OTHERS = [RaoDiversity(), DPPDiversity(3), DPPDiversity(2, eps=0.1), Smoothed(CVaR(0.2)), Smoothed(BestOfN(4), 0.1)]


@pytest.mark.parametrize(
    "objective", [*NAMED, *OTHERS, SoftBestOfN(1 / 3), SoftBestOfN(1e-7), EntropicRisk(-1e9)], ids=str
)
def test_names_round_trip(objective):
    assert parse(str(objective)) == parse(f" {objective.name} ") == objective


def test_a_distortion_from_a_name():
    assert parse("distortion:1, 0.5,0") == Distortion((1.0, 0.5, 0.0))
    named = parse("distortion:file.py:f", {"file.py:f": hump}.__getitem__)
    assert named == Distortion(hump, named="file.py:f")
    assert parse(str(named), lambda _: hump) == named
    with pytest.raises(ValueError, match=r"module:function or file\.py:function"):
        parse("distortion:hump", lambda _: hump)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bom:4", r"did you mean 'bo[np]:.*'\? .* soft:TAU, erm:BETA, rao, dpp:N, distortion:F, maj:N, functional:"),
        ("nothing-like-it", "Expected one of mean, bon:N, wor:N, bop:RATE, cvar:ALPHA, .*functional:FILE.py:R.$"),
        ("", "Expected one of"),
        ("bon", "expected 'bon:N' with a number, got ''"),
        ("bon:4.5", "got '4.5'"),
        ("bon:0", "n=0"),
        ("soft:0", "tau=0"),
        ("soft:cold", "got 'cold'"),
        ("bon:4:exact", "estimator='exact'"),
        ("bon:4:", "estimator=''"),
        ("soft:1:unbiased", "got '1:unbiased'"),
        ("wor:1e3", "got '1e3'"),
        ("cvar:2", "alpha=2"),
        ("cvar", "expected 'cvar:ALPHA' with a number"),
        ("erm:nan", "beta=nan"),
        ("mean:3", "takes no argument"),
        ("rao:2", "takes no argument"),
        ("dpp", "expected 'dpp:N' with a number, got ''"),
        ("dpp:1", "n=1"),
        ("dpp:2:0", "eps=0"),
        ("dpp:2:1:1", "got '2:1:1'"),
        ("distortion:", "numbers separated by commas"),
        ("distortion:rewards.py:f", "numbers separated by commas.*steps of .0, 1..$"),
        ("bon:4:kde:wide", "':kde:BANDWIDTH', got 'wide'"),
        ("bon:4:kde:0", "bandwidth=0"),
        ("soft:1:kde", "expected a rank-based objective with the plug-in estimator"),
        ("wor:2:unbiased:kde", "expected a rank-based objective with the plug-in estimator"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("objective", [*OBJECTIVES, BestOfN(2, "unbiased"), WorstOfN(4, "unbiased")], ids=str)
def test_missing_rewards_make_groups_smaller(objective):
    g = torch.Generator().manual_seed(5)
    rewards = torch.randn(40, 5, generator=g, dtype=torch.float64)
    rewards[torch.rand(40, 5, generator=g) < 0.5] = torch.nan
    rewards[0], rewards[1] = torch.nan, 1.0
    counts = set()
    for row, ours, worth in zip(
        rewards, linearize_present(objective, rewards), value_present(objective, rewards), strict=True
    ):
        there = row[~row.isnan()]
        counts.add(len(there))
        assert (ours[row.isnan()] == 0).all()
        if len(there) < objective.fewest or len(there) == 0:
            assert worth.isnan()
            assert (ours == 0).all()
            continue
        torch.testing.assert_close(ours[~row.isnan()], objective.advantage(there[None])[0])
        torch.testing.assert_close(worth, objective.value(there[None])[0])
        assert len(there) > 1 or (ours == 0).all()
    assert counts == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_without_missing_rewards_the_linearised_rewards_are_centred(objective):
    rewards = normal(6, 5)
    alone = objective.linearize(rewards)
    torch.testing.assert_close(linearize_present(objective, rewards), alone - alone.mean(1, keepdim=True))
    torch.testing.assert_close(objective.advantage(rewards), alone - alone.mean(1, keepdim=True))
    torch.testing.assert_close(value_present(objective, rewards), objective.value(rewards))
    assert linearize_present(objective, rewards[:0]).shape == (0, 5)


# --- names of other things --------------------------------------------------------------------------------------------

SHAPES = {
    "point": Form("point", lambda: ()),
    "box": Form("box:WIDTH:SIDES", lambda width, sides=4: (width, sides), (float, int), 1),
    "grid": Form("grid:ROWS:COLUMNS", lambda *sides: sides, (int, int), 2),
}


def test_names_of_any_forms():
    assert split_name(" box:0.5:3 ", SHAPES, "shape") == ("box", ["0.5", "3"])
    assert [parse_name(text, SHAPES, "shape") for text in ("point", "box:0.5", "box:1:3", "grid:2:3")] == [
        (),
        (0.5, 4),
        (1.0, 3),
        (2, 3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bx:1", "shape 'bx:1' is not known; did you mean 'box:WIDTH:SIDES'. Expected one of point, box:WIDTH:SIDES, "),
        ("point:1", "shape 'point:1' takes no argument; write 'point'"),
        ("box:wide", "expected 'box:WIDTH:SIDES' with a number, got 'wide'"),
        ("grid:2", "expected 'grid:ROWS:COLUMNS' with numbers, got '2'"),
        ("grid:2:3:4", "got '2:3:4'"),
    ],
)
def test_names_of_other_forms_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_name(text, SHAPES, "shape")
