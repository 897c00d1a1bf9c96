"""The report of a reward model, a value model, a loop of value models, and a comparison of decoding methods."""

import json

import pytest
import torch
from support.reports import EVIL, make_run, read_page, write_lines

from nlgrpo import cli
from nlgrpo.apps.guided.value_config import CompressConfig, ValueConfig
from nlgrpo.apps.report import recorded_tables, run_loader
from nlgrpo.apps.report.live_report import LiveReport
from nlgrpo.apps.report.report import write_report
from nlgrpo.apps.reward_model.config import RewardModelConfig
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.losses.bradley_terry import evaluate_pairs

BEFORE = {
    "states": 40,
    "mse": 2.0,
    "explained_variance": -1.0,
    "parts": [{"states": 8, "mse": 2.0, "explained_variance": -1.0}] * 5,
}
AFTER = {
    "states": 40,
    "mse": 0.5,
    "explained_variance": 0.5,
    "parts": [{"states": 8, "mse": 0.5, "explained_variance": 0.1 * i} for i in range(5)],
}
ITERATION = {
    "prompts": 4, "samples": 8, "scored": 32, "explained_variance": 0.25, "value": "iteration-1/value", "beta": 1.0,
    "mean": {"value": 0.5, "error": 0.1, "prompts": 4}, "best": {"value": 0.75, "error": 0.0, "prompts": 4},
    "distinct_prefixes": {"4": 2.0, "16": 8.0},
}  # fmt: skip
METHOD = {
    "budget": 4, "prompts": ["a", "b"], "rewards": [0.0, 1.0], "unscored": {}, "tokens": 200, "queries": 6,
    "reward_queries": 8, "seconds": 0.5, "value_bytes": 1 << 20, "cache_bytes": 0, "mean": [0.5, 0.0, 1.0],
    "mean_prompts": 2,
}  # fmt: skip


ZERO = json.dumps([METHOD | {"method": "bon", "rewards": []}])
ODD = json.dumps([METHOD | {"method": 5}])
# sections of a configuration that tell its command
DATA = {"reward_model.json": {"chosen_column": "chosen"}, "value.json": {"rollouts": ["runs/x"]}}


def trained(folder, file, content, steps=3):
    """A run of a command that trains a model with one output."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": folder.name, "data": DATA[file], "train": {"epochs": 1.0}}))
    write_lines(folder / "metrics.jsonl", [{"step": i, "loss": 1.0 / (i + 1)} for i in range(steps)])
    (folder / file).write_text(json.dumps(content))
    return folder


def test_a_reward_model(tmp_path):
    before = evaluate_pairs(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0]))
    after = evaluate_pairs(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0]))
    run = trained(tmp_path / "rm", "reward_model.json", {"before": before, "after": after})
    page = read_page(write_report(run))
    [table] = page.tables
    assert table[0] == ["", "before", "after"]
    assert table[1][0] == "accuracy"
    assert table[1][1].startswith("0.667 [")
    assert table[1][2].startswith("1.000 [")
    assert "3 held-out pairs (95% intervals)." in page.text
    assert "evaluation.json" not in page.text
    assert "Training curves" in page.text


def test_a_run_that_is_not_finished_says_so(tmp_path):
    page = read_page(write_report(trained(tmp_path / "value", "value.json", {"before": BEFORE})))
    assert "value.json has no final results yet." in page.text
    assert page.tables == []


def test_a_run_without_held_out_examples_has_no_table(tmp_path):
    text = read_page(write_report(trained(tmp_path / "rm", "reward_model.json", {"before": {}, "after": {}}))).text
    assert "reward_model.json" not in text
    assert "evaluation.json" not in text


def loop(folder):
    """What `nlgrpo iro` writes, as far as the report reads it; with 11 iterations, which sort as numbers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"recipe": "x"}))
    (folder / "iro.json").write_text(json.dumps([{"iteration": i} | ITERATION for i in (1, 2)]))
    for i in (1, 2, 11):
        trained(folder / f"iteration-{i}" / "value", "value.json", {"before": BEFORE, "after": AFTER})
    return folder


def test_a_loop_of_value_models(tmp_path):
    page = read_page(write_report(loop(tmp_path / "iro")))
    iterations, first, *_, models = page.tables
    assert iterations[1:] == [
        [str(i), "4 x 8", "0.5000 ± 0.1000", "0.7500 ± 0.0000", "0.250", "2.0 to 8.0"] for i in (1, 2)
    ]
    assert first[1] == ["mean squared error", "2.0000", "0.5000"]
    assert [row[0].strip() for row in models[1:]] == [f"iro/iteration-{i}/value" for i in (1, 2, 11)]
    assert {row[1] for row in models[1:]} == {"finished"}


