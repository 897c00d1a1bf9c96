"""Aggregation of several objectives compared with autograd and loops."""

import pytest
import torch
from support import truths

from nlgrpo.objectives.aggregation import Min, SmoothMin, WeightedSum, combine, moving_average, parse_aggregate
from nlgrpo.objectives.registry import BestOfN, Mean


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
    with pytest.raises(ValueError, match="WeightedSum needs one weight per reward"):
        WeightedSum([1, 1]).value(torch.ones(1))


def test_min_has_all_its_gradient_at_the_smallest_value():
    values = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64)
    assert Min().value(values) == -1
    assert Min().gradient(values).tolist() == [0, 1, 0]
    assert Min().gradient(torch.tensor([2.0, 2.0, 3.0])).tolist() == [0.5, 0.5, 0], "ties share"
    absent = torch.tensor([torch.nan, 5.0, 7.0])
    assert Min().value(absent) == 5
    assert Min().gradient(absent).tolist() == [0, 1, 0]
    assert Min([1, 0, 2]).value(values) == 2, "only logged"
    assert Min([1, 0, 2]).gradient(values).tolist() == [1, 0, 0]


@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3], [1.0, 0.0, 4.0]])
@pytest.mark.parametrize("gamma", [1e-3, 1.0, 40.0])
def test_smooth_min_equals_autograd(gamma, weights):
    values = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    w = torch.tensor(weights or [1 / 3] * 3, dtype=torch.float64)
    truth = -((w * (-gamma * values).exp()).sum()).log() / gamma
    (gradient,) = torch.autograd.grad(truth, values)
    ours = SmoothMin(gamma, weights)
    torch.testing.assert_close(ours.value(values.detach()), truth.detach())
    torch.testing.assert_close(ours.gradient(values.detach()), gradient)
    assert ours.gradient(values.detach()).sum() == pytest.approx(1)


def test_smooth_min_lies_between_mean_and_min():
    values = torch.tensor([-700.0, 300.0, 299.0], dtype=torch.float64)
    assert SmoothMin(1e3).value(values) == pytest.approx(-700, abs=0.01)
    assert SmoothMin(1e3).gradient(values).tolist() == [1, 0, 0]
    assert SmoothMin(1e-9, [0.5, 0.25, 0.25]).value(values) == pytest.approx(-200.25, abs=1e-3)
    assert SmoothMin(2.0) == SmoothMin(2.0, None) != SmoothMin(2.0, (1, 1, 1)) == SmoothMin(2.0, torch.ones(3))


@pytest.mark.parametrize("aggregate", [SmoothMin(2.0), SmoothMin(2.0, [1.0, 1.0, 0.0])], ids=str)
def test_rewards_that_are_nan_are_ignored(aggregate):
    values = torch.tensor([torch.nan, 5.0, 7.0])
    alone = SmoothMin(2.0, None if aggregate.weights is None else [2.0, 0.0])  # the weight of all
    torch.testing.assert_close(aggregate.value(values), alone.value(values[1:]))
    torch.testing.assert_close(aggregate.gradient(values), torch.cat((torch.zeros(1), alone.gradient(values[1:]))))


@pytest.mark.parametrize("aggregate", [Min(), SmoothMin(2.0), SmoothMin(2.0, [1.0, 0.0])], ids=str)
def test_nothing_to_aggregate(aggregate):
    missing = torch.tensor([torch.nan, torch.nan])
    assert aggregate.value(missing).isnan()
    assert aggregate.gradient(missing).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"got \(2, 2, 2\)"):
        aggregate.value(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match=r"got \(0,\)"):
        aggregate.gradient(torch.ones(0))


@pytest.mark.parametrize(
    "aggregate",
    [WeightedSum([1, 0, -2]), Min(), Min([1, 0, 1]), SmoothMin(2.0), SmoothMin(2.0, [1, 0, 3])],
    ids=str,
)
def test_at_each_prompt(aggregate):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0, 2] = torch.nan
    values[:, 4] = torch.nan
    for column in range(5):
        alone = values[:, column]
        torch.testing.assert_close(aggregate.value(values)[column], aggregate.value(alone), equal_nan=True)
        torch.testing.assert_close(aggregate.gradient(values)[:, column], aggregate.gradient(alone))


