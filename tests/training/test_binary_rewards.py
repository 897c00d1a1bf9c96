"""The warning about rewards of 0 and 1 under a plug-in estimate: once, with the objective that is exact."""

import math

import pytest
import torch

from nlgrpo.config.schema import Config, RewardConfig
from nlgrpo.objectives.registry import parse
from nlgrpo.training.binary_rewards import BinaryRewards


def follower(objective, samples=8, **options):
    config = Config(rewards={"solved": RewardConfig("maze()", objective, **options)})
    config.rollout.samples = samples
    return BinaryRewards.of(config, {"solved": parse(objective)})


def solved(share, prompts=4, samples=8):
    rewards = torch.zeros(prompts, samples, dtype=torch.float64)
    rewards[:, : int(share * samples)] = 1.0
    return {"solved": rewards}


def test_it_is_said_once_when_enough_was_seen():
    watch = follower("bon:4")
    assert watch.look(solved(0.25)) == []  # 32 completions
    [said] = watch.look(solved(0.25))
    assert said == (
        "rewards.solved is 0 or 1 for all 64 completions so far. Under 'bon:4' in groups of 8 the expected gradient of "
        "a prompt is the exact one times 0.60 to 3.75, depending on how often it is solved; 'bon:4:unbiased' is exact"
    )
    assert watch.look(solved(0.25)) == []


def test_a_group_that_is_too_small_for_the_exact_estimate_is_named():
    [said] = follower("bon:16").look(solved(0.5, prompts=8))
    assert said.endswith("times 0.14 to over 100, depending on how often it is solved; 'bon:16:unbiased' is exact from "
                         "rollout.samples = 16 on")  # fmt: skip


def test_one_value_alone_says_nothing_about_the_other():
    watch = follower("bon:4")
    assert watch.look(solved(0.0, prompts=100)) == []
    assert len(watch.look(solved(0.5))) == 1


def test_abstentions_do_not_count():
    rewards = solved(0.5, prompts=8)["solved"]
    rewards[0] = math.nan
    watch = follower("bon:4")
    assert watch.look({"solved": rewards}) == []  # 56 completions
    assert len(watch.look({"solved": rewards})) == 1


def test_a_reward_with_another_value_is_followed_no_longer():
    watch = follower("bon:4")
    assert watch.look({"solved": torch.full((4, 8), 0.5)}) == []
    assert watch.look(solved(0.5, prompts=100)) == []


@pytest.mark.parametrize("objective", ["mean", "bon:1", "bon:4:unbiased", "soft:0.5", "cvar:0.5"])
def test_objectives_without_a_bias_or_an_exact_estimate_are_not_followed(objective):
    assert follower(objective).look(solved(0.5, prompts=100)) == []


def test_rewards_that_are_ranked_or_only_logged_are_not_followed():
    assert follower("bon:4", weight=0.0).look(solved(0.5, prompts=100)) == []
    assert follower("bon:4", transform="identity").look(solved(0.5, prompts=100)) == []


def test_a_large_group_has_hardly_a_bias():
    assert follower("bon:2", samples=64).look(solved(0.5, prompts=8, samples=64)) == []


@pytest.mark.parametrize(("objective", "warnings"), [("wor:200", 0), ("bon:5000", 0), ("bon:1000", 1)])
def test_far_more_samples_in_use_than_in_a_group(objective, warnings):
    """Few or none of the success probabilities have a gradient; where one has, the factor is far from 1."""
    assert len(follower(objective).look(solved(0.5, prompts=20))) == warnings
