"""Generalised advantage estimation and the clipped value loss: five tokens by hand, and sums by their definition."""

import math

import pytest
import torch

from nlgrpo.losses.gae import clipped_value_loss, gae

# Five tokens with a penalty of 0.1 each and a reward of 1 at the last; gamma = 0.9, lam = 0.5, gamma lam = 0.45:
#   t   r_t    V_t   delta_t = r_t + 0.9 V_{t+1} - V_t       A_t = delta_t + 0.45 A_{t+1}             return A_t + V_t
#   4   0.9    0.6    0.9                 - 0.6 =  0.30      0.3                                       0.9
#   3  -0.1    0.5   -0.1 + 0.54          - 0.5 = -0.06     -0.06 + 0.45 * 0.3         =  0.075        0.575
#   2  -0.1    0.1   -0.1 + 0.45          - 0.1 =  0.25      0.25 + 0.45 * 0.075       =  0.28375      0.38375
#   1  -0.1    0.4   -0.1 + 0.09          - 0.4 = -0.41     -0.41 + 0.45 * 0.28375     = -0.2823125    0.1176875
#   0  -0.1    0.2   -0.1 + 0.36          - 0.2 =  0.06      0.06 + 0.45 * -0.2823125  = -0.067040625  0.132959375
REWARDS = [-0.1, -0.1, -0.1, -0.1, 0.9]
VALUES = [0.2, 0.4, 0.1, 0.5, 0.6]
ADVANTAGES = [-0.067040625, -0.2823125, 0.28375, 0.075, 0.3]
RETURNS = [0.132959375, 0.1176875, 0.38375, 0.575, 0.9]


def test_five_tokens_by_hand():
    rewards, values = (torch.tensor([[*x, 7.0, -3.0]], dtype=torch.float64) for x in (REWARDS, VALUES))
    advantages, returns = gae(rewards, values, torch.tensor([5]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[*ADVANTAGES, 0, 0]], dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(returns, torch.tensor([[*RETURNS, 0, 0]], dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.0, 0.7), (0.99, 0.5)])
def test_it_is_the_weighted_sum_of_its_definition(gamma, lam):
    """Eq. 16 of the paper, sum_l (gamma lam)^l delta_{t+l}, for lengths from 0 to L."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64)
    lengths = torch.arange(7)
    advantages, returns = gae(rewards, values, lengths, gamma=gamma, lam=lam)
    for r, length in enumerate(lengths.tolist()):
        v = [*values[r, :length].tolist(), 0.0]
        delta = [float(rewards[r, t]) + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(6):
            truth = math.fsum((gamma * lam) ** k * delta[t + k] for k in range(max(0, length - t)))
            assert float(advantages[r, t]) == pytest.approx(truth, abs=1e-14)
            assert float(returns[r, t]) == pytest.approx(truth + v[t] if t < length else 0.0, abs=1e-14)


def test_with_lambda_1_it_is_the_return_less_the_value():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    advantages, _ = gae(rewards, values, torch.full((3,), 5), gamma=1.0, lam=1.0)
    to_come = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages, to_come - values)


def test_nothing_to_estimate():
    empty = torch.zeros(0, 4)
    assert gae(empty, empty, torch.zeros(0, dtype=torch.long))[0].shape == (0, 4)
    none = torch.zeros(2, 0)
    assert gae(none, none, torch.zeros(2, dtype=torch.long))[1].shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": torch.zeros(2, 4)}, r"rewards and values \(R, L\)"),
        ({"lengths": torch.zeros(3, dtype=torch.long)}, r"lengths \(R,\)"),
        ({"gamma": 1.1}, r"gamma=1.1: expected a number in \[0, 1\]"),
        ({"lam": -0.1}, "lam=-0.1"),
        ({"lam": math.nan}, "lam=nan"),
    ],
)
def test_gae_refuses_invalid_arguments(arguments, message):
    given = {"rewards": torch.zeros(2, 5), "values": torch.zeros(2, 5), "lengths": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        gae(**(given | arguments))


def test_the_clipped_value_loss_by_hand():
    """V_old = 1, clip 0.2: V is clipped to [0.8, 1.2], and the larger error counts."""
    values = torch.tensor([1.1, 1.5, 1.5, 0.5, 1.5], dtype=torch.float64)
    returns = torch.tensor([2.0, 2.0, 1.0, 0.0, 1.34], dtype=torch.float64)
    loss, clipped = clipped_value_loss(values, torch.ones(5, dtype=torch.float64), returns, 0.2)
    truth = [0.9**2 / 2, 0.8**2 / 2, 0.5**2 / 2, 0.8**2 / 2, 0.16**2 / 2]
    torch.testing.assert_close(loss, torch.tensor(truth, dtype=torch.float64))
    assert clipped.tolist() == [False, True, False, True, False]


def test_where_it_is_clipped_a_value_gets_no_gradient():
    values = torch.tensor([1.1, 1.5], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(2, dtype=torch.float64), torch.tensor([2.0, 2.0], dtype=torch.float64)
    clipped_value_loss(values, old, returns, 0.2)[0].sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0], dtype=torch.float64))
    values.grad = None
    clipped_value_loss(values, old, returns, math.inf)[0].sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, -0.5], dtype=torch.float64))


@pytest.mark.parametrize("clip", [0, -1, math.nan])
def test_the_value_loss_refuses_an_invalid_clip(clip):
    with pytest.raises(ValueError, match="clip="):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip)
    with pytest.raises(ValueError, match="values, old_values and returns of one shape"):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3), 0.2)
