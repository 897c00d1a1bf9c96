"""scripts/predict_gain.py: exact optima on a few samples, compared with closed forms, SciPy and enumeration."""

import itertools
import json
import math
import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import REPOSITORY
from rich.console import Console
from scipy.optimize import brentq, minimize

from nlgrpo.calibration import alignment
from nlgrpo.config.recipes import from_arguments
from nlgrpo.objectives import aggregation, registry
from nlgrpo.objectives.aggregation import SmoothMin, WeightedSum

SCRIPTS = REPOSITORY / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    found = runpy.run_path(str(SCRIPTS / "predict_gain.py"))
    sys.path.remove(str(SCRIPTS))
    return SimpleNamespace(**found)


@pytest.fixture
def predictions(script):
    return script.predictions


@pytest.fixture
def exact(script):
    return sys.modules["exact_optimum"]


def rewards(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def drawn(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def best_of(row, probs, n):
    """Expected best of n draws, by enumeration."""
    return sum(
        math.prod(probs[i] for i in chosen) * max(row[i] for i in chosen)
        for chosen in itertools.product(range(len(row)), repeat=n)
    )


def kl(probs):
    return sum(p * math.log(p * len(probs)) for p in probs if p > 0)


# --- optima -----------------------------------------------------------------------------------------------------------


def test_the_optimum_of_the_mean_is_the_tilted_reference(exact):
    found = exact.solve(exact.Goal.of_one(rewards([0.0, 1.0], [3.0, 1.0])), 0.7)
    odds = [math.exp(1 / 0.7), math.exp(2 / 0.7)]
    assert found.probs[0, 1] == pytest.approx(odds[0] / (1 + odds[0]), abs=1e-12)
    assert found.probs[1, 0] == pytest.approx(odds[1] / (1 + odds[1]), abs=1e-12)


@pytest.mark.parametrize("beta", [2.0, 0.3, 0.02])
@pytest.mark.parametrize("n", [2, 5])
def test_best_of_n_with_two_responses(exact, n, beta):
    """G = 1 - (1 - p)^n, so n (1 - p)^(n-1) = beta log p / (1 - p)."""
    p = brentq(lambda p: n * (1 - p) ** (n - 1) - beta * math.log(p / (1 - p)), 0.5, 1 - 1e-15, xtol=1e-15)
    found = exact.solve(exact.Goal.of_one(rewards([0.0, 1.0]), registry.BestOfN(n)), beta)
    assert found.probs[0, 1] == pytest.approx(p, abs=1e-9)
    assert found.kl == pytest.approx(kl([p, 1 - p]), abs=1e-8)


def maximum(objective, start):
    """Largest value of a function of P policies of K probabilities, by SciPy over their logits."""
    P, K = start
    best = minimize(
        lambda x: -objective(torch.tensor(x).view(P, K).softmax(1).tolist()), np.zeros(P * K), tol=1e-13,
        options={"maxiter": 20000, "maxfev": 20000, "xatol": 1e-9, "fatol": 1e-13}, method="Nelder-Mead",
    )  # fmt: skip
    return -best.fun


@pytest.mark.parametrize("beta", [0.5, 0.05])
def test_two_rewards_of_three_responses(exact, beta):
    a, b = [0.0, 0.7, 1.0], [1.0, 0.8, 0.0]
    objectives = [registry.parse("bon:3"), registry.parse("wor:2")]
    goal = exact.Goal([rewards(a), rewards(b)], objectives, WeightedSum([0.6, 0.4]))

    def value(policies):
        (p,) = policies
        return 0.6 * best_of(a, p, 3) - 0.4 * best_of([-r for r in b], p, 2) - beta * kl(p)

    found = exact.solve(goal, beta)
    assert value(found.probs.tolist()) == pytest.approx(maximum(value, (1, 3)), abs=1e-8)
    assert found.residual <= 1e-9
    assert abs(found.gap) < 1e-15


def test_a_smooth_minimum_joins_the_prompts(exact):
    """Its gradient is taken at the means over both prompts, so that neither prompt has an optimum of its own."""
    a, b = [[0.0, 1.0], [0.2, 0.5]], [[0.8, 0.1], [0.9, 0.0]]
    goal = exact.Goal([rewards(*a), rewards(*b)], [registry.BestOfN(2)] * 2, SmoothMin(4.0))

    def value(policies):
        means = [sum(best_of(r, p, 2) for r, p in zip(each, policies, strict=True)) / 2 for each in (a, b)]
        smooth = -math.log(sum(math.exp(-4 * x) / 2 for x in means)) / 4
        return smooth - 0.1 * sum(map(kl, policies)) / 2

    found = exact.solve(goal, 0.1)
    assert value(found.probs.tolist()) == pytest.approx(maximum(value, (2, 2)), abs=1e-8)


def test_the_optimum_at_a_kl(exact):
    goal = exact.Goal.of_one(drawn(3, 8), registry.BestOfN(4))
    for target in (0.1, 1.0):
        found = exact.at_kl(goal, target)
        assert found.kl == pytest.approx(target, abs=1e-6)
        assert exact.solve(goal, found.beta).kl == pytest.approx(target, abs=1e-6)
    with pytest.raises(ValueError, match=r"KL 3 is out of reach, the furthest is 2\.0"):
        exact.at_kl(goal, 3.0)  # above log 8
    with pytest.raises(ValueError, match="expected a number > 0"):
        exact.at_kl(goal, 0.0)


# --- gains ------------------------------------------------------------------------------------------------------------


def test_the_gain_of_two_opposite_rewards(exact, predictions):
    """With rewards y and 1 - y of two responses, symmetry keeps p = 1/2, which the objective and the mean both do.

    A middle response that the mean prefers, (2/3, 2/3), is what training for best-of-N avoids.
    """
    two = exact.Goal([rewards([0.0, 1.0]), rewards([1.0, 0.0])], [registry.BestOfN(2)] * 2, WeightedSum([0.5, 0.5]))
    assert float(exact.solve(two, 0.3).probs[0, 0]) == pytest.approx(0.5)
    a, b = [0.0, 2 / 3, 1.0], [1.0, 2 / 3, 0.0]
    goal = exact.Goal([rewards(a), rewards(b)], [registry.BestOfN(4)] * 2, WeightedSum([0.5, 0.5]))
    row = predictions.gain(goal, 0.1, 8)

    def at(middle):
        p = [(1 - middle) / 2, middle, (1 - middle) / 2]
        return kl(p) - 0.1, (best_of(a, p, 4) + best_of(b, p, 4)) / 2

    with pytest.raises(ValueError, match="out of reach"):
        predictions.gain(goal, 0.5, 8)  # best-of-4 is largest at a finite KL
    more = brentq(lambda m: at(m)[0], 1 / 3, 1 - 1e-12)
    less = brentq(lambda m: at(m)[0], 1e-12, 1 / 3)
    assert row["value_mean"] == pytest.approx(at(more)[1], abs=1e-6)
    assert row["value"] == pytest.approx(at(less)[1], abs=1e-6)
    assert row["gain"] == pytest.approx(at(less)[1] - at(more)[1], abs=1e-6)


def test_correlations_are_within_prompts(predictions):
    given = {"a": rewards([0, 1, 2, 3], [9, 9, 8, 8]), "b": rewards([5, 4, 3, 2], [0, 0, 1, 2])}
    truth = [np.corrcoef(x, y)[0, 1] for x, y in zip(given["a"], given["b"], strict=True)]
    assert predictions.correlations(given) == {"a, b": pytest.approx(np.mean(truth))}


def test_signal_and_noise_equal_an_enumeration_of_all_groups(exact, predictions):
    both = [rewards([0.0, 1.0, 0.4]), rewards([1.0, 0.0, 0.7])]
    goal = exact.Goal(both, [registry.BestOfN(2)] * 2, WeightedSum([1.0, 0.5]))
    own, plain = predictions.optima(goal, 0.2)
    found = predictions.signal(goal, plain, own, 3, draws=600_000)
    p, ratio = plain.probs[0].tolist(), (plain.log_p[0] + math.log(3)).tolist()
    away = (own.log_p - plain.log_p)[0].tolist()
    middle = sum(x * y for x, y in zip(p, away, strict=True))
    first = second = 0.0
    for group in itertools.product(range(3), repeat=3):
        chance = math.prod(p[i] for i in group)
        slope = 0.0
        for i in group:
            advantage = -own.beta * (ratio[i] - sum(ratio[j] for j in group) / 3)
            for weight, row in ((1.0, [0.0, 1.0, 0.4]), (0.5, [1.0, 0.0, 0.7])):
                ordered = sorted(row[j] for j in group)

                def linear(r, ordered=ordered):  # -sum over the gaps above r of 2 C(r)
                    return -sum(2 * (k + 1) / 3 * (ordered[k + 1] - ordered[k]) for k in range(2) if ordered[k] >= r)

                advantage += weight * (linear(row[i]) - sum(linear(row[j]) for j in group) / 3)
            slope += advantage * (away[i] - middle) / 3
        first, second = first + chance * slope, second + chance * slope**2
    noise = math.sqrt(second - first**2)
    assert found["signal"] == pytest.approx(first, abs=5 * noise / math.sqrt(200_000))
    assert found["noise"] == pytest.approx(noise, rel=0.01)
    assert found["prompts"] == math.ceil((found["noise"] / found["signal"]) ** 2)
    assert found["completions"] == 3 * found["prompts"]

    step = 1e-5  # the slope of the goal minus beta KL along p (p* / p)^e
    ends = []
    for e in (step, -step):
        there = (plain.log_p + e * (own.log_p - plain.log_p)).log_softmax(1)
        ends.append(goal.value(there.exp()) - own.beta * float(exact.kl_of(there).mean()))
    assert found["exact"] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


# --- transforms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_win_rates_equal_an_enumeration(predictions, n):
    """With ties, and probabilities that are not equal."""
    row, probs = [0.0, 1.0, 1.0, 3.0], [0.1, 0.2, 0.3, 0.4]
    found = predictions.win_rates(rewards(row), rewards(probs), n)
    for quantity, choose, count in (("single", max, 1), ("best", max, n), ("worst", min, n)):
        won = sum(
            math.prod(probs[i] for i in ours) * 0.25**count * (0.5 * (a == b) + (a > b))
            for ours in itertools.product(range(4), repeat=count)
            for theirs in itertools.product(range(4), repeat=count)
            for a, b in [(choose(row[i] for i in ours), choose(row[j] for j in theirs))]
        )
        assert found[quantity] == pytest.approx(won, abs=1e-12)


@pytest.mark.parametrize("name", ["identity", "log", "exp:10", "exp:-10", "bon_fp:4", "won_fp:4", "vbon", "vbon:bound"])
def test_many_samples_have_the_win_rates_of_the_closed_curves(predictions, name):
    row = predictions.of_method(name, drawn(2, 3000), 0.64, 4)
    for quantity in ("single", "best", "worst"):
        assert row[quantity] == pytest.approx(row[f"inf_{quantity}"], abs=4e-3)
    curve = alignment.at_kl("log" if name.startswith("vbon") else name, [0.64], 4)
    assert row["inf_worst"] == pytest.approx(float(curve.won_win_rate), abs=1e-9)


def test_best_of_n_on_the_rank_wins_what_the_fixed_point_wins(predictions):
    """InfAlign, Def. 5: the win rate of best-of-N is E of u^N of the best."""
    row = predictions.of_method("rank:4", drawn(1, 1500), 1.0, 4)
    assert row["best"] == pytest.approx(float(alignment.at_kl("bon_fp:4", [1.0], 4).bon_win_rate), abs=2e-3)


def test_the_optimum_of_vbon_is_best_of_n(predictions):
    """Eq. 5 is largest at the distribution of the best of N (vBoN, Prop. 1); the KL determines N."""
    K, n = 50, 4.0
    given = drawn(2, K)
    F = torch.arange(1, K + 1, dtype=torch.float64) / K
    chance = F**n - (F - 1 / K) ** n
    found, _ = predictions.method("vbon", given, float((chance * (chance * K).log()).sum()), 4)
    assert 1 + 1 / found.beta == pytest.approx(n, abs=1e-5)
    assert torch.allclose(found.probs.gather(1, given.argsort(dim=1)), chance.expand(2, K), atol=1e-7)
    bound, _ = predictions.method("vbon:bound", given, 0.5, 4)
    assert bound.kl == pytest.approx(0.5, abs=1e-6)


def test_a_calibrated_reward_does_not_depend_on_units(predictions):
    given = drawn(2, 40)
    uneven = given * torch.tensor([[0.01], [100.0]])

    def single(name, scored):
        return predictions.of_method(name, scored, 0.5, 4)["single"]

    for name in ("identity", "vbon"):
        assert single(name, uneven) == pytest.approx(single(name, given), abs=1e-9)
    assert single("raw", given) > 0.05 + single("raw", uneven)
    assert predictions.of_method("raw", uneven, 0.5, 4)["spread_kl"] == pytest.approx(0.5, abs=1e-3)  # 0 and 1 nats


@pytest.mark.parametrize(
    ("name", "message"),
    [("vbon:4", "the KL determines its N"), ("rank", "expected 'rank:N'"), ("ex:10", "is not known")],
)
def test_unknown_transforms_are_refused(predictions, name, message):
    with pytest.raises(ValueError, match=message):
        predictions.method(name, drawn(1, 8), 0.1, 4)


# --- the command ------------------------------------------------------------------------------------------------------


def given(script, *arguments):
    return script.parser().parse_args(list(arguments))


def test_predictions_of_a_configuration(script, tmp_path):
    config, _ = from_arguments(["length-bon"])
    lengths = torch.arange(1.0, 65, dtype=torch.float64).view(4, 16)
    scored = {name: -(((lengths - target) / 128) ** 2) for name, target in (("short", 25), ("long", 75))}
    options = given(script, "length-bon", "--kls", "0.5", "--weights", "0.7", "0.3", "--front-kl", "0.5")
    content = script.predict(options, config, scored, Console(quiet=True))
    assert [row["kl"] for row in content["gains"]] == [0.5]
    assert content["gains"][0]["gain"] > 0
    assert [(row["weight"], row["own"]) for row in content["front"]] == [(0.3, 1.0), (0.3, 0.0), (0.7, 1.0), (0.7, 0.0)]
    assert json.loads(json.dumps(content)) == content
    assert script.figures.render(lambda: script.draw(content, 4)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blank"], "blank has no reward"),
        (["length-bon", "--samples", "2"], "--samples 2"),
        (["length-bon", "--rollouts", "nowhere"], "nowhere.*rollouts.json is missing"),
        (["no-such-recipe"], "unknown recipe"),
    ],
)
def test_bad_input_is_one_line(script, arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["predict_gain.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, last)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (["--loss.aggregate", "min"], [], "expected loss.aggregate 'sum' or 'smooth_min:GAMMA'"),
        (["--loss.aggregate_at", "prompt"], [], "of the means over the batch"),
        (["--rewards.short.transform", "identity"], [], "'short' has a transform"),
        (["--rewards.short.objective", "rao"], [], "not of kernels"),
        ([], ["--transforms", "identity"], "has 2 rewards; expected one"),
        (["--rewards.long.weight", "0"], ["--weights", "0.5"], "--weights.*expected two"),
    ],
)
def test_settings_without_a_prediction_are_refused(script, changes, options, message):
    config, _ = from_arguments(["length-bon", *changes])
    scored = {name: drawn(2, 8, seed=i) for i, name in enumerate(config.rewards)}
    with pytest.raises(ValueError, match=message):
        script.predict(given(script, "length-bon", "--kls", "0.1", *options), config, scored, Console(quiet=True))


def test_a_reward_that_was_not_scored(script):
    config, _ = from_arguments(["length-bon"])
    with pytest.raises(ValueError, match="'long' was not scored; scored rewards: short"):
        script.predict(given(script, "length-bon"), config, {"short": drawn(2, 8)}, Console(quiet=True))


@pytest.mark.parametrize("name", ["opposed", "worst_of_4", "uneven"])
def test_examples_have_groups_of_twice_n(script, name):
    config, _ = from_arguments([str(REPOSITORY / "examples" / f"{name}.toml")])
    assert config.rollout.samples >= 2 * 4
    scored = {reward: drawn(2, 8, seed=i) for i, reward in enumerate(config.rewards)}
    goal = script.goal_of(config, scored)
    assert isinstance(goal.aggregate, aggregation.WeightedSum)
    assert {objective.name for objective in goal.objectives} == {"bon:4" if name == "opposed" else "mean"}


def test_the_uneven_reward_has_a_unit_per_prompt(tmp_path):
    (tmp_path / "words.txt").write_text("good\t2\nbad\t-2\n")
    reward = runpy.run_path(str(REPOSITORY / "examples" / "experiment_rewards.py"))["Uneven"](
        str(tmp_path / "words.txt"), spread=10.0
    )
    prompts = [f"story {i}" for i in range(400)]
    units = [reward.unit(prompt) for prompt in prompts]
    assert 0.1 <= min(units) < 0.12
    assert 8.5 < max(units) <= 10
    assert np.median(units) == pytest.approx(1, rel=0.35)
    plain = reward.lexicon(["good"] * 2)[0]
    assert reward(prompts[:2], ["good", "good"]) == [units[0] * plain, units[1] * plain]
