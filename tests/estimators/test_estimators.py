"""Estimators against enumeration of all subsets, closed forms and SciPy; the evaluation file against nonsense."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from rich.console import Console
from support.evaluations import metrics_of
from support.truths import normal, voted

from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation, write_evaluation
from nlgrpo.estimators import (
    best_of_n,
    bootstrap,
    distinct_n,
    maj_at_k,
    order_weights,
    paired_test,
    pass_at_k,
    procedure_value,
    procedure_win_rate,
    win_rate,
    worst_of_n,
)
from nlgrpo.objectives.registry import parse
from nlgrpo.training.evaluation_summary import before_after_table, summarize, weighted_best_of_n


def group(prompts, n, seed=0, ties=False):
    if ties:
        return torch.randint(0, 4, (prompts, n), generator=torch.Generator().manual_seed(seed)).double() / 3
    return normal(prompts, n, seed=seed)


def enumerated(rewards, size, pick):
    """Mean of ``pick`` over every subset of ``size`` samples of each row."""
    values = [[pick(subset) for subset in itertools.combinations(row.tolist(), size)] for row in rewards]
    return torch.tensor(values, dtype=torch.float64).mean(1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", range(1, 9))
def test_best_and_worst_of_n_are_the_mean_over_all_subsets(n, ties):
    rewards, ns = group(3, n, ties=ties), range(1, n + 1)
    best = torch.stack([enumerated(rewards, size, max) for size in ns])
    worst = torch.stack([enumerated(rewards, size, min) for size in ns])
    torch.testing.assert_close(best_of_n(rewards, ns), best, rtol=0, atol=1e-12)
    torch.testing.assert_close(worst_of_n(rewards, ns), worst, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize(
    ("n_a", "n_b", "size"),
    [(n, n, size) for n in range(1, 9) for size in range(1, n + 1)]
    + [(5, 6, 1), (5, 6, 3), (6, 4, 4), (1, 5, 1), (8, 3, 2), (7, 8, 7)],
)
def test_win_rate_is_the_mean_over_all_pairs_of_subsets(n_a, n_b, size, worst, ties):
    a, b = group(3, n_a, 1, ties), group(3, n_b, 2, ties)
    pick = min if worst else max
    expected = []
    for row_a, row_b in zip(a.tolist(), b.tolist(), strict=True):
        pairs = list(itertools.product(itertools.combinations(row_a, size), itertools.combinations(row_b, size)))
        wins = sum(Fraction(1 + (pick(s) > pick(t)) - (pick(s) < pick(t)), 2) for s, t in pairs)
        expected.append(float(wins / len(pairs)))
    assert win_rate(a, b, size, worst=worst).tolist() == pytest.approx(expected, abs=1e-12)
    assert (win_rate(a, b, size, worst) + win_rate(b, a, size, worst)).tolist() == pytest.approx([1] * 3, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "size"), [(10, 4), (1000, 512), (10_000, 1), (10_000, 7), (10_000, 5000), (10_000, 10_000)]
)
def test_order_weights_are_exact_for_many_samples(n, size):
    """Against integer arithmetic, where C(10000, 5000) has 3,009 digits."""
    weights = order_weights(n, size)
    total = math.comb(n, size)
    for k in {1, size, (n + size) // 2, n - 3, n - 1, n}:
        expected = float(Fraction(math.comb(k - 1, size - 1), total))
        assert weights[k - 1].item() == pytest.approx(expected, rel=1e-11, abs=1e-300)
    assert weights.sum().item() == pytest.approx(1, abs=1e-11)


def test_uniform_rewards_have_best_of_n_at_n_over_n_plus_1():
    n, ns = 999, [1, 2, 4, 16, 999]
    grid = torch.arange(1, n + 1, dtype=torch.float64)[None] / (n + 1)  # expected order statistics of n uniform samples
    expected = [size / (size + 1) for size in ns]
    assert best_of_n(grid, ns)[:, 0].tolist() == pytest.approx(expected, abs=1e-12)
    assert worst_of_n(grid, ns)[:, 0].tolist() == pytest.approx([1 - x for x in expected], abs=1e-12)


def test_best_of_n_is_unbiased_where_the_maximum_of_blocks_is():
    rewards = torch.rand(20_000, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for size in (2, 4, 8):
        assert best_of_n(rewards, [size]).mean().item() == pytest.approx(size / (size + 1), abs=4e-3)


def test_win_rate_against_itself_is_half_and_best_of_n_beats_one_sample_as_theory_says():
    a, b = group(1, 4000, 5), group(1, 4000, 6)
    assert win_rate(a, a, 4).item() == pytest.approx(0.5, abs=1e-12)
    assert win_rate(a, b, 4).item() == pytest.approx(0.5, abs=0.05)
    best = a.view(-1, 4).max(1).values[None]
    assert win_rate(best, b, 1).item() == pytest.approx(4 / 5, abs=0.02)  # N/(N+1)


def chances(row, objective):
    """Of each sample of one prompt to be chosen, ties sharing as they may, by the definition of the procedure."""
    name, _, number = objective.partition(":")
    n = len(row)
    if name == "soft":
        tilted = [math.exp(r / float(number)) for r in row]
        return [x / sum(tilted) for x in tilted]
    if name == "cvar":  # the lower tail holds alpha n samples, the last of them in part
        tail, order = float(number) * n, sorted(range(n), key=lambda j: row[j])
        share = [0.0] * n
        for rank, j in enumerate(order):
            share[j] = min(1.0, max(0.0, tail - rank)) / tail
        return share
    subsets = list(itertools.combinations(range(n), int(number)))
    pick = max if name == "bon" else min
    share = [0.0] * n
    for subset in subsets:
        share[pick(subset, key=lambda j: row[j])] += 1 / len(subsets)
    return share


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("objective", ["bon:1", "bon:3", "wor:2", "soft:0.7", "cvar:0.35"])
def test_value_and_win_rate_of_a_procedure(objective, ties):
    a, b = group(4, 6, seed=1, ties=ties), group(4, 5, seed=2, ties=ties)
    rates, values = procedure_win_rate(a, b, parse(objective)), procedure_value(a, parse(objective))
    for p, (row_a, row_b) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        ours, theirs = chances(row_a, objective), chances(row_b, objective)
        pairs = itertools.product(zip(ours, row_a, strict=True), zip(theirs, row_b, strict=True))
        wins = sum(u * v * ((x > y) + (x == y) / 2) for (u, x), (v, y) in pairs)
        assert rates[p].item() == pytest.approx(wins)
        assert values[p].item() == pytest.approx(sum(u * x for u, x in zip(ours, row_a, strict=True)))


def test_best_of_poisson_wins_given_that_something_is_drawn():
    """Samples with ranks k/n and independent draws: P(the k-th is the best | one is drawn) by the Poisson law."""
    a = torch.tensor([[1.0, 2.0, 3.0]])
    cdf = [math.exp(2 * (k / 3 - 1)) for k in range(4)]
    mass = [(cdf[k + 1] - cdf[k]) / (1 - cdf[0]) for k in range(3)]
    beat = procedure_win_rate(a, torch.tensor([[2.0, 2.0]]), parse("bop:2.0")).item()
    assert beat == pytest.approx(mass[2] + mass[1] / 2)


@pytest.mark.parametrize("objective", ["erm:1.0", "rao", "distortion:1,-1,2"])
def test_what_chooses_no_response_has_no_win_rate(objective):
    with pytest.raises(ValueError, match="chooses no response"):
        procedure_win_rate(torch.rand(2, 4), torch.rand(2, 4), parse(objective))


@pytest.mark.parametrize("seed", range(4))
def test_pass_and_majority_over_all_subsets(seed):
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(-1, 3 + seed, (5, 7), generator=generator)
    right = torch.randint(0, 4, (5, 1), generator=generator)
    correct = (answers == right) | ((answers == right + 1) & (seed == 3))  # there, two answers are correct
    found = maj_at_k(correct, answers, range(1, 8))
    passed = pass_at_k(correct, range(1, 8))
    for p, k in itertools.product(range(5), range(1, 8)):
        right, votes = correct[p].tolist(), answers[p].tolist()
        subsets = list(itertools.combinations(range(7), k))
        wins = sum(voted(subset, right, votes) for subset in subsets)  # 0 without any vote
        hits = sum(any(right[j] for j in subset) for subset in subsets)
        assert found[k - 1, p].item() == pytest.approx(wins / len(subsets))
        assert passed[k - 1, p].item() == pytest.approx(hits / len(subsets))


def test_majority_of_many_samples():
    """41 correct of 64 in two answers: a vote of 33 is won by more than half; all samples together decide alone."""
    answers = torch.tensor([[0] * 41 + [1] * 23])
    correct = answers == 0
    best = maj_at_k(correct, answers, [1, 33, 64])[:, 0]
    assert best[0].item() == pytest.approx(41 / 64)
    ways = sum(math.comb(41, j) * math.comb(23, 33 - j) for j in range(17, 34)) / math.comb(64, 33)
    assert best[1].item() == pytest.approx(ways)
    assert best[2] == 1


def test_distinct_n():
    assert distinct_n([[1, 2, 1, 2], [1, 2]], 2) == 2 / 4
    assert distinct_n([[1, 2, 1, 2], [1, 2]], 1) == 2 / 6
    assert math.isnan(distinct_n([[1], []], 2))
    with pytest.raises(ValueError, match="n >= 1"):
        distinct_n([[1]], 0)


def test_the_paired_test_is_scipys():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(30, generator=generator, dtype=torch.float64)
    for shift in (0.1, 0.4):
        b = a + shift + torch.randn(30, generator=generator, dtype=torch.float64)
        theirs = scipy.stats.permutation_test(
            (a.numpy(), b.numpy()), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", vectorized=True,
            n_resamples=20_000, rng=1,
        )  # fmt: skip
        mean, low, high, p = paired_test(a, b, resamples=20_000)
        assert low < mean < high
        assert mean == pytest.approx((a - b).mean().item())
        assert p == pytest.approx(theirs.pvalue, abs=4 * math.sqrt(theirs.pvalue / 20_000) + 1e-4)
    assert paired_test(a, a)[3] == 1
    assert math.isnan(paired_test(a[:1], b[:1])[3])
    few = torch.tensor([1.0, 2.0, 3.0, 4.0])  # of 16 signs, 2 are as extreme
    assert paired_test(few, torch.zeros(4))[3] == pytest.approx(2 / 16, abs=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(torch.tensor([[0.0, 0.5]]), [1]), "0 for wrong and 1 for correct"),
        (lambda: maj_at_k(torch.ones(1, 2), torch.ones(1, 2), [1]), "integer answers"),
        (lambda: maj_at_k(torch.ones(1, 2), torch.ones(1, 3, dtype=torch.int64), [1]), "integer answers"),
        (
            lambda: maj_at_k(torch.tensor([[0, 1]]), torch.tensor([[3, 3]]), [1]),
            "answer 3 of a prompt is correct in",
        ),
        (
            lambda: maj_at_k(torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), [3]),
            "from 1 to 2, the number of samples per prompt",
        ),
        (lambda: paired_test(torch.ones(2), torch.ones(3)), "one value per prompt on both sides"),
        (
            lambda: procedure_win_rate(torch.ones(2, 3), torch.ones(2, 3), parse("bon:4")),
            "from 1 to 3, the number of samples per prompt",
        ),
        (lambda: procedure_win_rate(torch.ones(2, 3), torch.ones(3, 3), parse("bon:2")), "same prompts"),
    ],
)
def test_refused_by_the_newer_estimators(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_infinite_rewards_have_an_order_but_no_mean():
    a, b = torch.tensor([[-math.inf, 0.0]]), torch.tensor([[-math.inf, -1.0]])
    assert win_rate(a, b, 2).item() == 1
    assert win_rate(a, b, 1).item() == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    with pytest.raises(ValueError, match="1 infinite"):
        best_of_n(a, [1])


def test_integer_and_half_precision_rewards_are_taken():
    assert best_of_n(torch.tensor([[1, 2, 3]]), [3]).item() == 3
    assert best_of_n(torch.tensor([[1, 2, 3]], dtype=torch.bfloat16), [1]).dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_of_n(torch.tensor([[0.0, math.nan]]), [1]), "NaN, the first at prompt 0, sample 1"),
        (lambda: best_of_n(torch.zeros(2, 3), [4]), "from 1 to 3, the number of samples per prompt"),
        (lambda: best_of_n(torch.zeros(2, 3), [0]), "got 0"),
        (lambda: best_of_n(torch.zeros(2, 3), [1.5]), "got 1.5"),
        (lambda: best_of_n(torch.zeros(2, 3), 2), "sequence"),
        (lambda: best_of_n(torch.zeros(2, 3), []), "sequence"),
        (lambda: worst_of_n(torch.zeros(3), [1]), r"got \(3,\)"),
        (lambda: best_of_n(torch.zeros(3, 0), [1]), r"got \(3, 0\)"),
        (lambda: best_of_n([[1.0]], [1]), "got list"),
        (lambda: win_rate(torch.zeros(2, 3), torch.zeros(3, 3), 1), "a has 2 prompts and b has 3"),
        (lambda: win_rate(torch.zeros(2, 3), torch.zeros(2, 2), 3), "from 1 to 2, the number of samples per prompt"),
        (lambda: win_rate(torch.zeros(2, 3), torch.full((2, 2), math.nan), 1), "b contains 4 NaN"),
        (lambda: bootstrap(torch.zeros(2, 0)), "P >= 1"),
        (lambda: bootstrap(torch.tensor([1.0, math.nan])), "1 NaN"),
        (lambda: bootstrap(torch.zeros(3), level=95), "level=95"),
        (lambda: bootstrap(torch.zeros(3), resamples=0), "resamples=0"),
    ],
)
def test_bad_input_is_refused_with_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bootstrap_is_seeded_paired_and_has_no_interval_for_one_prompt():
    values = group(1, 50)[0]
    assert bootstrap(values)[1] == bootstrap(values)[1]
    assert bootstrap(values)[1] != bootstrap(values, seed=1)[1]
    mean, low, high = bootstrap(torch.stack([values, values + 1]))
    torch.testing.assert_close(torch.stack([mean, low, high])[:, 1], torch.stack([mean, low, high])[:, 0] + 1)
    mean, low, high = bootstrap(torch.tensor([3.0]))
    assert (mean.item(), low.isnan().item(), high.isnan().item()) == (3, True, True)
    mean, low, high = bootstrap(torch.tensor([[0.1] * 7, [0.1] * 6 + [0.2]]))  # whose mean is not 0.1 in floats
    assert low[0] == mean[0] == high[0]
    assert 0.1 <= low[1] < mean[1] < high[1] <= 0.2 + 1e-6
    assert all(x.isfinite() for x in bootstrap(torch.tensor([0.0, 1.0]), resamples=1))


def sampled(prompts=6, n=5, abstained=(), **changes):
    rewards = {"short": group(prompts, n, 1).float(), "long": group(prompts, n, 2).float()}
    for prompt in abstained:
        rewards["long"][prompt, 0] = math.nan
    defaults = {
        "rewards": rewards,
        "lengths": torch.randint(1, 20, (prompts, n), generator=torch.Generator().manual_seed(0)),
        "objectives": {"short": "bon:4", "long": "mean"},
        "weights": {"short": 0.25, "long": 0.75},
        "max_length": 20,
        "prompts": ["a"],
        "completions": [["b"] * n],
    }
    return EvaluationSamples(**{**defaults, **changes})


def test_summary_is_the_estimate_of_each_reward_and_of_their_weighted_sum():
    data = sampled()
    rows = {(row.reward, row.procedure): row for row in summarize(data)}
    assert list(rows) == [(r, p) for r in ("short", "long", "weighted sum") for p in ("mean", "best-of-4")]
    best = {name: enumerated(values, 4, max) for name, values in data.rewards.items()}
    assert rows["short", "best-of-4"].value == pytest.approx(best["short"].mean().item(), abs=1e-12)
    both = 0.25 * best["short"] + 0.75 * best["long"]
    row = rows["weighted sum", "best-of-4"]
    assert (row.value, row.low, row.high) == pytest.approx([x.item() for x in bootstrap(both)], abs=1e-12)
    assert row.low < row.value < row.high


def test_samples_on_which_a_reward_abstains_are_left_out_for_it():
    data = sampled(abstained=(1, 4))
    rows = {(row.reward, row.procedure): row for row in summarize(data)}
    assert rows["short", "mean"].value == pytest.approx(data.rewards["short"].double().mean().item())
    assert rows["short", "mean"].coverage.lines == []
    means = np.nanmean(data.rewards["long"].double().numpy(), axis=1)
    assert rows["long", "mean"].value == pytest.approx(means.mean())
    assert rows["long", "mean"].coverage.lines == ["6 of 6 prompts", "28 of 30 samples"]
    assert rows["weighted sum", "mean"].coverage.lines == ["6 of 6 prompts", "28 of 30 samples"]
    sums = 0.25 * data.rewards["short"].double().mean(1).numpy() + 0.75 * means
    assert weighted_best_of_n(data, [1])[0].numpy() == pytest.approx(sums)
    silent = sampled()
    silent.rewards["long"][:] = math.nan
    of_none = {(row.reward, row.procedure): row for row in summarize(silent)}
    assert math.isnan(of_none["long", "mean"].value)
    assert of_none["long", "mean"].coverage.lines == ["0 of 6 prompts", "0 of 30 samples"]
    assert "long: 0 prompts" in of_none["weighted sum", "mean"].coverage.lines


def test_summary_of_one_reward_has_no_sum_and_too_large_n_is_refused():
    one = sampled(rewards={"short": group(3, 5)}, lengths=torch.ones(3, 5, dtype=torch.int64),
                  objectives={"short": "mean"}, weights={"short": 1.0})  # fmt: skip
    assert [row.reward for row in summarize(one)] == ["short", "short"]
    with pytest.raises(ValueError, match="draw more samples or use a smaller N"):
        summarize(one, (1, 8))


def test_evaluation_file_gives_back_what_was_written(tmp_path):
    data = sampled(abstained=(2,))
    write_evaluation(tmp_path, before=data)
    json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=pytest.fail)
    back = read_evaluation(tmp_path)["before"]
    for name, values in data.rewards.items():
        torch.testing.assert_close(back.rewards[name], values.double(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(back.lengths, data.lengths)
    assert (back.objectives, back.weights, back.completions) == (data.objectives, data.weights, data.completions)
    assert summarize(back) == summarize(data)


@pytest.mark.parametrize(
    "text", ['{"before": {"rew', "[]", '{"before": {}}', '{"before": {"rewards": {"a": [[1], [1, 2]]}}}']
)
def test_damaged_evaluation_file_is_named(tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match=r"evaluation\.json cannot be read"):
        read_evaluation(tmp_path)


def test_samples_whose_parts_disagree_are_refused():
    with pytest.raises(ValueError, match="'short' has shape \\(6, 5\\)"):
        sampled(lengths=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="objective and a weight"):
        sampled(weights={"short": 1.0})
    with pytest.raises(ValueError, match="infinite"):
        sampled(rewards={"short": torch.full((6, 5), math.inf), "long": torch.zeros(6, 5)})


def test_table_fits_80_columns_and_takes_names_literally():
    before = sampled()
    renamed = {"rewards": {"[red]x[/red]": before.rewards["short"]}, "weights": {"[red]x[/red]": 1.0}}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(before_after_table(before, before))
    console.print(before_after_table(*[sampled(**renamed, objectives={"[red]x[/red]": "mean"})] * 2))
    text = console.export_text()
    assert "…" not in text
    assert "weighted sum" in text
    assert "[red]x[/red]" in text
    assert "+0.0000" in text


def test_metrics_of_an_evaluation_have_the_weighted_sum_also_of_one_reward():
    rewards = torch.tensor([[1.0, 3.0], [5.0, 2.0]])
    one = EvaluationSamples(
        {"judge": rewards}, torch.tensor([[1, 2], [3, 6]]), {"judge": "wor:2"}, {"judge": 0.5}, max_length=6
    )
    found = metrics_of(one, (1, 2))
    low, high = found["eval_rewards/judge/mean_low"], found["eval_rewards/judge/mean_high"]
    assert low < 2.75 < high
    assert (found["eval_reward_low"], found["eval_reward_high"]) == (low / 2, high / 2)
    assert {name: x for name, x in found.items() if not name.endswith(("_low", "_high"))} == {
        "eval_rewards/judge/mean": 2.75, "eval_rewards/judge/worst-of-2": 1.5,
        "eval_reward": 1.375, "eval_reward_worst-of-2": 0.75,
        "eval_objective/judge": 1.5, "eval_objective/aggregate": 0.75,
        "eval_completions/mean_length": 3.0, "eval_completions/min_length": 1.0, "eval_completions/max_length": 6.0,
    }  # fmt: skip
    two = EvaluationSamples(
        {"judge": rewards, "short": -rewards}, one.lengths, {"judge": "wor:2", "short": "bon:2"},
        {"judge": 0.5, "short": 1.0}, max_length=6,
    )  # fmt: skip
    found = metrics_of(two, (1, 2))
    assert found["eval_reward"] == pytest.approx(-1.375)
    assert found["eval_reward_each-of-2"] == pytest.approx(0.5 * 1.5 - 1.5)


def test_each_reward_is_summarized_by_its_own_procedure():
    g = torch.Generator().manual_seed(0)
    rewards = {name: torch.randn(5, 6, generator=g, dtype=torch.float64) for name in ("a", "b", "c")}
    objectives, weights = {"a": "bon:4", "b": "wor:2:unbiased", "c": "rao"}, {"a": 1.0, "b": 0.5, "c": 2.0}
    sampled = EvaluationSamples(rewards, torch.ones(5, 6, dtype=torch.int64), objectives, weights, 9)
    rows = {(row.reward, row.procedure): row.value for row in summarize(sampled, (1, 3))}
    triples = list(itertools.combinations(range(6), 3))
    best = torch.stack([rewards["a"][:, t].amax(1) for t in triples]).mean().item()
    worst = torch.stack([rewards["b"][:, t].amin(1) for t in triples]).mean().item()
    means = {name: r.mean().item() for name, r in rewards.items()}
    expected = {
        ("a", "mean"): means["a"],
        ("a", "best-of-3"): best,
        ("b", "mean"): means["b"],
        ("b", "worst-of-3"): worst,
    }
    expected |= {("c", "mean"): means["c"]}
    expected |= {("weighted sum", "mean"): means["a"] + 0.5 * means["b"] + 2 * means["c"]}
    expected |= {("weighted sum", "each of 3"): best + 0.5 * worst + 2 * means["c"]}
    assert rows.keys() == expected.keys()
    for key, value in expected.items():
        assert rows[key] == pytest.approx(value), key
    other = best_of_n(rewards["b"], [3]).mean().item()
    assert weighted_best_of_n(sampled, [3]).mean().item() == pytest.approx(best + 0.5 * other + 2 * means["c"])
