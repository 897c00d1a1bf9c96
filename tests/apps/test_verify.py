"""`nlgrpo verify` passes, and each check fails if a fault is planted."""

import itertools
import json
import math

import pytest
import torch
from scipy.optimize import minimize
from support.truths import float64
from support.verify_faults import decreasing, of_the_mean, too_far

from nlgrpo import cli
from nlgrpo.apps.verify import check_estimators, check_shape, check_training, exact, tabular, verify
from nlgrpo.apps.verify.claims import Proof, Result
from nlgrpo.objectives import diversity, rank_based, tilted
from nlgrpo.objectives.advantages import centre
from nlgrpo.objectives.registry import BestOfN

PI = float64(0.5, 0.2, 0.3)


def run(folder, *arguments):
    return cli.main(["verify", "--out", str(folder), *arguments])


@pytest.mark.slow
def test_every_claim_holds(tmp_path, capsys):
    assert run(tmp_path / "new" / "folder", "--quick") == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "new" / "folder" / verify.VERIFY_FILE).read_text("utf-8"))
    assert found["holds"] is True
    assert found["quick"] is True
    assert len(found["results"]) > 50
    assert {check.title for check in verify.CHECKS} == {result["part"] for result in found["results"]}
    for result in found["results"]:
        assert result["holds"] is True
        assert math.isfinite(result["measured"])
        assert None in (result["at_most"], result["at_least"]) or result["at_least"] < result["at_most"]
        assert result["claim"].split()[0] in out
    assert f"{len(found['results'])} of {len(found['results'])} claims hold" in out
    assert "FAILED" not in out
    drawn = {check.prove.__name__ + ".png" for check in verify.CHECKS if check.draw}
    assert len(drawn) == 10
    assert {check.paper for check in verify.CHECKS} == {"IAMA", "InfAlign", "vBoN", "IRO", "this package"}
    for paper, counts in found["papers"].items():
        claims = sum(result["paper"] == paper for result in found["results"])
        assert counts == {"holding": claims, "claims": claims}
        assert f"{paper} {claims} of {claims}" in out
        assert f"({paper}, " in out
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == drawn | {verify.VERIFY_FILE}


# --- planted faults: what is replaced, its replacement, and the claims that must fail ---------------------------------


def counts_k(self, M):
    """Number of lower samples counted as k instead of k - 1."""
    n = self.n
    return torch.tensor([n / M * math.comb(k, n - 1) / math.comb(M, n - 1) for k in range(1, M + 1)]).double()


def plugin_instead(self, rewards, baseline="mean"):
    return centre(type(self)(self.n).linearize(rewards))


def unscaled(self, rewards, baseline="mean"):
    return centre(self.linearize(rewards))


def no_baseline(self, rewards, probs):
    tilt, shifted, _ = self._tilt(rewards, probs)
    return tilt * shifted


def of_eight(atoms, chance):
    """Use eight samples for every M."""
    return torch.nn.functional.one_hot(atoms[:, :8]).double().mean(1), chance


def too_large(self, M):
    return 1.1 * self._f(rank_based._steps(M)[1:])


def half_as_far(log_pi, linear, log_ref, *, L, beta):
    return ((3 * L * log_pi + beta * log_ref + linear) / (3 * L + beta)).log_softmax(-1)


