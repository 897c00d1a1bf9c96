"""The table at the end of a run of the recipe `maze`: pass@k before and after, beside the recorded figures of GRPO."""

import io
import json
from importlib.resources import files

import pytest
import torch
from rich.console import Console

from nlgrpo.config.recipes import recipe
from nlgrpo.config.schema import to_dict
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples
from nlgrpo.training.evaluation_summary import RECORDED, before_after_table, recorded_for, summarize


def samples_of(rewards, objective="bon:8:unbiased"):
    return EvaluationSamples(
        rewards={"solved": rewards.double()},
        lengths=torch.full(rewards.shape, 5),
        objectives={"solved": objective},
        weights={"solved": 1.0},
        max_length=40,
    )


def half_solved(prompts=128, samples=256):
    return samples_of((torch.arange(prompts)[:, None] % 2).expand(prompts, samples))


def shown(table, width=80):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["maze", "maze-grpo"])
def test_the_recorded_figures_belong_to_the_maze_recipes(name):
    found = recorded_for(to_dict(recipe(name)))
    assert list(found.values) == [1, 8, 64, 256]
    for value, low, high in found.values.values():
        assert 0 < low < value < high < 1


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"path": "other"}},
        {"data": {"evaluation": "maze-long"}},
        {"evaluation": {"prompts": 64}},
        {"rollout": {"temperature": 0.5}},
        {"rewards": {"solved": {"function": "mine.py:maze"}}},
        {"rewards": {"a": {"function": "maze()"}, "b": {"function": "maze()"}}},
        {"rewards": {}},
        {"rewards": "damaged"},
        {"rewards": {"solved": 3}},
        {"model": None},
    ],
)
def test_other_models_prompts_and_rewards_have_no_recorded_figures(changed):
    config = to_dict(recipe("maze"))
    for section, values in changed.items():
        mapped = isinstance(values, dict) and section != "rewards"
        config[section] = config[section] | values if mapped else values
    assert recorded_for(config) is None
    assert recorded_for({}) is None


def test_the_table_has_a_column_of_recorded_figures_in_80_columns():
    sampled = half_solved()
    found = recorded_for(to_dict(recipe("maze")))
    text = shown(before_after_table(sampled, sampled, (1, 8, 64, 256), found))
    assert "solved, trained for bon:8:unbiased (128 prompts x 256 samples, 95% intervals)" in text
    (heads,) = (line for line in text.splitlines() if "before" in line)
    assert heads.split() == ["procedure", "before", "after", "change", "GRPO,", "recorded"]
    lines = [line for line in text.splitlines() if "pass@" in line]
    assert [line.split()[0] for line in lines] == ["pass@1", "pass@8", "pass@64", "pass@256"]
    content = json.loads((files("nlgrpo.data") / "assets" / RECORDED).read_text())
    for line, (value, low, high) in zip(lines, content["pass_at_k"].values(), strict=True):
        assert line.split()[1:] == ["0.5000", "0.5000", "+0.0000", f"{value:.4f}"]
        assert f"[{low:.4f}, {high:.4f}]" in text
    assert "…" not in text
    assert "GRPO, recorded: nlgrpo train maze-grpo" in " ".join(text.split())


def test_an_n_that_was_not_recorded_has_a_dash():
    found = recorded_for(to_dict(recipe("maze")))
    text = shown(before_after_table(half_solved(), half_solved(), (1, 4), found))
    (line,) = (line for line in text.splitlines() if "pass@4" in line)
    assert line.split() == ["pass@4", "0.5000", "0.5000", "+0.0000", "-"]


@pytest.mark.parametrize(
    ("rewards", "objective", "headings"),
    [
        ([[0, 1, 1, 0]], "bon:2", ["pass@1", "pass@2"]),
        ([[0, 1, 1, 0]], "mean", ["pass@1", "pass@2"]),
        ([[0, 0.5, 1, 0]], "bon:2", ["mean", "best-of-2"]),
        ([[0, 1, 1, 0]], "wor:2", ["pass@1", "worst-of-2"]),  # all of 2 are right
    ],
)
def test_only_best_of_n_of_a_reward_of_0_and_1_is_pass_at_n(rewards, objective, headings):
    sampled = samples_of(torch.tensor(rewards, dtype=torch.float64).repeat(2, 1), objective)
    text = shown(before_after_table(sampled, sampled, (1, 2)))
    for heading in headings:
        assert f" {heading} " in text
    assert summarize(sampled, (1, 2))[0].procedure == "mean"  # the names of metrics stay


def test_a_model_that_is_binary_only_after_training_has_no_pass_at_n():
    text = shown(before_after_table(samples_of(torch.rand(2, 4)), samples_of(torch.ones(2, 4)), (1, 2)))
    assert "pass@" not in text