def test_moving_average():
    steps = torch.tensor([[1.0, torch.nan, 2.0], [3.0, 4.0, torch.nan], [5.0, 8.0, 6.0]], dtype=torch.float64)
    average = []
    for values in steps:
        average = moving_average(average, values, 0.75).tolist()
    assert average == [0.75 * (0.75 * 1 + 0.25 * 3) + 0.25 * 5, 0.75 * 4 + 0.25 * 8, 0.75 * 2 + 0.25 * 6]


def test_parse():
    assert parse_aggregate("sum", [1, -2]) == WeightedSum([1, -2])
    assert parse_aggregate(" min ", [1, 0]) == Min([1, 0])
    assert parse_aggregate("smooth_min:4", [3, 1, 0]) == SmoothMin(4.0, [0.75, 0.25, 0])
    for text in ("", "max", "min:2", "sum:1", "smooth_min", "smooth_min:", "smooth_min:0", "smooth_min:nan"):
        with pytest.raises(ValueError, match="'sum', 'min' or 'smooth_min:GAMMA'"):
            parse_aggregate(text, [1, 1])
    for text in ("min", "smooth_min:1"):
        with pytest.raises(ValueError, match="numbers >= 0"):
            parse_aggregate(text, [1, -1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SmoothMin(0), "gamma=0"),
        (lambda: SmoothMin(float("inf")), "gamma=inf"),
        (lambda: SmoothMin(1, [0.0, 0.0]), "not all 0"),
        (lambda: SmoothMin(1, [-1.0, 2.0]), "numbers >= 0"),
        (lambda: SmoothMin(1, [float("nan")]), "numbers >= 0"),
        (lambda: SmoothMin(1, [1.0, 2.0]).value(torch.ones(3)), r"\(2,\), got \(3,\)"),
    ],
)
def test_smooth_min_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_combine_is_the_weighted_sum_of_the_linearised_rewards():
    linear = torch.randn(3, 4, 5, dtype=torch.float64)
    gradient = torch.tensor([0.5, 0.0, -2.0])
    truth = 0.5 * linear[0] - 2.0 * linear[2]
    torch.testing.assert_close(combine(linear, gradient), truth)
    each = torch.randn(3, 4, dtype=torch.float64)
    by_prompt = torch.stack([combine(linear[:, [p]], each[:, p])[0] for p in range(4)])
    torch.testing.assert_close(combine(linear, each), by_prompt)
    linear[1] = -torch.inf
    torch.testing.assert_close(combine(linear, gradient), truth)
    with pytest.raises(ValueError, match=r"\(3, 4, 5\) and \(2,\)"):
        combine(linear, torch.ones(2))


@pytest.mark.parametrize("aggregate", [WeightedSum([0.7, 0.3]), Min(), SmoothMin(3.0)], ids=str)
def test_first_variation_of_an_aggregate(aggregate):
    """d/dh g(R_1, R_2) along a mixture of two policies, by central differences."""
    rewards = torch.tensor([[[0.0, 1.0, 3.0]], [[2.0, -1.0, 0.5]]], dtype=torch.float64)
    pi, other = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]], dtype=torch.float64)
    objectives = (BestOfN(3), Mean())

    def values(probs):
        return torch.cat([o.value(r, probs) for o, r in zip(objectives, rewards, strict=True)])

    slope = truths.slope(lambda probs: aggregate.value(values(probs)), pi, other)
    linear = torch.stack([o.linearize(r, pi) for o, r in zip(objectives, rewards, strict=True)])
    ours = combine(linear, aggregate.gradient(values(pi)))
    torch.testing.assert_close(((other - pi) * ours[0]).sum(), slope, atol=1e-7, rtol=0)
