"""Loading of complete, unfinished and damaged runs, evaluations and sweeps, and grouping of runs."""

import itertools
import json
import math
from dataclasses import asdict

import pytest
import torch

from nlgrpo.apps.report import configurations, run_loader
from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, write_evaluation
from nlgrpo.training.evaluation_entries import entries


def sampled(seed=0, prompts=4, n=5, names=("a", "b"), objective="bon:4", weights=(0.5, 0.5)):
    generator = torch.Generator().manual_seed(seed)
    rewards = {name: torch.randn(prompts, n, generator=generator).double() for name in names}
    lengths = torch.randint(1, 30, (prompts, n), generator=generator)
    objectives = dict.fromkeys(names, objective)
    return EvaluationSamples(
        rewards, lengths, objectives, dict(zip(names, weights, strict=False)), 32, ["p"], [["c"] * n]
    )


def make_run(folder, before=0, after=1, config=None, kl=0.25, **options):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"loss": {"beta": 0.1}}))
    lines = [{"step": i, "kl": kl * (i > 90), "completions/mean_length": 8.0, "entropy": 1.0} for i in range(100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_evaluation(folder, before=sampled(before, **options), after=sampled(after, **options))
    return folder


def make_evaluation(folder, models=("one", "two"), results=True, samples=True, **options):
    folder.mkdir(parents=True)
    found = {name: sampled(seed, **options) for seed, name in enumerate(["reference", *models], start=10)}
    rows = entries(found, ["mean", "bon:2", "wor:2"], ["b"])
    if results:
        content = {"nlgrpo": "0.1", "torch": "2", "config": {"x": 1}, "results": [asdict(row) for row in rows]}
        text = json.dumps(content).replace("NaN", "null")
        (folder / "results.json").write_text(text if results is True else results)
    if samples:
        write_evaluation(folder, **found)
    return folder


def only(entries, model, quantity, procedure):
    (entry,) = [e for e in entries if (e.model, e.quantity, e.procedure) == (model, quantity, procedure)]
    return entry


def test_best_of_n_is_the_mean_over_all_subsets(tmp_path):
    found = run_loader.read_runs([make_run(tmp_path / "run")])
    for label, seed in (("reference", 0), ("run", 1)):
        for name, rewards in sampled(seed).rewards.items():
            subsets = [max(s) for row in rewards.tolist() for s in itertools.combinations(row, 4)]
            entry = only(found.entries, label, name, "bon:4")
            assert entry.estimate.value == pytest.approx(sum(subsets) / len(subsets))
        sums = sum(
            0.5 * max(s)
            for r in sampled(seed).rewards.values()
            for row in r.tolist()
            for s in itertools.combinations(row, 2)
        )
        assert only(found.entries, label, "weighted sum", "bon:2").estimate.value == pytest.approx(sums / 40)
    assert only(found.entries, "run", "a", "bon:4").change.value == pytest.approx(
        only(found.entries, "run", "a", "bon:4").estimate.value
        - only(found.entries, "reference", "a", "bon:4").estimate.value
    )
    assert {e.procedure for e in found.entries if e.quantity == "a"} == {"mean", "bon:2", "bon:4"}  # 5 samples
    assert found.notes == []


def test_kl_of_a_run_is_per_completion_at_the_end(tmp_path):
    found = run_loader.read_runs([make_run(tmp_path / "run", kl=0.25)])
    entry = only(found.entries, "run", run_loader.TRAINING_KL, "")
    assert entry.estimate.value == pytest.approx(0.25 * 8 * 0.9)  # 9 of the last 10 steps
    assert math.isnan(entry.estimate.low)
    assert found.models[0].logged.metrics.keys() == {"kl", "completions/mean_length", "entropy"}


def test_runs_from_the_same_model_share_a_reference(tmp_path):
    folders = [make_run(tmp_path / name, before=b, after=a) for name, b, a in (("x", 0, 1), ("y", 0, 2), ("z", 3, 4))]
    found = run_loader.read_runs(folders)
    assert list(found.references) == ["reference", "reference of z"]
    assert [m.reference for m in found.models] == ["reference", "reference", "reference of z"]
    assert len([e for e in found.reference_entries if e.model == "reference" and e.quantity == "a"]) == 3


def test_runs_with_the_same_name_are_labelled_by_folder(tmp_path):
    folders = [make_run(tmp_path / "a" / "x"), make_run(tmp_path / "b" / "x")]
    found = run_loader.read_runs(folders)
    assert [m.label for m in found.models] == ["x", "b/x"]
    assert len({m.label for m in run_loader.read_runs([*folders, folders[0]]).models}) == 3


def test_rows_of_an_evaluation_are_unchanged(tmp_path):
    found = run_loader.read_runs([make_evaluation(tmp_path / "ev")])
    rows = entries(
        {name: sampled(seed) for seed, name in enumerate(("reference", "one", "two"), start=10)},
        ["mean", "bon:2", "wor:2"],
        ["b"],
    )
    same = [e for e in found.entries if e.quantity != "weighted sum"]
    assert repr(same) == repr(rows)  # NaN != NaN
    assert found.settings["ev"] == run_loader.Settings({"x": 1}, {"nlgrpo": "0.1", "torch": "2"})
    assert [m.name for m in found.models] == ["one", "two"]


@pytest.mark.parametrize(
    ("options", "message", "entries"),
    [
        ({"results": "{"}, "results.json cannot be read", True),
        ({"results": '{"results": [{"model": "one"}]}'}, "results.json cannot be read", True),
        ({"results": "[]"}, "results.json cannot be read", True),
        ({"results": False}, "results.json cannot be read", True),
        ({"samples": False}, "histograms and completions are left out", True),
        ({"results": "{", "samples": False}, "histograms and completions are left out", False),
    ],
)
def test_evaluation_with_missing_files(tmp_path, options, message, entries):
    found = run_loader.read_runs([make_evaluation(tmp_path / "ev", **options)])
    assert any(message in note for note in found.notes)
    assert bool(found.entries) == entries
    if entries:
        assert only(found.entries, "one", "a", "bon:2").change is not None


def test_a_run_and_an_evaluated_model_of_the_same_name_have_different_labels(tmp_path):
    found = run_loader.read_runs([make_run(tmp_path / "one"), make_evaluation(tmp_path / "ev")])
    assert [(m.label, m.name) for m in found.models] == [("one", "one"), ("one · ev", "one"), ("two", "two")]
    assert {e.model for e in found.reference_entries} == {"reference", "reference of ev"}
    assert all(e.model == "one · ev" for e in found.models[1].entries)


def test_weighted_sums_need_equal_weights(tmp_path):
    runs = [make_run(tmp_path / "x"), make_run(tmp_path / "y", weights=(0.1, 0.9))]
    assert not [e for e in run_loader.read_runs(runs).entries if e.quantity == "weighted sum"]


def test_all_points_of_a_sweep_are_loaded(tmp_path):
    states = {"done": "done", "failed": "failed", "waiting": "waiting"}
    make_run(tmp_path / "done")
    points = [sweep_state.Point({"loss.beta": 0.1}, tmp_path / name, state) for name, state in states.items()]
    points[1].error = "error: out of memory"
    sweep_state.SweepState(tmp_path, {"recipe": "x"}, points).write()
    found = run_loader.read_runs([tmp_path])
    assert {m.label: m.state for m in found.models} == states
    assert "failed failed: error: out of memory" in found.notes
    assert only(found.entries, "done", "a", "bon:2")
    (tmp_path / "sweep.json").write_text("{")
    assert "sweep.json cannot be read" in run_loader.read_runs([tmp_path]).notes[0]


def test_samples_that_cannot_be_compared_are_noted(tmp_path):
    run = make_run(tmp_path / "run")
    write_evaluation(run, before=sampled(prompts=3), after=sampled(prompts=4))
    found = run_loader.read_runs([run])
    assert any("before and after training; they are not compared" in note for note in found.notes)
    assert {e.model for e in found.entries if e.quantity == "a"} == {"run"}
    write_evaluation(run, before=sampled(names=("a", "c")), after=sampled())
    assert any("before and after training; they are not compared" in note for note in run_loader.read_runs([run]).notes)
    ev = make_evaluation(tmp_path / "ev", results=False)
    write_evaluation(ev, reference=sampled(prompts=3), one=sampled())
    assert run_loader.read_runs([ev]).models[0].state == "evaluated"


def test_objectives_that_would_run_code_are_not_evaluated(tmp_path):
    run = make_run(tmp_path / "run", objective="distortion:evil.py:f")
    found = run_loader.read_runs([run])
    assert {e.procedure for e in found.entries if e.quantity == "a"} == {"mean", "bon:2", "bon:4"}
    worst = run_loader.read_runs([make_run(tmp_path / "worst", objective="wor:2")])
    assert only(worst.entries, "worst", "a", "wor:4").win_rate is not None


# --- what differs -----------------------------------------------------------------------------------------------------


def config(beta=0.1, objective="bon:4", weight=0.5, seed=0, out="x"):
    rewards = {name: {"objective": objective, "weight": w} for name, w in (("a", weight), ("b", 1 - weight))}
    return {"rewards": rewards, "loss": {"beta": beta}, "train": {"seed": seed, "out": out}}


def test_columns_are_the_keys_that_differ():
    configs = {"x": config(out="1"), "y": config(out="2", beta=0.2, objective="mean"), "z": {}}
    assert configurations.differing(configs) == {
        "rewards.a.objective, rewards.b.objective": {"x": "bon:4", "y": "mean"},
        "loss.beta": {"x": "0.1", "y": "0.2"},
    }
    assert configurations.differing({"x": config()}) == {}


def test_lines_run_over_the_setting_with_the_most_values():
    betas = {f"{o} {b}": config(beta=b, objective=o) for o in ("mean", "bon:4") for b in (0.1, 0.2, 0.3)}
    places = configurations.places(betas)
    assert {places[label].line for label in betas} == {"mean over beta", "bon:4 over beta"}
    assert places["mean 0.2"] == configurations.Place("mean over beta", 0.2, "beta 0.2")
    over_n = configurations.places(
        {str(n): config(objective=f"bon:{n}") for n in (2, 4)} | {"mean": config(objective="mean")}
    )
    assert over_n == {str(n): configurations.Place("bon over N", n, f"bon:{n}") for n in (2, 4)}
    weights = configurations.places({str(w): config(weight=w) for w in (0.2, 0.5)})
    assert weights["0.2"] == configurations.Place("bon:4 over weight", 0.2, "weight 0.2")
    assert configurations.places({"x": config(), "y": config(out="y")}) == {}


def test_seeds_have_lines_of_their_own():
    places = configurations.places({f"{b} {s}": config(beta=b, seed=s) for b in (1, 2, 3) for s in (0, 1)})
    assert {place.line for place in places.values()} == {f"bon:4 over beta, train.seed={s}" for s in (0, 1)}
