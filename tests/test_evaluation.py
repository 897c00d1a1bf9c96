"""Estimators against enumeration of all subsets, closed forms and SciPy; the evaluation file against nonsense."""

import itertools
import json
import math
from fractions import Fraction

import pytest
import scipy.stats
import torch
from rich.console import Console

from nlgrpo.evaluation import (
    Sampled,
    before_after_table,
    best_of_n,
    bootstrap,
    order_weights,
    read_evaluation,
    summarize,
    weighted_best_of_n,
    win_rate,
    worst_of_n,
    write_evaluation,
)


def group(prompts, n, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(0, 4, (prompts, n), generator=generator).double() / 3
    return torch.randn(prompts, n, generator=generator, dtype=torch.float64)


def enumerated(rewards, size, pick):
    """Mean of ``pick`` over every subset of ``size`` samples of each row."""
    values = [[pick(subset) for subset in itertools.combinations(row.tolist(), size)] for row in rewards]
    return torch.tensor(values, dtype=torch.float64).mean(1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_best_and_worst_of_n_are_the_mean_over_all_subsets(n, ties):
    rewards, ns = group(3, n, ties=ties), range(1, n + 1)
    best = torch.stack([enumerated(rewards, size, max) for size in ns])
    worst = torch.stack([enumerated(rewards, size, min) for size in ns])
    torch.testing.assert_close(best_of_n(rewards, ns), best, rtol=0, atol=1e-12)
    torch.testing.assert_close(worst_of_n(rewards, ns), worst, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize(("n_a", "n_b", "size"), [(5, 6, 1), (5, 6, 3), (6, 4, 4), (4, 4, 4), (1, 5, 1)])
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
        (lambda: best_of_n(torch.zeros(2, 3), [4]), "from 1 to the 3 samples"),
        (lambda: best_of_n(torch.zeros(2, 3), [0]), "got 0"),
        (lambda: best_of_n(torch.zeros(2, 3), [1.5]), "got 1.5"),
        (lambda: best_of_n(torch.zeros(2, 3), 2), "sequence"),
        (lambda: best_of_n(torch.zeros(2, 3), []), "sequence"),
        (lambda: worst_of_n(torch.zeros(3), [1]), r"got \(3,\)"),
        (lambda: best_of_n(torch.zeros(3, 0), [1]), r"got \(3, 0\)"),
        (lambda: best_of_n([[1.0]], [1]), "got list"),
        (lambda: win_rate(torch.zeros(2, 3), torch.zeros(3, 3), 1), "a has 2 prompts and b has 3"),
        (lambda: win_rate(torch.zeros(2, 3), torch.zeros(2, 2), 3), "from 1 to the 2 samples"),
        (lambda: win_rate(torch.zeros(2, 3), torch.full((2, 2), math.nan), 1), "b holds 4 NaN"),
        (lambda: bootstrap(torch.zeros(2, 0)), "P >= 1"),
        (lambda: bootstrap(torch.tensor([1.0, math.nan])), "1 NaN"),
        (lambda: bootstrap(torch.zeros(3), level=95), "level=95"),
        (lambda: bootstrap(torch.zeros(3), resamples=0), "resamples=0"),
    ],
)
def test_bad_input_is_refused_with_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bootstrap_agrees_with_scipy():
    values = group(2, 80, seed=9)
    mean, low, high = bootstrap(values, resamples=20_000, level=0.9)
    torch.testing.assert_close(mean, values.mean(-1))
    for i in range(2):
        theirs = scipy.stats.bootstrap(
            (values[i].numpy(),), lambda x, axis: x.mean(axis), n_resamples=20_000, confidence_level=0.9,
            method="percentile", rng=0,
        ).confidence_interval  # fmt: skip
        width = theirs.high - theirs.low
        assert low[i].item() == pytest.approx(theirs.low, abs=0.03 * width)
        assert high[i].item() == pytest.approx(theirs.high, abs=0.03 * width)


def test_bootstrap_is_seeded_paired_and_has_no_interval_for_one_prompt():
    values = group(1, 50)[0]
    assert bootstrap(values)[1] == bootstrap(values)[1]
    assert bootstrap(values)[1] != bootstrap(values, seed=1)[1]
    mean, low, high = bootstrap(torch.stack([values, values + 1]))
    torch.testing.assert_close(torch.stack([mean, low, high])[:, 1], torch.stack([mean, low, high])[:, 0] + 1)
    mean, low, high = bootstrap(torch.tensor([3.0]))
    assert (mean.item(), low.isnan().item(), high.isnan().item()) == (3, True, True)


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    trials = group(400, 60, seed=2)
    covered = sum(bool(low <= 0 <= high) for _, low, high in (bootstrap(t, resamples=400) for t in trials))
    assert 0.90 < covered / 400 < 0.98


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
    return Sampled(**{**defaults, **changes})


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


def test_prompts_on_which_a_reward_abstains_are_left_out_for_it():
    data = sampled(abstained=(1, 4))
    kept = [0, 2, 3, 5]
    rows = {(row.reward, row.procedure): row.value for row in summarize(data)}
    assert rows["short", "mean"] == pytest.approx(data.rewards["short"].double().mean().item())
    assert rows["long", "mean"] == pytest.approx(data.rewards["long"][kept].double().mean().item())
    assert weighted_best_of_n(data, [1]).shape == (1, 4)
    everywhere = summarize(sampled(abstained=range(6)))
    assert all(math.isnan(row.value) == (row.reward != "short") for row in everywhere)


def test_summary_of_one_reward_has_no_sum_and_too_large_n_is_refused():
    one = sampled(rewards={"short": group(3, 5)}, lengths=torch.ones(3, 5, dtype=torch.int64),
                  objectives={"short": "mean"}, weights={"short": 1.0})  # fmt: skip
    assert [row.reward for row in summarize(one)] == ["short", "short"]
    with pytest.raises(ValueError, match="draw more samples"):
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
    with pytest.raises(ValueError, match="'short' is"):
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


def test_each_reward_is_summarized_by_its_own_procedure():
    g = torch.Generator().manual_seed(0)
    rewards = {name: torch.randn(5, 6, generator=g, dtype=torch.float64) for name in ("a", "b", "c")}
    objectives, weights = {"a": "bon:4", "b": "wor:2:unbiased", "c": "rao"}, {"a": 1.0, "b": 0.5, "c": 2.0}
    sampled = Sampled(rewards, torch.ones(5, 6, dtype=torch.int64), objectives, weights, 9)
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
