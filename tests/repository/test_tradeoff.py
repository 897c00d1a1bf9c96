"""Parts of scripts/tradeoff.py: strengths, curves and findings."""

import itertools
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.objectives import BestOfN

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def tradeoff():
    sys.path.insert(0, str(SCRIPTS))
    found = runpy.run_path(str(SCRIPTS / "tradeoff.py"))
    sys.path.remove(str(SCRIPTS))
    return SimpleNamespace(**found)


@pytest.fixture
def curves(tradeoff):
    return tradeoff.tradeoff_curves


def test_the_optimum_of_beta_has_the_requested_kl(tradeoff):
    phi = torch.tensor([[0.0, 1.0] * 8], dtype=torch.float64)  # two values: the odds of the higher one are e^(1/beta)
    for kl in (0.05, 0.3, 0.6):
        odds = math.exp(1 / tradeoff.beta_for(phi, kl))
        p = odds / (1 + odds)
        assert math.isclose(math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p), kl, rel_tol=1e-4)
    with pytest.raises(ValueError, match="out of reach"):
        tradeoff.beta_for(phi, 0.7)  # above log 2


def test_strengths_are_those_of_best_of_n(tradeoff):
    """The log transform's optimum is best-of-(1 + 1/beta) of the reference, up to the grid of K ranks."""
    rewards = torch.rand(4, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = tradeoff.options("log", 4, 4, "joy", rewards, 16)
    beta = float(found["loss.beta"]) / float(found["rewards.joy.weight"])
    assert math.isclose(1 + 1 / beta, 4, rel_tol=0.02)


def test_every_method_has_options_of_its_own(tradeoff):
    rewards = torch.rand(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {method: tradeoff.options(method, 8, 4, "joy", rewards, 16) for method in tradeoff.METHODS}
    assert len({tuple(options.items()) for options in given.values()}) == len(given)
    assert {tuple(sorted(options.keys() - {"rollout.prompts"})) for options in given.values()} == {
        tuple(sorted(given["grpo"]))
    }
    assert given["vbon:bound"]["rewards.joy.transform"] == given["bond"]["rewards.joy.transform"] == "vbon:8:bound"
    assert given["vbon"]["loss.beta"] == "1"  # the objective is E[log pi_bon / pi_ref] less 1 KL
    assert (given["bond"]["loss.jeffreys"], given["bond"]["offline.n"]) == ("0.5", "8")
    assert {m: given[m]["loss.algorithm"] for m in ("ppo", "ppo/vbon", "bon", "dpo/all", "bonbon")} == {
        "ppo": "ppo", "ppo/vbon": "ppo", "bon": "grpo", "dpo/all": "dpo", "bonbon": "bonbon",
    }  # fmt: skip
    assert {given[m]["rewards.joy.objective"] for m in ("bon", "rank")} == {"bon:4"}
    assert given["rank"]["rewards.joy.transform"] == "power:4"
    assert given["rank"]["loss.beta"] == given["bon_fp"]["loss.beta"] == given["ppo/bon_fp"]["loss.beta"]
    for m in ("bon_sft", "dpo", "ipo", "bonbon", "dpo/all"):
        n = int(given[m]["offline.n"])
        pairs = n * (n - 1) // 2 if m == "dpo/all" else 1
        sets = int(given[m]["rollout.prompts"]) * (16 // n) * pairs
        assert sets == pytest.approx(tradeoff.SETS, rel=1), m
        assert m == "dpo/all" or sets == tradeoff.SETS


def test_the_optimum_for_best_of_n_is_at_the_kl_of_its_strength(tradeoff):
    """The policy that the beta of "bon" belongs to, by 400 steps of mirror ascent instead of the script's solver."""
    rewards = torch.rand(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = tradeoff.options("bon", 4, 4, "joy", rewards, 16)
    beta = float(found["loss.beta"]) / float(found["rewards.joy.weight"])
    objective, log_p = BestOfN(4), torch.full_like(rewards, -math.log(64))
    for _ in range(400):
        target = (objective.linearize(rewards, log_p.exp()) / beta).log_softmax(1)
        log_p = (0.9 * log_p + 0.1 * target).log_softmax(1)
    kl = (log_p.exp() * (log_p + math.log(64))).sum(1).mean()
    assert float(kl) == pytest.approx(tradeoff.distance(4), rel=1e-3)


def curve(curves, kl, per_nat):
    """A curve that rises by ``per_nat`` per sqrt(KL), for five prompts."""
    kl = torch.tensor(kl, dtype=torch.float64)
    rows = [{"kl": k.expand(5)} | {q: per_nat * k.sqrt() + torch.arange(5).double() for q in curves.TITLES} for k in kl]
    return curves.Curve.of(rows)


def test_curves_are_compared_at_common_kls(curves):
    low, high = curve(curves, [2.25, 0.0, 0.25], 1.0), curve(curves, [0.0, 1.0, 4.0], 3.0)
    assert low.at("single", torch.tensor([0.0, 1.0, 2.25]))[:, 0].tolist() == pytest.approx([0.0, 1.0, 1.5])
    # for roots x from 1 to 1.5 the gap is 3x - x; its mean is 2.5 at every prompt
    expected = (
        "+250.00 [+250.00, +250.00] over prompts, [+250.00, +250.00] over seeds (seeds +250.00, +250.00), "
        "over KL 1.00 to 2.25"
    )
    assert curves.ahead("single", [high] * 2, [low] * 2, 100) == expected
    far = curve(curves, [0.0, 3.0, 4.0], 1.0)
    assert curves.ahead("single", [far], [low], 100) == "have no KLs in common (from 3.00, to 2.25)"


def test_values_at_equal_kl(curves):
    """Values are 3 sqrt(KL) plus those of a seed; a method is left out at a KL that one of its seeds does not reach."""
    found = {
        "grpo": [curve(curves, [0.0, 1.0, 4.0], 3.0), curve(curves, [0.0, 2.25], 5.0)],
        "vbon": [curve(curves, [0.0, 4.0], 1.0), curve(curves, [0.0, 0.5], 1.0)],
        "dpo": [curve(curves, [0.0, 4.0], 1.0)],
    }
    reference = curves.Reference(torch.arange(8.0, dtype=torch.float64).expand(5, 8))
    rows = curves.at_equal_kls(found, reference, [0.25, 2.25])
    of = {(row["method"], row["kl"]): row for row in rows if row["quantity"] == "single"}
    assert of.keys() == {(m, k) for m in (curves.BON, "grpo", "dpo") for k in (0.25, 2.25)} | {("vbon", 0.25)}
    assert of["grpo", 0.25]["mean"] == pytest.approx(2 + (1.5 + 2.5) / 2)  # 2: the mean over prompts at KL 0
    assert of["grpo", 2.25]["reach"] == pytest.approx(12.7062 * 1.5, rel=1e-5)  # Student's t, one degree of freedom
    assert of["dpo", 2.25]["reach"] is None
    assert of[curves.BON, 0.25]["mean"] == pytest.approx(float(reference.best_at(0.25)["single"].mean()))
    lines = curves.equal_kl_tables(rows)
    assert f"| vBoN, Eq. 5 | {'250.0 ±0.0 | ' * 5}2.500 ±0.000 |" in lines
    assert lines[-1] == "Not all seeds reach this KL: vBoN, Eq. 5."
    assert sum(line.startswith("| ") for line in lines) == 2 + 4 + 3  # two headers


def test_a_figure_has_a_row_for_each_family_of_many_methods(tradeoff):
    families = tradeoff.tradeoff_figures.families
    assert families(["grpo", "exp:5"]) == [("", ["grpo", "exp:5"])]
    rows = families([*tradeoff.METHODS, "exp:5"])
    assert [m for _, own in rows for m in own].count("exp:5") == 1
    assert sorted(m for _, own in rows for m in own) == sorted([*tradeoff.METHODS, "exp:5"])
    assert max(len(own) for _, own in rows) <= 7  # one colour each


def test_models_evaluated_on_other_prompts_are_refused(curves):
    """Rewards are compared prompt by prompt, so another order would compare different prompts."""
    reference = curves.Reference(torch.zeros(3, 8), prompts=["one", "two", "three"])

    def model(*prompts):
        rewards = {"joy": torch.zeros(len(prompts), 4, dtype=torch.float64)}
        lengths = torch.ones(len(prompts), 4, dtype=torch.int64)
        return EvaluationSamples(rewards, lengths, {"joy": "mean"}, {"joy": 1.0}, 8, list(prompts))

    reference.check(model("one", "two", "three"))
    for other in (("two", "one", "three"), ("one", "two"), ("one", "two", "four")):
        with pytest.raises(ValueError, match="different prompts, or in another order"):
            reference.check(model(*other))


def test_undominated_points(curves):
    where = [(0.0, 0.5), (1.0, 0.6), (1.0, 0.7), (2.0, 0.65), (0.5, 0.9)]
    assert curves.undominated(where) == [True, False, False, False, True]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_best_of_n_of_the_reference_equals_an_enumeration(curves, n):
    """Enumerates n independent choices among K samples; among equal rewards each is equally likely to be the best."""
    rewards = torch.tensor([[0.0, 1.0, 1.0, 3.0], [0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    found = curves.Reference(rewards).best_of(n)
    for p, row in enumerate(rewards.tolist()):
        chance = [0.0] * 4
        for drawn in itertools.product(range(4), repeat=n):
            best = [i for i in range(4) if row[i] == max(row[j] for j in drawn)]
            for i in best:
                chance[i] += 0.25**n / len(best)
        assert float(found["kl"][p]) == pytest.approx(sum(c * math.log(4 * c) for c in chance if c), abs=1e-12)
        assert float(found["reward"][p]) == pytest.approx(sum(c * r for c, r in zip(chance, row, strict=True)))
        for quantity, choose, count in (("single", max, 1), ("best2", max, 2), ("best4", max, 4), ("worst", min, 4)):
            won = sum(
                math.prod(chance[i] for i in ours) * 0.25**count * (0.5 * (a == b) + (a > b))
                for ours in itertools.product(range(4), repeat=count)
                for theirs in itertools.product(range(4), repeat=count)
                for a, b in [(choose(row[i] for i in ours), choose(row[j] for j in theirs))]
            )
            assert float(found[quantity][p]) == pytest.approx(won, abs=1e-12)


def test_gold_rewards_of_best_of_n_equal_an_enumeration(curves):
    """Of the reference, and of a model whose samples are the reference's: the mean over all subsets."""
    rewards = torch.tensor([[0.0, 1.0, 1.0, 3.0, 2.0, 5.0, 4.0, 8.0, 7.0]], dtype=torch.float64)
    gold = torch.tensor([[2.0, -1.0, 4.0, 0.5, 3.0, 1.0, 6.0, -2.0, 5.0]], dtype=torch.float64)
    order = rewards.argsort(dim=1, stable=True)
    reference = curves.Reference(rewards.gather(1, order), gold.gather(1, order))
    of_model = reference.measure(rewards, torch.zeros(1, 9), gold)
    r, g = rewards[0].tolist(), gold[0].tolist()

    def of_best(drawn):
        best = max(r[i] for i in drawn)
        chosen = [g[i] for i in drawn if r[i] == best]
        return sum(chosen) / len(chosen)

    assert float(of_model["gold"]) == pytest.approx(sum(g) / 9)
    for n in (2, 4):
        subsets = [of_best(drawn) for drawn in itertools.combinations(range(9), n)]
        assert float(of_model[f"gold_best{n}"]) == pytest.approx(sum(subsets) / len(subsets))
    pairs = [of_best(drawn) for drawn in itertools.product(range(9), repeat=2)]
    assert float(reference.best_of(2)["gold"]) == pytest.approx(sum(pairs) / len(pairs))
    assert float(reference.best_of(1)["gold_best2"]) == pytest.approx(sum(pairs) / len(pairs))


def test_the_interval_over_seeds_is_students(curves):
    from scipy.stats import ttest_1samp

    means = [0.01, 0.03, -0.02, 0.05]
    text = curves._difference([torch.full((6,), m, dtype=torch.float64) for m in means], 100)
    low, high = ttest_1samp([100 * m for m in means], 0).confidence_interval()
    assert f"[{low:+.2f}, {high:+.2f}] over seeds" in text


def test_the_gap_to_best_of_n_is_taken_at_each_runs_kl(curves):
    reference = curves.Reference(torch.rand(5, 200, dtype=torch.float64).sort(1).values)
    rows = [reference.best_of(n) for n in (1.0, 3.0, 7.5)]
    own = curves.Curve.of(
        [{q: x - 0.1 * (q == "single") * (i > 0) for q, x in row.items()} for i, row in enumerate(rows)]
    )
    expected = "+10.00 [+10.00, +10.00] over prompts (seeds +10.00)"
    assert curves.behind("single", [own], reference, 100) == expected
    assert float(reference.best_at(1e9)["kl"].mean()) == pytest.approx(float(reference.best_of(200.0)["kl"].mean()))
