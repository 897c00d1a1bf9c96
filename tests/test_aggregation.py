"""Aggregation of several objectives against autograd and a loop."""

import pytest
import torch

from nlgrpo.aggregation import WeightedSum, combine
from nlgrpo.objectives import BestOfN, Mean


def test_weighted_sum():
    aggregate = WeightedSum([0.5, 0.25, -2.0])
    values = torch.tensor([1.0, 4.0, 3.0], dtype=torch.float64, requires_grad=True)
    value = aggregate.value(values)
    assert value.item() == 0.5 + 1.0 - 6.0
    (truth,) = torch.autograd.grad(value, values)
    assert torch.equal(aggregate.gradient(values), truth)
    assert aggregate == WeightedSum((0.5, 0.25, -2.0)) == WeightedSum(torch.tensor([0.5, 0.25, -2.0]))
    assert hash(aggregate) == hash(WeightedSum((0.5, 0.25, -2.0)))


@pytest.mark.parametrize("weights", [[], [float("nan")], [1.0, float("inf")]])
def test_weighted_sum_refuses_weights(weights):
    with pytest.raises(ValueError, match="one finite number per reward"):
        WeightedSum(weights)


def test_weighted_sum_refuses_another_number_of_values():
    with pytest.raises(ValueError, match=r"\(2,\), got \(3,\)"):
        WeightedSum([1, 1]).gradient(torch.ones(3))
    with pytest.raises(ValueError, match="as many weights as there are rewards"):
        WeightedSum([1, 1]).value(torch.ones(1))


def test_combine_is_the_weighted_sum_of_the_linearised_rewards():
    linear = torch.randn(3, 4, 5, dtype=torch.float64)
    gradient = torch.tensor([0.5, 0.0, -2.0])
    truth = 0.5 * linear[0] - 2.0 * linear[2]
    torch.testing.assert_close(combine(linear, gradient), truth)
    linear[1] = -torch.inf
    torch.testing.assert_close(combine(linear, gradient), truth)
    with pytest.raises(ValueError, match=r"\(3, 4, 5\) and \(2,\)"):
        combine(linear, torch.ones(2))


def test_first_variation_of_an_aggregate():
    """d/dh g(R_1, R_2) along a mixture of two policies, by central differences."""
    rewards = torch.tensor([[[0.0, 1.0, 3.0]], [[2.0, -1.0, 0.5]]], dtype=torch.float64)
    here, there = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]], dtype=torch.float64)
    objectives, aggregate, h = (BestOfN(3), Mean()), WeightedSum([0.7, 0.3]), 1e-4

    def g(probs):
        return aggregate.value(torch.cat([o.value(r, probs) for o, r in zip(objectives, rewards, strict=True)]))

    slope = (g(here + h * (there - here)) - g(here - h * (there - here))) / (2 * h)
    linear = torch.stack([o.linearize(r, here) for o, r in zip(objectives, rewards, strict=True)])
    ours = combine(linear, aggregate.gradient(torch.zeros(2, dtype=torch.float64)))
    torch.testing.assert_close(((there - here) * ours[0]).sum(), slope, atol=1e-7, rtol=0)
