"""Rewards of -inf, with which some users mark what is forbidden: finite advantages or an error, never NaN."""

import math

import pytest
import torch

from nlgrpo.objectives import parse

FORBIDDEN = torch.tensor([[-math.inf, 0.2, 0.9, 0.5, 0.4, 0.7]], dtype=torch.float64)
WEIGHTS = torch.tensor([[1.0, 0.5, 2.0, 1.5, 0.7, 1.1]], dtype=torch.float64)  # of another sampler
REFUSED = ["mean", "bon:4", "wor:2", "wor:2:unbiased", "cvar:0.5", "bop:3.0", "soft:0.5", "erm:2.0", "bon:4:kde"]


@pytest.mark.parametrize("baseline", ["mean", "loo", "none"])
@pytest.mark.parametrize("text", REFUSED)
def test_where_the_advantages_would_not_be_finite_it_is_an_error(text, baseline):
    with pytest.raises(ValueError, match="infinite"):
        parse(text).advantage(FORBIDDEN, baseline)


def test_the_error_names_the_group_and_the_sample():
    rewards = FORBIDDEN.repeat(3, 1)
    rewards[:2, 0] = 0.0
    with pytest.raises(ValueError, match="reward of group 2, sample 0 is infinite; advantages of mean need finite"):
        parse("mean").advantage(rewards)


@pytest.mark.parametrize("baseline", ["mean", "none"])
@pytest.mark.parametrize("n", [2, 3])
def test_unbiased_best_of_n_ranks_the_forbidden_sample_last(n, baseline):
    """It is never the best of two or more, so its reward does not count: any low one gives the same."""
    objective = parse(f"bon:{n}:unbiased")
    expected = objective.advantage(FORBIDDEN.clamp(min=-1e3), baseline)
    torch.testing.assert_close(objective.advantage(FORBIDDEN, baseline), expected)


@pytest.mark.parametrize("baseline", ["mean", "none"])
@pytest.mark.parametrize("text", ["mean", "bon:4", "bon:2:unbiased", "wor:2:unbiased", "soft:0.5"])
def test_weighted_samples_need_finite_rewards(text, baseline):
    """A weight of 0 times an infinite reward has no value."""
    with pytest.raises(ValueError, match="infinite"):
        parse(text).reweighted_advantage(FORBIDDEN, WEIGHTS, baseline)
