"""The notes of the plan on settings with which the gradient is not that of the objective."""

import dataclasses

import pytest
import torch

from nlgrpo import train
from nlgrpo.apps.plan.notes import notes
from nlgrpo.config.recipes import RECIPES, recipe
from nlgrpo.config.schema import LossConfig, RewardConfig, RolloutConfig
from nlgrpo.objectives.registry import parse


def notes_of(objective="bon:4", rollout=None, transform="", compute=torch.float32, **loss):
    cfg = dataclasses.replace(
        recipe("length-bon"),
        loss=LossConfig(**loss),
        rollout=rollout or RolloutConfig(),
        rewards={"r": RewardConfig("length", "mean", transform=transform)},
    )
    return notes(cfg, {"r": parse(objective)}, compute)


def test_recipes_have_no_notes():
    for name, make in RECIPES.items():
        found = notes(make(), {n: parse(r.objective) for n, r in make().rewards.items()})
        of_grpo = [line for line in found if line.startswith("loss.scale = 'group'")]
        assert found == of_grpo, name
        assert bool(of_grpo) == (name == "maze-grpo"), name  # GRPO divides by the standard deviation


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"scale": "group"}, "loss.scale = 'group': advantages are divided by their standard deviation"),
        ({"scale": "batch"}, "loss.scale = 'batch'"),
        ({"normalization": "grpo"}, "loss.normalization = 'grpo': a completion's gradient is divided by its length"),
        ({"epochs": 2, "minibatches": 3}, "6 optimiser steps per rollout"),
        ({"epochs": 2, "surrogate": "cispo"}, "and capping the ratios biases"),
        ({"epochs": 2, "surrogate": "reinforce"}, "and no importance weight corrects for it"),
        ({"kl": "k1"}, "loss.kl = 'k1' in the loss has a gradient of 0"),
        ({"algorithm": "ppo", "kl_in": "reward"}, "critic.whiten subtracts the mean of all tokens' advantages"),
        ({"algorithm": "dpo"}, "loss.beta = 0.0001: dpo then pushes for margins of about 1/beta nats"),
        ({"algorithm": "ipo", "beta": 0.1, "kl_in": "reward"}, "loss.kl_in = 'reward': ignored by ipo"),
        ({"transform": "vbon:4"}, "vbon:4 gives the KL the reward's weight; set loss.beta = 1, constant"),
        ({"transform": "bon_fp:4", "target_kl": 0.1}, "bon_fp:4 is the optimal transform for one beta"),
        ({"transform": "fp:cvar:0.25", "target_kl": 0.1}, "fp:cvar:0.25 is the optimal transform for one beta"),
        ({"aggregate": "smooth_min:4"}, "its gradient is taken at values from 6 prompts"),
        (
            {"rollout": RolloutConfig(top_k=5, min_p=0.1)},
            "rollout.top_k = 5, rollout.min_p = 0.1: samples come from",
        ),
        (
            {"rollout": RolloutConfig(engine="vllm", ahead=1)},
            "rollout.ahead = 1: completions are up to 1 step old, and nothing corrects for it; use",
        ),
        (
            {"rollout": RolloutConfig(engine="vllm", ahead=2)},
            "rollout.ahead = 2: completions are up to 2 steps old",
        ),
        (
            {"rollout": RolloutConfig(engine="vllm"), "compute": torch.bfloat16},
            "rollout.engine = 'vllm' in bfloat16: vLLM rounds in other places than the policy",
        ),
        (
            {"rollout": RolloutConfig(top_k=5), "algorithm": "dpo", "beta": 0.1},
            "rollout.top_k = 5: samples come from the truncated policy",
        ),
        ({"kl_importance": False}, "k3 without the ratio has the gradient of KL(reference || policy)"),
        ({"level": "sequence"}, "weights k3 by the ratio of the whole completion"),
        ({"rollout": RolloutConfig(top_k=5), "correction": "mis:0.5:2"}, "cannot weight tokens that are never sampled"),
    ],
)
def test_one_setting_one_line(settings, line):
    (found,) = notes_of(**settings)
    assert line in found


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": "k1", "beta": 0.0},
        {"kl": "k1", "kl_in": "reward"},
        {"aggregate": "min", "aggregate_at": "prompt"},
        {"aggregate": "min", "aggregate_memory": 0.9},
        {"objective": "bon:8:unbiased"},
        {"objective": "bon:8"},
        {"objective": "wor:16"},  # its bias is in the row "estimators"
        {"kl_importance": False, "beta": 0.0},
        {"level": "sequence", "kl": "k2"},
        {"algorithm": "ipo", "beta": 0.1},
        {"transform": "vbon:4", "beta": 1.0, "kl_in": "reward"},
        {"transform": "bon_fp:4"},
        {"rollout": RolloutConfig(engine="vllm", ahead=2), "compute": torch.bfloat16, "correction": "tis:2"},
        {"rollout": RolloutConfig(engine="vllm")},
        {"rollout": RolloutConfig(), "compute": torch.bfloat16},
        {"rollout": RolloutConfig(engine="vllm"), "compute": torch.bfloat16, "algorithm": "ipo", "beta": 0.1},
    ],
)
def test_other_settings_have_no_note(settings):
    assert notes_of(**settings) == []


def test_settings_that_one_correction_corrects_have_a_line_each():
    rollout = RolloutConfig(engine="vllm", ahead=3, top_p=0.9)
    assert len(notes_of(rollout=rollout, compute=torch.bfloat16)) == 3


def test_the_plan_shows_the_notes(capsys):
    assert train.main(["length-bon", "--loss.scale", "group", "--dry-run"]) == 0
    assert "loss.scale = 'group'" in capsys.readouterr().out
    assert train.main(["length-bon", "--dry-run"]) == 0
    assert "note" not in capsys.readouterr().out