FAULTS = [
    (rank_based.BestOfN, "_gap_shares", counts_k, check_estimators.unbiased, "BestOfN: the gradient is unbiased"),
    (rank_based.BestOfN, "_gap_shares", counts_k, check_estimators.linearised_loss, "Unbiased estimator: no bias"),
    (rank_based.OfN, "advantage", plugin_instead, check_estimators.unbiased, "WorstOfN: the gradient is unbiased"),
    (rank_based.OfN, "advantage", unscaled, check_estimators.unbiased, "BestOfN: the gradient is unbiased"),
    (rank_based.BestOfN, "shares", counts_k, check_estimators.unbiased, "BestOfN: the value is unbiased"),
    (diversity.Diversity, "advantage", unscaled, check_estimators.unbiased, "Rao and DPP diversity: the gradient"),
    (rank_based.BestOfPoisson, "weights", too_large, check_estimators.plugin, "bop:2.0: the gradient's bias"),
    (rank_based.BestOfPoisson, "_f", lambda self, z: (2.0 * (z - 1)).exp(), check_estimators.first_variations, "lin"),
    (tilted.SoftBestOfN, "_linearize", no_baseline, check_estimators.first_variations, "linearize equals the slope"),
    (
        rank_based.WorstOfN,
        "_integral",
        lambda self, z: z**self.n,
        check_estimators.first_variations,
        "value equals the",
    ),
    (rank_based.BestOfN, "_integral", decreasing, check_shape.lemma_5_4, "bon:2 is concave"),
    (rank_based.BestOfN, "_integral", decreasing, check_shape.lemma_5_4, "SmoothMin of two bon:4 is concave"),
    (rank_based.WorstOfN, "_integral", lambda self, z: z**self.n, check_shape.lemma_5_4, "wor:4 is not concave"),
    (check_shape, "lipschitz", lambda o: 0.3 if o == BestOfN(2) else 99.0, check_shape.lemma_5_5, "Smooth relative"),
    (
        check_shape,
        "lipschitz",
        lambda o: 0.2 if o == BestOfN(2) else 99.0,
        check_shape.lemma_5_6,
        "Error within the bound",
    ),
    (check_shape, "lipschitz", lambda o: 2.1, check_shape.lemma_5_6, "bon:2, two equal atoms"),
    (check_shape, "_frequencies", of_eight, check_shape.lemma_5_6, "Error is O(1/M): 3 atoms"),
    (check_training, "closed_form_cdf", lambda y, n: y, check_training.proposition_3_1, "N = 4: the closed form"),
    (rank_based.BestOfN, "linearize", of_the_mean, check_training.proposition_3_1, "N = 8: the gap is O(1/T)"),
    (tabular, "proximal_step", too_far, check_training.proposition_3_1, "No update increases the gap"),
    (tabular, "proximal_step", half_as_far, check_training.theorem_5_2, "beta = 4, L = 12: rate"),
    (tabular, "proximal_step", too_far, check_training.theorem_5_2, "No update increases the gap"),
    (rank_based.BestOfN, "linearize", of_the_mean, check_training.theorem_5_2, "The computed optima are stationary"),
    (rank_based.BestOfN, "linearize", of_the_mean, check_training.pareto, "weighted sum: dominates"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("where", "name", "fault", "check", "claim"), FAULTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_planted_fault_is_found(monkeypatch, where, name, fault, check, claim):
    monkeypatch.setattr(where, name, fault)
    failed = [result.claim for result in check(True).results if not result.holds]
    assert any(text.startswith(claim) for text in failed), failed


# --- exit status and record -------------------------------------------------------------------------------------------


def made_up(quick):
    bad = Result("two [b]and two", "arithmetic", "sum", 5.0, at_most=4.0, at_least=4.0, note="as counted")
    return Proof([bad, Result("nothing", "nowhere", "ratio", math.nan, at_most=1.0), Result("a", "b", "c", 0.0, 1.0)])


def test_a_failed_claim_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "CHECKS", (verify.Check("Arithmetic", "Euclid", made_up),))
    assert run(tmp_path) == 1
    out = capsys.readouterr().out
    assert "1 of 3 claims hold" in out
    assert "Euclid 1 of 3" in out
    assert "(Euclid, arithmetic; sum; as counted)" in out
    assert "FAILED: two [b]and two" in out
    assert "4 to 4" in out
    found = json.loads((tmp_path / verify.VERIFY_FILE).read_text("utf-8"))
    assert found["holds"] is False
    assert found["papers"] == {"Euclid": {"holding": 1, "claims": 3}}
    assert [result["holds"] for result in found["results"]] == [False, False, True]
    assert found["results"][1]["measured"] is None
    assert found["results"][2]["at_least"] is None


def test_a_run_that_breaks_removes_an_earlier_result(monkeypatch, tmp_path):
    (tmp_path / verify.VERIFY_FILE).write_text("{}", "utf-8")

    def breaks(quick):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(verify, "CHECKS", (verify.Check("Breaks", "Euclid", breaks),))
    assert run(tmp_path) == 1
    assert not (tmp_path / verify.VERIFY_FILE).exists()


def test_an_invalid_folder_is_refused_before_the_checks(tmp_path, capsys):
    (tmp_path / "file").write_text("", "utf-8")
    assert run(tmp_path / "file") == 2
    assert "choose another folder with --out" in capsys.readouterr().err
    assert run(tmp_path / "file" / "below") == 2


# --- functions the checks use -----------------------------------------------------------------------------------------


def test_counted_groups_equal_enumerated_groups():
    atoms, chance = tabular.all_groups(PI, 4)
    assert atoms.shape == (81, 4)
    assert chance.sum().item() == pytest.approx(1)
    counted, share = tabular.all_counts(PI, 4)
    assert counted.shape == (15, 4)
    listed = {}
    for group, p in zip(atoms.sort(1).values.tolist(), chance.tolist(), strict=True):
        listed[tuple(group)] = listed.get(tuple(group), 0) + p
    assert {tuple(g): pytest.approx(p) for g, p in zip(counted.tolist(), share.tolist(), strict=True)} == listed


def test_expected_gradient_of_rewards_is_the_policy_gradient():
    """Without a baseline, for one and four samples, and with a kernel instead of rewards."""
    rewards = float64(1.0, -2.0, 0.5)
    logits = PI.log().requires_grad_()
    (truth,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    for M in (1, 4):
        atoms, chance = tabular.all_groups(PI, M)
        torch.testing.assert_close(tabular.expected_gradient(atoms, chance, rewards[atoms], PI), truth)
    kernel = torch.arange(9.0).view(3, 3)
    assert tabular.seen(kernel, torch.tensor([[2, 0]])).tolist() == [[[8, 6], [2, 0]]]


def proximal_gain(log_p, linear, reference, start, L, beta):
    """<linear, pi> - beta KL[pi | ref] - L KL[pi | pi_t]."""
    divergences = beta * tabular.kl(log_p, reference) + L * tabular.kl(log_p, start)
    return (log_p.exp() * linear).sum(-1) - divergences


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_proximal_step_is_the_argmax(beta):
    linear, reference = float64(1.0, -2.0, 0.5), float64(0.1, 0.6, 0.3).log()
    ours = tabular.proximal_step(PI.log(), linear, reference, L=2.0, beta=beta)

    def loss(logits):
        log_p = torch.from_numpy(logits).log_softmax(0)
        return -proximal_gain(log_p, linear, reference, PI.log(), 2.0, beta).item()

    best = torch.from_numpy(minimize(loss, [0.0, 0.0, 0.0], tol=1e-12).x).softmax(0)
    torch.testing.assert_close(ours.exp(), best, atol=1e-5, rtol=0)


def test_the_step_within_a_budget_is_optimal():
    linear, reference = float64([1.0, -2.0, 0.5], [1e-3, 0, 0]), torch.full((1, 3), 1 / 3).double().log()
    start = reference.expand(2, -1)
    ours = tabular.budget_step(start, linear, reference, L=0.1, budget=0.05)
    spent = tabular.kl(ours, reference)
    assert spent[0].item() == pytest.approx(0.05, abs=1e-12)
    assert spent[1] < 0.05
    torch.testing.assert_close(ours[1], tabular.proximal_step(start, linear, reference, L=0.1, beta=0.0)[1])
    others = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    within = others[tabular.kl(others, reference) <= 0.05]
    assert len(within) > 1000
    of_ours, *_ = proximal_gain(ours, linear[0], reference, reference, 0.1, 0.0)
    assert of_ours >= proximal_gain(within, linear[0], reference, reference, 0.1, 0.0).max()


def test_kl_of_an_atom_without_mass():
    p, q = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    assert tabular.kl(p, q).item() == pytest.approx(math.log(2))


def test_definitions_by_hand():
    rewards = float64(1.0, 4.0, 2.0)
    mean = (PI * rewards).sum().item()
    assert exact.best_of(rewards, PI, 2).item() == pytest.approx(0.25 * 1 + (0.64 - 0.25) * 2 + (1 - 0.64) * 4)
    pairs = list(itertools.product(range(3), repeat=2))
    for of_two, choose in ((exact.best_of, max), (exact.worst_of, min)):
        by_hand = sum(PI[i] * PI[j] * choose(rewards[i], rewards[j]) for i, j in pairs)
        assert of_two(rewards, PI, 2).item() == pytest.approx(by_hand.item())
    for n in (1, 2, 5):
        torch.testing.assert_close(exact.best_of_cells(rewards, PI[None], n)[0], exact.best_of(rewards, PI, n))
    assert exact.lower_tail(rewards, PI, 0.6).item() == pytest.approx((0.5 * 1 + 0.1 * 2) / 0.6)
    assert exact.best_of_poisson(rewards, PI, 1e-6).item() == pytest.approx(1e-6 * mean, rel=1e-4)
    assert exact.tilted(rewards, PI, 1e6).item() == pytest.approx(mean, rel=1e-4)
    assert exact.certainty_equivalent(rewards, PI, 1e-6).item() == pytest.approx(mean, rel=1e-4)
    assert exact.rao(torch.eye(3).double(), PI).item() == pytest.approx(-0.38)
    volume = exact.log_volume(torch.eye(3).double(), PI, 2, 1.0)
    assert volume.item() == pytest.approx(0.62 * math.log(4) + 0.38 * math.log(3))


def test_fronts_by_hand():
    ours, theirs = torch.tensor([[3.0, 1.0], [1.0, 3.0], [2.0, 2.5]]), torch.tensor([[0.5, 0.5], [1.5, 2.0]])
    assert check_training.margin(ours, theirs) == pytest.approx(0.5)
    assert check_training.hypervolume(ours, torch.zeros(2)) == pytest.approx(3 * 1 + 2 * 1.5 + 1 * 0.5)
    assert check_training.hypervolume(theirs, torch.tensor([0.5, 0.5])) == pytest.approx(1.5)