def test_a_comparison_of_methods(tmp_path):
    rows = [METHOD | {"method": "bon"}, METHOD | {"method": f"cards:{EVIL}", "over_bon": [0.25, -0.5, 1.0]}]
    (tmp_path / "decode.json").write_text(json.dumps(rows))
    page = read_page(write_report(tmp_path, tmp_path / "page.html"))
    methods, cost = page.tables
    assert methods[1] == ["bon", "4", "0.5000 [0.0000, 1.0000]", "-"]
    assert methods[2][3] == "+0.2500 [-0.5000, +1.0000]"
    assert cost[1][:6] == ["bon", "4", "100", "3", "4", "0.250"]
    assert "2 prompts (95% intervals)." in page.text
    assert not any("alert" in script for script in page.scripts)


def test_a_run_with_results_of_a_comparison_is_still_a_run(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "decode.json").write_text(json.dumps([METHOD | {"method": "bon"}]))
    page = read_page(write_report(run))
    assert "Result" in page.text
    assert "Methods" in page.text


def test_a_search_without_results_says_that_it_has_not_finished(tmp_path):
    folder = loop(tmp_path / "iro")
    (folder / "iro.json").unlink()
    assert "the search is running, or was stopped" in read_page(write_report(folder)).text
    (tmp_path / "decode" / "ways").mkdir(parents=True)
    assert "the search is running, or was stopped" in read_page(write_report(tmp_path / "decode")).text


def test_a_run_before_its_first_evaluation_has_no_wrong_note(tmp_path):
    run = trained(tmp_path / "rm", "reward_model.json", {})
    (run / "reward_model.json").unlink()
    assert "evaluation.json" not in read_page(write_report(run)).text


def test_value_models_of_a_loop_have_different_colours(tmp_path):
    found = run_loader.read_runs([loop(tmp_path / "iro")])
    assert len({model.name for model in found.models}) == len(found.models) == 3


def test_parts_of_a_cell_are_apart(tmp_path):
    row = {"iteration": 1} | ITERATION | {"scored": 24, "mean": {"value": 0.5, "error": 0.1, "prompts": 3}}
    (tmp_path / "iro.json").write_text(json.dumps([row]))
    [table] = read_page(write_report(tmp_path, tmp_path / "page.html")).tables
    assert table[1][2] == "0.5000 ± 0.1000 3 of 4 prompts, 24 of 32 samples"


def test_files_have_the_names_that_commands_write():
    from nlgrpo.apps.guided import decoding, value_loop
    from nlgrpo.apps.guided.value_training import ValueTrainer
    from nlgrpo.apps.reward_model.training import RewardModelTrainer

    written = [RewardModelTrainer.RESULTS, ValueTrainer.RESULTS, value_loop.RESULTS, decoding.RESULTS]
    assert list(recorded_tables.READERS) == written


@pytest.mark.parametrize(
    ("config", "command"),
    [
        (RewardModelConfig(), "reward-model train"),
        (ValueConfig(), "value train"),
        (ValueConfig(compress=CompressConfig(values=("a",))), "value compress"),
        (Config(), "train"),
    ],
)
def test_the_command_of_a_configuration(config, command):
    assert recorded_tables.command_of(json.loads(json.dumps(to_dict(config), default=str))) == command


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"after": 1}', '[{"method": "bon"}]', "null", '[{"method": 5}]', ZERO, ODD]
)
@pytest.mark.parametrize("file", ["reward_model.json", "value.json", "iro.json", "decode.json"])
def test_a_damaged_file_is_named(tmp_path, file, content):
    run = trained(tmp_path / "run", "value.json", {"before": BEFORE, "after": AFTER})
    (run / file).write_text(content)
    page = read_page(write_report(run))
    assert file in page.text


def test_several_kinds_on_one_page(tmp_path, capsys):
    trained(tmp_path / "value", "value.json", {"before": BEFORE, "after": AFTER})
    loop(tmp_path / "iro")
    out = tmp_path / "all.html"
    assert cli.main(["report", f"first={tmp_path / 'value'}", str(tmp_path / "iro"), "--out", str(out)]) == 0
    text = read_page(out).text
    assert "first: Held-out values" in text
    assert "iro: Iterations" in text


def test_watch_follows_the_value_models_of_a_loop(tmp_path):
    folder = loop(tmp_path / "iro")
    live = LiveReport([folder], tmp_path)
    assert live.update()
    assert not live.update()
    assert live.lines()[0].startswith("iro/iteration-1/value: step 3, logged")
    write_lines(folder / "iteration-2" / "value" / "metrics.jsonl", [{"step": 0, "loss": 1.0}])
    assert live.update()
