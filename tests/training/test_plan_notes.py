"""What a plan says of settings with which the gradient is not that of the objective."""

import dataclasses

import pytest

from nlgrpo import train
from nlgrpo.config.recipes import RECIPES, recipe
from nlgrpo.config.schema import LossConfig, RewardConfig, RolloutConfig
from nlgrpo.objectives.registry import parse
from nlgrpo.training.plan import notes


def said(objective="bon:4", rollout=None, transform="", **loss):
    cfg = dataclasses.replace(
        recipe("length-bon"),
        loss=LossConfig(**loss),
        rollout=rollout or RolloutConfig(),
        rewards={"r": RewardConfig("length", "mean", transform=transform)},
    )
    return notes(cfg, {"r": parse(objective)})


def test_recipes_break_nothing():
    for name, make in RECIPES.items():
        assert notes(make(), {n: parse(r.objective) for n, r in make().rewards.items()}) == [], name


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"scale": "group"}, "loss.scale = 'group': advantages are divided by their deviation"),
        ({"scale": "batch"}, "loss.scale = 'batch'"),
        ({"normalization": "grpo"}, "loss.normalization = 'grpo': a completion's gradient is divided by its length"),
        ({"epochs": 2, "minibatches": 3}, "6 optimiser steps a rollout"),
        ({"epochs": 2, "surrogate": "cispo"}, "and capping the ratios biases"),
        ({"epochs": 2, "surrogate": "reinforce"}, "and nothing corrects for it"),
        ({"kl": "k1"}, "loss.kl = 'k1' in the loss has a gradient of 0"),
        ({"algorithm": "ppo"}, "critic.whiten divides the advantages by their deviation, and not the KL in the loss"),
        ({"algorithm": "dpo"}, "loss.beta = 0.0001: dpo asks for margins of about 1/beta nats"),
        ({"algorithm": "ipo", "beta": 0.1, "kl_in": "reward"}, "loss.kl_in = 'reward': of no effect on ipo"),
        ({"transform": "vbon:4"}, "vbon:4 has a KL of the weight of the reward; take loss.beta = 1, constant"),
        ({"transform": "bon_fp:4", "target_kl": 0.1}, "bon_fp:4 is the best transform for one beta"),
        ({"aggregate": "smooth_min:4"}, "its gradient is taken at the values of 6 prompts"),
        (
            {"rollout": RolloutConfig(top_k=5, min_p=0.1)},
            "rollout.top_k = 5, rollout.min_p = 0.1: samples are those of",
        ),
        ({"objective": "wor:16"}, "rewards.r: wor:16 from 8 samples can only be a plug-in estimate"),
    ],
)
def test_one_setting_one_line(settings, line):
    (found,) = said(**settings)
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
        {"algorithm": "ppo", "kl_in": "reward"},
        {"algorithm": "ipo", "beta": 0.1},
        {"transform": "vbon:4", "beta": 1.0, "kl_in": "reward"},
        {"transform": "bon_fp:4"},
    ],
)
def test_what_breaks_nothing_is_not_said(settings):
    assert said(**settings) == []


def test_the_plan_says_them(capsys):
    assert train.main(["length-bon", "--loss.scale", "group", "--dry-run"]) == 0
    assert "loss.scale = 'group'" in capsys.readouterr().out
    assert train.main(["length-bon", "--dry-run"]) == 0
    assert "note" not in capsys.readouterr().out
