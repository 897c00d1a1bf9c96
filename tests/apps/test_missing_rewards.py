"""Figures with missing rewards: over the samples that are there, with their number, in every table and file."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from rich.console import Console
from support.evaluations import metrics_of

from nlgrpo.apps.evaluate import results
from nlgrpo.apps.report import compare as comparison
from nlgrpo.apps.report import evaluation_figures, figures, hub, report, run_loader
from nlgrpo.apps.rollout import tables as rollout_tables
from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.apps.sweep import sweep
from nlgrpo.config.recipes import recipe
from nlgrpo.engine.rollouts.evaluation_samples import Coverage, EvaluationSamples, left_out, write_evaluation
from nlgrpo.estimators import best_of_n, bootstrap, over_present, paired_test, procedure_value, procedure_win_rate
from nlgrpo.objectives.registry import parse
from nlgrpo.training.evaluation_entries import entries
from nlgrpo.training.evaluation_summary import (
    before_after_table,
    changes,
    format_change,
    summarize,
    weighted_best_of_n,
    what_changed,
)

NAN = math.nan


def rewards_of(prompts=7, n=6, seed=0, missing=0.25):
    random = np.random.default_rng(seed)
    values = random.normal(size=(prompts, n))
    values[random.random(values.shape) < missing] = NAN
    return values


def samples_of(rewards, weights=None, objectives=None, **more):
    tensors = {name: torch.tensor(np.array(values), dtype=torch.float64) for name, values in rewards.items()}
    P, n = next(iter(tensors.values())).shape
    return EvaluationSamples(
        tensors,
        torch.arange(1, P * n + 1).view(P, n),
        dict.fromkeys(tensors, "bon:2") | (objectives or {}),
        dict.fromkeys(tensors, 1.0) | (weights or {}),
        100,
        ["p"],
        [["c"] * n],
        **more,
    )


def shown(table, width=200):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return " ".join(console.export_text().split())


def best(row, n):
    """Mean of the best over all subsets of n of the rewards that are there; NaN if there are too few."""
    there = [x for x in row if not math.isnan(x)]
    subsets = list(itertools.combinations(there, n))
    return sum(map(max, subsets)) / len(subsets) if subsets else NAN


# --- one prompt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_an_estimate_is_that_of_the_samples_that_are_there(n):
    rewards = rewards_of()
    rewards[3] = NAN
    found = over_present(lambda x: best_of_n(x, [n])[0], torch.tensor(rewards), fewest=n)
    expected = [best(row, n) for row in rewards]
    assert any(map(math.isnan, expected))
    assert not all(map(math.isnan, expected))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_an_estimate_of_two_sides_with_different_samples():
    ours, theirs = rewards_of(seed=1), rewards_of(n=5, seed=2)
    objective = parse("bon:2")
    found = over_present(
        lambda a, b: procedure_win_rate(a, b, objective), torch.tensor(ours), torch.tensor(theirs), fewest=2
    )
    for value, a, b in zip(found.tolist(), ours, theirs, strict=True):
        pairs = [list(itertools.combinations(x[~np.isnan(x)], 2)) for x in (a, b)]
        wins = [(max(x) > max(y)) + 0.5 * (max(x) == max(y)) for x in pairs[0] for y in pairs[1]]
        assert value == pytest.approx(np.mean(wins) if wins else NAN, nan_ok=True)


def test_several_numbers_of_a_sample_are_missing_together():
    pairs = torch.tensor([[[1.0, 2.0], [NAN, 5.0], [3.0, 4.0]]])
    assert over_present(lambda x: (x[..., 0] * x[..., 1]).sum(1), pairs).tolist() == [14]


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"from 1 to 3, .*, got 4; draw more samples or use a smaller N"):
        over_present(lambda x: x.mean(1), torch.zeros(2, 3), fewest=4)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_one_missing_grade_does_not_drop_its_prompt():
    """Half of the prompts have grades of 10, the others of 0 and one each that is missing: 5.0, not 10.0."""
    rewards = np.repeat([[10.0], [0.0]], 10, axis=0) * np.ones((20, 8))
    rewards[10:, 3] = NAN
    sampled = samples_of({"judge": rewards})
    for row in summarize(sampled, (1, 4)):
        assert row.value == 5
        assert row.coverage == Coverage(20, 20, 150, 160)
    text = shown(before_after_table(sampled, sampled))
    assert "150 of 160 samples" in text
    assert metrics_of(sampled, (1,)) | {"eval_reward_samples": 150.0} == metrics_of(sampled, (1,))
    whole = samples_of({"judge": np.ones((20, 8))})
    assert " of 20 prompts" not in shown(before_after_table(whole, whole))
    assert not [name for name in metrics_of(whole, (1,)) if name.endswith(("_samples", "_prompts"))]


def test_prompts_with_too_few_samples_have_no_best_of_n():
    rewards = [[1.0, 2.0, 3.0, 4.0], [5.0, NAN, 7.0, NAN], [NAN] * 4]
    mean, best_of_3 = summarize(samples_of({"judge": rewards}), (1, 3))
    assert (mean.value, mean.coverage) == (pytest.approx((2.5 + 6) / 2), Coverage(2, 3, 6, 12))
    assert (best_of_3.value, best_of_3.coverage) == (pytest.approx(best(rewards[0], 3)), Coverage(1, 3, 4, 12))
    with pytest.raises(ValueError, match="draw more samples or use a smaller N"):
        summarize(samples_of({"judge": rewards}), (1, 5))


PROCEDURES = ["mean", "bon:2", "wor:2", "soft:0.5", "cvar:0.5", "bop:2.0", "rewind:0.5:2"]


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_every_procedure_is_that_of_the_samples_that_are_there(procedure):
    """Each prompt alone, with its samples cut to those with a reward, gives the same value and win rate."""
    data = {"reference": samples_of({"r": rewards_of(seed=3)}), "model": samples_of({"r": rewards_of(seed=4)})}
    _, found = [e for e in entries(data, [procedure], ()) if e.quantity == "r"]
    values, wins = [], []
    for prompt in range(7):
        alone = {name: s.rewards["r"][prompt] for name, s in data.items()}
        alone = {name: samples_of({"r": x[~x.isnan()][None]}) for name, x in alone.items()}
        if min(s.lengths.shape[1] for s in alone.values()) >= 2:
            _, one = [e for e in entries(alone, [procedure], ()) if e.quantity == "r"]
            values.append(one.estimate.value)
            wins.append(one.win_rate.value)
    assert found.estimate.value == pytest.approx(np.mean(values))
    assert found.win_rate.value == pytest.approx(np.mean(wins))
    assert found.estimate.coverage.samples < found.estimate.coverage.of_samples == 42
    text = " ".join(shown(table) for table in results.tables(data, [procedure], ()))
    assert f"{found.estimate.coverage.samples} of 42 samples" in text
    assert "wins nan" not in text


def test_a_judge_scores_the_choice_among_samples_that_both_score():
    proxy, gold = rewards_of(seed=5), rewards_of(seed=6)
    data = {"reference": samples_of({"proxy": proxy, "gold": gold})}
    [found] = [e for e in entries(data, ["bon:2"], ["gold"]) if e.quantity == "gold by choice of proxy"]
    expected = []
    for a, b in zip(proxy, gold, strict=True):
        both = [(x, y) for x, y in zip(a, b, strict=True) if not math.isnan(x + y)]
        chosen = [max(pair)[1] for pair in itertools.combinations(both, 2)]
        expected += [np.mean(chosen)] if chosen else []
    assert found.estimate.value == pytest.approx(np.mean(expected))
    assert found.estimate.coverage.prompts == len(expected)


def test_a_majority_votes_among_samples_with_a_reward():
    right = [[1.0, 1.0, 0.0, NAN, NAN], [0.0, 1.0, 1.0, 0.0, 1.0]]
    answers = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 0, 1, 0]])
    sampled = samples_of({"r": right}, objectives={"r": "maj:3"}, answers={"r": answers})
    rows = {row.procedure: row for row in summarize(sampled, (1, 3))}
    votes = [np.mean([sum(x) >= 2 for x in itertools.combinations([y for y in row if y == y], 3)]) for row in right]
    assert rows["majority-of-3"].value == pytest.approx(np.mean(votes))
    found = entries({"reference": sampled}, ["bon:3"], ())
    assert [e.estimate.value for e in found if e.procedure == "maj@3"] == [pytest.approx(np.mean(votes))]


def test_changes_are_over_the_prompts_that_both_have():
    """Before and after lack different prompts, so the difference of the means says nothing."""
    before = samples_of({"r": [[0.0, 0.0], [10.0, 10.0], [NAN, NAN]]})
    after = samples_of({"r": [[1.0, 1.0], [NAN, NAN], [0.0, 0.0]]})
    change = changes(before, after, (1,))[0]
    assert (change.before.value, change.after.value, change.value, change.prompts) == (5, 0.5, 1, 1)
    assert format_change(change) == "+1.0000 (1 of 3 prompts)"
    assert "+1.0000 10.0000" not in shown(before_after_table(before, after, (1,)))
    assert "1 of 3" in shown(before_after_table(before, after, (1,)))
    [_, entry] = [e for e in entries({"reference": before, "model": after}, ["mean"], ()) if e.quantity == "r"]
    assert (entry.change.value, entry.change.coverage.prompts) == (1, 1)
    never = changes(before, samples_of({"r": [[NAN, NAN], [NAN, NAN], [1.0, 1.0]]}), (1,))[0]
    assert math.isnan(never.value)
    assert format_change(never) == "-"


# --- several rewards --------------------------------------------------------------------------------------------------


def tasks(**more):
    """Two rewards, each for its own prompts."""
    code = [[1.0, 2.0, 3.0], [NAN] * 3, [4.0, 4.0, 7.0], [NAN] * 3]
    math_ = [[NAN] * 3, [10.0, 20.0, 30.0], [NAN] * 3, [0.0, 0.0, 60.0]]
    return samples_of({"code": code, "math": math_}, {"math": 0.5}, **more)


def test_the_weighted_sum_is_over_the_rewards_that_apply_to_a_prompt():
    rows = {(row.reward, row.procedure): row for row in summarize(tasks(), (1, 3))}
    assert rows["weighted sum", "mean"].value == pytest.approx((2 + 10 + 5 + 10) / 4)
    assert rows["weighted sum", "best-of-3"].value == pytest.approx((3 + 15 + 7 + 30) / 4)
    assert rows["code", "mean"].coverage.lines == ["2 of 4 prompts", "6 of 12 samples"]
    lines = rows["weighted sum", "mean"].coverage.lines
    assert lines == ["4 of 4 prompts", "12 of 12 samples", "code: 2 prompts", "math: 2 prompts"]
    assert metrics_of(tasks(), (1,))["eval_reward"] == pytest.approx(6.75)


def test_a_reward_with_too_few_samples_is_no_part_of_a_sum_that_lacks_it():
    """It applies to the prompt, so that the sum without it would be another number."""
    sampled = samples_of({"a": [[1.0, NAN, NAN], [1.0, 2.0, 3.0]], "b": [[5.0, 5.0, 5.0], [6.0, 6.0, 6.0]]})
    found = weighted_best_of_n(sampled, [1, 2])
    assert found[0].tolist() == pytest.approx([6, 8])
    assert found[1].tolist() == pytest.approx([NAN, best([1, 2, 3], 2) + 6], nan_ok=True)


def test_a_reward_of_weight_0_hides_no_prompt():
    sampled = samples_of({"a": [[1.0, 2.0], [3.0, 4.0]], "watched": [[NAN, NAN], [7.0, NAN]]}, {"watched": 0.0})
    row = summarize(sampled, (1,))[-1]
    assert (row.reward, row.value, row.coverage.lines) == ("weighted sum", 2.5, [])


def test_sums_are_compared_where_the_same_rewards_apply():
    before = samples_of({"a": [[1.0, 1.0], [2.0, 2.0]], "b": [[3.0, 3.0], [4.0, 4.0]]})
    after = samples_of({"a": [[2.0, 2.0], [3.0, 3.0]], "b": [[NAN, NAN], [5.0, 5.0]]})
    change = changes(before, after, (1,))[-1]
    assert (change.before.value, change.after.value) == (5, 5)  # (4 + 6) / 2 and (2 + 8) / 2
    assert (change.value, change.prompts) == (2, 1)
    assert before.same_rewards(after).tolist() == [False, True]


# --- files and pages --------------------------------------------------------------------------------------------------


def run_in(folder, before, after):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"evaluation": {"ns": [1, 2]}, "rewards": {}}))
    (folder / "metrics.jsonl").write_text('{"step": 0, "kl": 0.1, "completions/mean_length": 3.0}\n')
    write_evaluation(folder, before=before, after=after)
    return folder


def test_the_model_card_says_over_how_many(tmp_path):
    run = run_in(tmp_path / "run", tasks(), tasks())
    card = hub.model_card(run, "me/model")
    assert "(2 of 4 prompts, 6 of 12 samples)" in card
    assert "6.7500" in card
    assert "(4 of 4 prompts, 12 of 12 samples, code: 2 prompts, math: 2 prompts)" in card


def test_the_report_says_over_how_many(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"", "", ""))
    run = run_in(tmp_path / "run", tasks(), tasks())
    page = report.write_report(run).read_text()
    assert "2 of 4 prompts, 6 of 12 samples" in page
    assert "math: 2 prompts" in page
    found = run_loader.read_runs([run])
    sums = [e for e in found.entries if e.quantity == "weighted sum" and e.procedure == "mean"]
    assert [e.estimate.value for e in sums] == pytest.approx([6.75, 6.75])
    assert sums[1].change.value == 0


def test_results_keep_the_numbers_of_prompts(tmp_path):
    data = {"reference": tasks(), "model": tasks()}
    (tmp_path / "ev").mkdir()
    write_evaluation(tmp_path / "ev", **data)
    results.write(data, ["mean", "bon:2"], (), recipe("blank"), tmp_path / "ev")
    rows = json.loads((tmp_path / "ev" / "results.json").read_text())["results"]
    assert rows[0]["estimate"]["coverage"] == asdict(Coverage(2, 4, 6, 12))
    read = [e for e in run_loader.read_runs([tmp_path / "ev"]).entries if e.quantity == "code"]
    assert [e.estimate.coverage for e in read if e.procedure == "mean"] == [Coverage(2, 4, 6, 12)] * 2
    assert "coverage" not in next(row for row in rows if row["quantity"] == "length")["estimate"]  # over all of them


def test_prompts_that_were_left_out_are_said_everywhere(tmp_path, capsys, monkeypatch):
    """In one wording: tables, results.json, the report, the model card, comparisons and sweeps."""
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"", "", ""))
    sampled = samples_of({"r": [[1.0, 2.0], [3.0, 4.0]]}, left_out={"dropped as too long": 5, "without cut_after": 1})
    text = "2 prompts x 2 samples; 5 dropped as too long; 1 without cut_after"
    run = run_in(tmp_path / "run", sampled, sampled)
    assert f"({text}, 95% intervals)" in shown(before_after_table(sampled, sampled, (1,)))
    assert text in report.write_report(run).read_text()
    assert text in hub.model_card(run, "me/model")
    point = sweep_state.Point({"optim.lr": 1e-5}, run, "done")
    sweep._show(sweep_state.SweepState(tmp_path, {"evaluation": {"ns": [1, 2]}}, [point]))
    assert f"evaluated on {text}" in " ".join(capsys.readouterr().out.split())
    comparison.compare([run], tmp_path)
    assert f"({text}, 95% intervals)" in " ".join(capsys.readouterr().out.split())
    data = {"reference": sampled, "model": sampled}
    assert all(f"r ({text})" in shown(table) for table in list(results.tables(data, ["mean"], ()))[:1])
    results.write(data, ["mean"], (), recipe("blank"), tmp_path)
    saved = json.loads((tmp_path / "results.json").read_text())["evaluated"]
    assert saved == {"prompts": 2, "samples": 2, "left_out": sampled.left_out}


def test_a_sweep_shows_the_sum_and_its_prompts(tmp_path, capsys):
    run_in(tmp_path / "lr=1", tasks(), tasks())
    point = sweep_state.Point({"optim.lr": 1e-5}, tmp_path / "lr=1", "done")
    sweep._show(sweep_state.SweepState(tmp_path, {"evaluation": {"ns": [1, 2]}}, [point]))
    text = " ".join(capsys.readouterr().out.split())
    assert "6.7500" in text
    assert "4 of 4" in text


def test_a_comparison_is_over_the_prompts_with_the_same_rewards(tmp_path, capsys):
    whole = samples_of({"a": [[1.0, 1.0], [2.0, 2.0]], "b": [[3.0, 3.0], [4.0, 4.0]]})
    half = samples_of({"a": [[2.0, 2.0], [3.0, 3.0]], "b": [[NAN, NAN], [5.0, 5.0]]})
    comparison.compare([run_in(tmp_path / "run", whole, half)], tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "6.0000" in text
    assert "8.0000" in text
    assert "1 of 2 prompts" in text


def test_a_reward_without_any_prompt_is_left_out_of_a_comparison(tmp_path, capsys):
    """The evaluation prompts have no task for it; the sum is that of the others, and says so."""
    sampled = samples_of({"a": [[1.0, 1.0], [2.0, 2.0]], "b": [[NAN, NAN], [NAN, NAN]]})
    comparison.compare([run_in(tmp_path / "run", sampled, sampled)], tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "1.5000" in text
    assert "b: 0 prompts" in text
    ungraded = samples_of({"a": [[NAN, NAN]] * 2, "b": [[NAN, NAN]] * 2})
    with pytest.raises(ValueError, match=r"no prompt has a weighted sum .* Of 2 prompts, the rewards score a on 0, b"):
        comparison.compare([run_in(tmp_path / "ungraded", ungraded, ungraded)], tmp_path)


def test_pictures_say_what_is_left_out():
    found = entries({"reference": tasks()}, ["mean", "bon:2"], ())
    looks = {"reference": figures.Style()}
    drawn = evaluation_figures.best_of_n(evaluation_figures.Table(found), looks)
    assert next(axes.get_title(loc="left") or axes.get_title() for axes in drawn.axes).endswith("\n2 of 4 prompts")
    histograms = figures.rewards({"reference": tasks()}, looks)
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in histograms.axes]
    assert titles[0] == "code\n6 completions without this reward"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ([Coverage(4, 4, 8, 8), Coverage()], ""),
        ([Coverage(4, 4, 8, 8), Coverage(8, 8, 16, 16)], ""),
        ([Coverage(4, 4, 8, 8), Coverage(3, 4, 5, 8)], "\n3 to 4 of 4 prompts"),
        ([Coverage(4, 4, 7, 8)] * 2, "\n7 of 8 samples"),
        ([Coverage(4, 4, 8, 8, {"code": 3, "math": 1})], "\ncode: 3 prompts, math: 1 prompts"),
    ],
)
def test_the_line_below_a_title(shown, text):
    assert left_out(shown) == text


def test_a_report_says_over_how_many_a_change_is(tmp_path, monkeypatch):
    """The value is over two prompts, and the change over the one that both have."""
    monkeypatch.setattr(figures, "picture", lambda draw: figures.Picture(b"", "", ""))
    before = samples_of({"r": [[0.0, 0.0], [10.0, 10.0], [NAN, NAN]]})
    after = samples_of({"r": [[1.0, 1.0], [NAN, NAN], [0.0, 0.0]]})
    page = report.write_report(run_in(tmp_path / "run", before, after)).read_text()
    assert "2 of 3 prompts, 4 of 6 samples" in page
    assert "1 of 3 prompts, 2 of 6 samples" in page
    assert "+1.0000 (1 of 3 prompts)" in page


def test_a_missing_reward_is_not_a_reward_of_0(tmp_path):
    """Two runs whose references differ in that alone have two references in a report."""
    missing, zero = samples_of({"r": [[NAN, 1.0]]}), samples_of({"r": [[0.0, 1.0]]})
    runs = [run_in(tmp_path / name, before, zero) for name, before in (("a", missing), ("b", zero))]
    found = run_loader.read_runs(runs)
    assert len(found.references) == 2
    assert len(run_loader.read_runs([runs[0], run_in(tmp_path / "c", missing, zero)]).references) == 1


def test_rollouts_are_summarized_over_the_samples_that_are_there():
    rewards = torch.tensor([[1.0, 2.0, 6.0, NAN], [4.0, 4.0, NAN, NAN], [NAN, NAN, 1.0, NAN], [3.0, 3.0, 3.0, 5.0]])
    found = rollout_tables.summarize("r", rewards.double())
    assert found.std_in_prompt == pytest.approx(np.mean([np.std(x, ddof=1) for x in ([1, 2, 6], [4, 4], [3, 3, 3, 5])]))
    assert found.zero_std == pytest.approx(1 / 3)
    assert found.ties == pytest.approx((0 + 1 + 3 / 6) / 3)
    assert (found.abstained, found.compared) == (6, 3)


def test_the_test_of_a_change_is_paired():
    before, after = rewards_of(seed=8), rewards_of(seed=9)
    before[0] = after[1] = NAN
    [_, entry] = [
        e
        for e in entries({"reference": samples_of({"r": before}), "model": samples_of({"r": after})}, ["mean"], ())
        if e.quantity == "r"
    ]
    values = [over_present(lambda x: procedure_value(x, parse("mean")), torch.tensor(x)) for x in (after, before)]
    mean, low, high, p = paired_test(values[0][2:], values[1][2:])
    assert (entry.change.value, entry.change.low, entry.change.high, entry.p_value) == (mean, low, high, p)


# --- what a run prints at its end -------------------------------------------------------------------------------------


def test_the_change_has_an_interval_that_is_paired_by_prompt():
    generator = torch.Generator().manual_seed(0)
    before = (torch.rand(40, 8, generator=generator) < 0.3).double()
    after = (torch.rand(40, 8, generator=generator) < 0.6).double()
    (one, four) = changes(samples_of({"r": before.tolist()}), samples_of({"r": after.tolist()}), (1, 4))
    differences = after.mean(1) - before.mean(1)
    value, low, high = (x.item() for x in bootstrap(differences))
    assert (one.value, one.low, one.high) == pytest.approx((value, low, high))
    assert one.interval == f"[{low:+.4f}, {high:+.4f}]"
    error = differences.std().item() / 40**0.5
    assert high - low == pytest.approx(2 * 2.02 * error, rel=0.15)  # Student's t for 39 degrees of freedom
    pairs = best_of_n(after, [4])[0] - best_of_n(before, [4])[0]
    assert (four.low, four.high) == pytest.approx(tuple(x.item() for x in bootstrap(pairs)[1:]))


@pytest.mark.parametrize(
    ("objective", "first", "second"), [("bon:4", "pass@4", "pass@1"), ("mean", "pass@1", "pass@4")]
)
def test_the_end_of_a_run_names_the_change_of_what_was_trained(objective, first, second):
    before = samples_of({"r": [[0.0, 0.0, 1.0, 0.0]] * 9 + [[1.0, 1.0, 0.0, 0.0]]}, objectives={"r": objective})
    after = samples_of({"r": [[1.0, 0.0, 1.0, 0.0]] * 9 + [[1.0, 1.0, 1.0, 0.0]]}, objectives={"r": objective})
    line = what_changed(before, after, (1, 4))
    assert line.index(first) < line.index(second)
    assert "pass@1 +0.2500 [+0.2500, +0.2500]" in line
    assert line.endswith(" (95%, paired by prompt)")
    other = what_changed(before, after, (2, 3))  # the trained N was not evaluated
    assert other.index("pass@2") < other.index("pass@3")
    one = [samples_of({"r": [row]}, objectives={"r": objective}) for row in ([0.0, 0.0], [1.0, 0.0])]
    assert what_changed(*one, (1,)) == "r: pass@1 +0.5000"  # no interval
    diverse = samples_of({"r": [[1.0, 2.0]]}, objectives={"r": "rao"})
    assert what_changed(diverse, diverse, (4,)) == "no reward has a value for N = 4"
    nothing = samples_of({"r": [[NAN, NAN, NAN, NAN]] * 10}, objectives={"r": objective})
    assert what_changed(before, nothing, (1, 4)) == "r: no prompt has a value before and after training"
