"""`nlgrpo compare` over seeds, and the figures of rewards that are 0 or 1."""

import json
import math

import pytest
import torch
from matplotlib import pyplot as plt
from support.reports import read_page

from nlgrpo.apps.report import compare as comparison
from nlgrpo.apps.report import report, run_loader, success_figures
from nlgrpo.data import mazes
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation
from nlgrpo.estimators import paired_test, pass_at_k, two_way_interval
from nlgrpo.training.evaluation_summary import binary_rewards

PROMPTS, SAMPLES = 12, 8


def samples_of(correct, prompts=(), completions=(), objective="mean"):
    return EvaluationSamples(
        rewards={"solved": correct.double()},
        lengths=torch.full(correct.shape, 5),
        objectives={"solved": objective},
        weights={"solved": 1.0},
        max_length=40,
        prompts=list(prompts),
        completions=[list(rows) for rows in completions],
    )


def drawn(rate, seed):
    """Successes (P, n) whose rate differs by prompt."""
    generator = torch.Generator().manual_seed(seed)
    rates = rate * torch.linspace(0.1, 1.5, PROMPTS)[:, None]
    return (torch.rand(PROMPTS, SAMPLES, generator=generator) < rates).double()


def run_in(folder, seed, objective="mean", rate=0.4, **evaluated):
    """Folder of a run with successes before and after training."""
    folder.mkdir(parents=True)
    config = {
        "recipe": "maze",
        "rewards": {"solved": {"function": "maze()", "objective": objective}},
        "train": {"seed": seed, "out": str(folder)},
        "evaluation": {"prompts": PROMPTS},
    }
    (folder / "config.json").write_text(json.dumps(config))
    found = {"before": samples_of(drawn(0.3, seed + 50)), "after": samples_of(drawn(rate, seed), objective=objective)}
    write_evaluation(folder, **found | evaluated)
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two settings with three seeds each."""
    settings = (("mean", 0.35, 0), ("bon:8", 0.5, 10))
    return [
        run_in(tmp_path / f"objective={objective},seed={seed}", first + seed, objective, rate)
        for objective, rate, first in settings
        for seed in range(3)
    ]


def seeds_of(runs, objective, n):
    rate = 0.35 if objective == "mean" else 0.5
    found = [run for run in runs if f"={objective}," in run.name]
    seeds = [json.loads((run / "config.json").read_text())["train"]["seed"] for run in found]
    return torch.stack([pass_at_k(drawn(rate, seed), [n])[0] for seed in seeds])


def test_runs_that_differ_in_the_seed_are_one_setting(runs, tmp_path, capsys):
    comparison.compare(runs, tmp_path)
    text = capsys.readouterr().out
    shown = " ".join(text.split())
    assert "mean (GRPO), 3 seeds" in shown
    assert "bon:8, 3 seeds" in shown
    for objective in ("mean", "bon:8"):
        value, low, high, _ = two_way_interval(seeds_of(runs, objective, 4))
        assert f"{value:.4f}" in shown
        assert f"[{low:.4f}, {high:.4f}]" in shown


def test_settings_of_other_seeds_are_tested_over_prompts_only(runs, tmp_path, capsys):
    """The seeds of both settings are 0 to 2 and 10 to 12: no pairs."""
    comparison.compare(runs, tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    ours, theirs = (seeds_of(runs, objective, 8).mean(0) for objective in ("mean", "bon:8"))
    mean, low, high, _ = paired_test(ours, theirs)
    assert f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" in shown
    assert "prompts, 3 seeds" not in shown


def test_settings_of_the_same_seeds_are_paired_by_seed(tmp_path, capsys):
    runs = [
        run_in(tmp_path / f"{objective}-{seed}", seed, objective, rate)
        for objective, rate in (("mean", 0.35), ("bon:8", 0.5))
        for seed in range(3)
    ]
    comparison.compare(runs, tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    ours, theirs = (torch.stack([pass_at_k(drawn(rate, seed), [2])[0] for seed in range(3)]) for rate in (0.35, 0.5))
    mean, low, high, _ = two_way_interval(ours - theirs)
    assert f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" in shown
    assert "prompts, 3 seeds" in shown


def test_a_weight_or_a_score_is_no_pass_at_n(tmp_path, capsys):
    halved = samples_of(drawn(0.4, 1))
    halved.weights["solved"] = 0.5
    run = run_in(tmp_path / "halved", 0, before=halved, after=halved)
    comparison.compare([run], tmp_path)
    assert "weighted sum of best-of-N rewards (12 prompts" in " ".join(capsys.readouterr().out.split())
    comparison.compare([run_in(tmp_path / "plain", 0)], tmp_path)
    assert "pass@N of solved (12 prompts x 8 samples, 95% intervals)" in " ".join(capsys.readouterr().out.split())


# --- reports over seeds -----------------------------------------------------------------------------------------------


def test_a_report_joins_the_seeds_of_a_setting(runs):
    found = run_loader.read_runs(runs)
    assert [model.label for model in found.models] == ["objective=mean, 3 seeds", "objective=bon:8, 3 seeds"]
    assert set(found.settings) == {model.label for model in found.models}
    assert found.settings["objective=bon:8, 3 seeds"].config["train"]["seed"] == [10, 11, 12]
    for model, objective, first, rate in zip(found.models, ("mean", "bon:8"), (0, 10), (0.35, 0.5), strict=True):
        entries = {(entry.quantity, entry.procedure): entry for entry in model.entries}
        for n, procedure in ((1, "mean"), (4, "bon:4")):
            after = seeds_of(runs, objective, n)
            before = torch.stack([pass_at_k(drawn(0.3, seed + 50), [n])[0] for seed in range(first, first + 3)])
            entry = entries["solved", procedure]
            truth = two_way_interval(after)
            assert (entry.estimate.value, entry.estimate.low, entry.estimate.high) == pytest.approx(truth[:3])
            mean, low, high, p_value = two_way_interval(after - before)
            assert (entry.change.value, entry.change.low, entry.change.high) == pytest.approx((mean, low, high))
            assert entry.p_value == pytest.approx(p_value)
        correct = torch.cat([drawn(rate, seed) for seed in range(first, first + 3)])
        assert torch.equal(model.sampled.rewards["solved"], correct)
        assert model.sampled.size == f"{PROMPTS} prompts x {SAMPLES} samples"
        assert entries["solved", "mean"].estimate.coverage.lines == []


def test_labels_of_a_report_name_runs_and_settings(runs):
    found = run_loader.read_runs([f"A={runs[0]}", *(f"B={run}" for run in runs[3:]), runs[1]])
    assert [model.label for model in found.models] == ["A", "B, 3 seeds", "objective=mean,seed=1"]
    apart = run_loader.read_runs([f"B={run}" for run in runs[3:]], join_seeds=False)
    assert [model.label for model in apart.models] == ["B", "B (2)", "B (3)"]


@pytest.mark.slow
def test_a_report_tests_settings_against_each_other(tmp_path):
    runs = [
        run_in(tmp_path / f"objective={objective},seed={seed}", seed, objective, rate)
        for objective, rate in (("mean", 0.35), ("bon:8", 0.5))
        for seed in range(3)
    ]
    page = read_page(report.write_report(runs, tmp_path / "report.html"))
    ours, theirs = (torch.stack([pass_at_k(drawn(rate, seed), [2])[0] for seed in range(3)]) for rate in (0.35, 0.5))
    mean, low, high, _ = two_way_interval(ours - theirs)
    (table,) = [table for table in page.tables if table[0] == ["N", "less", "difference", "p", "over"]]
    (row,) = [row for row in table[1:] if row[0] == "2"]
    assert row[1:3] == ["objective=bon:8, 3 seeds", f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"]
    assert row[4] == "prompts, 3 seeds"
    assert "objective=mean, 3 seeds less each other model" in page.text
    one = read_page(report.write_report(runs[0], tmp_path / "one.html"))
    assert "less each other model" not in one.text


def test_runs_that_cannot_be_joined_stay_apart(runs, tmp_path):
    """An unfinished run, one with other prompts, one whose configuration is lost, and a repeated seed."""
    (runs[0] / "evaluation.json").unlink()
    fewer = {"before": samples_of(drawn(0.3, 1)[:5]), "after": samples_of(drawn(0.4, 1)[:5])}
    other = run_in(tmp_path / "objective=bon:8,seed=13", 13, "bon:8", **fewer)
    again = run_in(tmp_path / "again", 1)
    (runs[2] / "config.json").unlink()
    found = run_loader.read_runs([*runs[:3], again])
    assert len(found.models) == 4
    assert [model.label for model in found.models if model.by_seed] == []
    assert len(run_loader.read_runs([*runs[3:], other]).models) == 4


def test_the_reference_of_an_evaluation_without_models_is_kept(runs, tmp_path):
    (tmp_path / "evaluation").mkdir()
    write_evaluation(tmp_path / "evaluation", reference=samples_of(drawn(0.3, 7)))
    found = run_loader.read_runs([tmp_path / "evaluation"])
    assert list(found.references) == ["reference"]
    assert found.reference_entries
    assert len(run_loader.read_runs([tmp_path / "evaluation", *runs]).references) == 3


def test_runs_on_other_prompts_or_numbers_of_samples_are_not_joined(tmp_path):
    texts = [f"prompt {number}" for number in range(PROMPTS)]
    alike = {when: samples_of(drawn(0.4, 1), texts) for when in ("before", "after")}
    other = {when: samples_of(drawn(0.4, 1), texts[::-1]) for when in ("before", "after")}
    fewer = {when: samples_of(drawn(0.4, 1)[:, :4], texts) for when in ("before", "after")}
    first = run_in(tmp_path / "seed=0", 0, **alike)
    assert len(run_loader.read_runs([first, run_in(tmp_path / "seed=1", 1, **other)]).models) == 2
    assert len(run_loader.read_runs([first, run_in(tmp_path / "seed=2", 2, **fewer)]).models) == 2
    assert len(run_loader.read_runs([first, run_in(tmp_path / "seed=3", 3, **alike)]).models) == 1


def test_curves_of_a_setting_are_means_over_seeds(runs):
    for number, run in enumerate(runs[:3]):
        rows = [{"step": step, "reward": number + step, "kl": None if number else 0.5} for step in range(4 - number)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (model, *_) = run_loader.read_runs(runs).models
    assert model.logged.steps.tolist() == [0, 1]
    assert {name: values.tolist() for name, values in model.logged.metrics.items()} == {"reward": [1.0, 2.0]}


def test_labels_name_runs_whose_folders_have_an_equals_sign(runs, tmp_path, capsys):
    comparison.compare([f"ours={runs[3]}", runs[0]], tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    assert "ours less the others" in shown
    assert "mean (GRPO)" in shown


def test_the_picture_of_a_binary_reward_shows_solved_prompts(runs, tmp_path, monkeypatch):
    figures = []
    draw = success_figures.comparison
    monkeypatch.setattr(success_figures, "comparison", lambda *a: figures.append(draw(*a)) or figures[-1])
    comparison.compare(runs, tmp_path / "picture.png")
    left, right = figures[0].axes
    assert left.get_title(loc="left") == "Prompts by the share of their samples that are right"
    assert right.get_ylabel() == "pass@N"
    assert len(right.lines) == 3
    plt.close("all")


# --- prompts by their successes ---------------------------------------------------------------------------------------


def test_prompts_are_grouped_by_the_share_of_right_samples():
    rows = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, math.nan, math.nan, math.nan]]
    rows += [[1, math.nan, math.nan, math.nan], [math.nan] * 4]
    found = success_figures.shares_of_prompts(torch.tensor(rows))
    assert found == pytest.approx([2 / 7, 1 / 7, 1 / 7, 1 / 7, 0, 2 / 7])
    more = torch.tensor([[1.0] * 9 + [0.0]])
    assert success_figures.shares_of_prompts(more) == [0, 0, 0, 0, 1, 0]
    assert sum(success_figures.shares_of_prompts(drawn(0.5, 0))) == pytest.approx(1)


def test_only_rewards_of_0_and_1_are_binary():
    binary = samples_of(drawn(0.5, 0))
    other = samples_of(drawn(0.5, 1))
    other.rewards["score"] = torch.rand(PROMPTS, SAMPLES)
    assert binary_rewards({"a": binary, "b": other}) == ["solved"]
    binary.rewards["solved"][0, 0] = 0.5
    assert binary_rewards({"a": binary, "b": other}) == []
    assert binary_rewards({"a": samples_of(torch.full((2, 2), math.nan))}) == []


# --- walks ------------------------------------------------------------------------------------------------------------

SMALL = (
    "WALL WALL WALL WALL WALL NEWLINE WALL START WALL GOAL WALL NEWLINE WALL PATH PATH PATH WALL NEWLINE "
    "WALL WALL WALL WALL WALL NEWLINE"
)
RIGHT, WRONG = "DOWN RIGHT RIGHT UP DONE", "DOWN RIGHT UP DONE"


def test_mazes_that_are_solved_in_a_third_of_the_samples_are_shown():
    texts = [maze.text() for maze, _ in zip(mazes.draw(2, 0, "train", shortest=1), range(2), strict=False)]
    prompts = [*texts, SMALL]
    answers = [[WRONG] * 3, [""] * 3, [RIGHT, WRONG, WRONG]]
    models = {"reference": samples_of(torch.zeros(3, 3), prompts, answers)}
    assert success_figures.maze_prompts(models)[0] == 2
    assert len(success_figures.maze_prompts(models)) == 2
    assert success_figures.maze_prompts({"reference": samples_of(torch.zeros(1, 1), ["a text"], [["b"]])}) == []
    assert success_figures.maze_prompts({}) == []


@pytest.mark.parametrize("narrow", [False, True])
def test_walks_stop_at_the_first_wall(narrow):
    answers = [[RIGHT, RIGHT, WRONG, "", "JUMP", "DOWN RIGHT RIGHT UP"]]
    model = samples_of(torch.zeros(1, 6), [SMALL], answers)
    figure = success_figures.walks({"reference": model, "trained": model}, [0], narrow=narrow)
    axes = figure.axes[0]
    assert axes.get_title() == "reference\n2 of 6 right, 5 different walks"
    walked = [line.get_xydata() for line in axes.lines if len(line.get_xydata()) > 1]
    assert [len(walk) for walk in walked] == [5, 5, 3, 5]
    ends = [line for line in axes.lines if line.get_marker() == "x"]
    assert len(ends) == 4
    shift = walked[0][0, 0] - 1
    assert walked[0][-1].tolist() == pytest.approx([3 + shift, 1 + shift])
    assert [text.get_text() for text in axes.texts] == ["S", "G"]
    plt.close("all")


@pytest.mark.slow
def test_a_report_of_mazes_has_both_pictures(tmp_path):
    correct = torch.tensor([[1.0, 0.0]])
    model = samples_of(correct, [SMALL], [[RIGHT, WRONG]])
    run = run_in(tmp_path / "run", 0, before=model, after=model)
    page = read_page(report.write_report(run))
    assert {"#solved-prompts", "#walks"} <= set(page.urls)
    assert (run / "walks.png").is_file()
    assert (run / "successes.png").is_file()
