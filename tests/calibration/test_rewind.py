"""Rewind-and-repeat against all orders in which the samples may come."""

import itertools

import pytest
import torch

from nlgrpo.calibration.rewind import RewindAndRepeat, parse_rewind
from nlgrpo.estimators import weighted_win_rate

REWARDS = torch.tensor(
    [
        [0.1, 0.5, 0.5, 0.9, 0.2, 0.7],
        [0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        [0.3, 0.1, 0.2, 0.0, 0.1, 0.3],  # none reaches
        [2.0, 3.0, 2.5, 4.0, 2.0, 3.0],  # all do
    ],
    dtype=torch.float64,
)
REFERENCE = torch.tensor(
    [[0.5, 0.1, 0.6, 0.2, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0], [0.9, 0.8, 0.4, 0.5, 0.7], [1.0, 1.5, 0.1, 0.2, 1.0]],
    dtype=torch.float64,
)


def by_orders(rewards, threshold, most):
    """The answers of all orders, and the mean number of draws."""
    answers, draws = [], 0
    orders = list(itertools.permutations(rewards))
    for order in orders:
        number = next((i for i, r in enumerate(order[:most], 1) if r >= threshold), most)
        answers.append(order[number - 1])
        draws += number
    return answers, draws / len(orders)


@pytest.mark.parametrize("most", [1, 2, 3, 6])
@pytest.mark.parametrize("quantile", [0.2, 0.6, 0.85, 1.0])
def test_it_is_the_mean_over_all_orders(quantile, most):
    again = RewindAndRepeat(quantile, most)
    chances, draws = again.chosen(REWARDS, REFERENCE)
    torch.testing.assert_close(chances.sum(1), torch.ones(4, dtype=torch.float64))
    for p in range(4):
        ordered = sorted(REFERENCE[p].tolist())
        threshold = next(r for r in ordered if sum(x <= r for x in ordered) >= quantile * 5)
        answers, number = by_orders(REWARDS[p].tolist(), threshold, most)
        assert float((chances * REWARDS)[p].sum()) == pytest.approx(sum(answers) / len(answers), abs=1e-12)
        assert float(draws[p]) == pytest.approx(number, abs=1e-12)


def test_its_win_rate_is_that_of_all_pairs_of_orders():
    again = RewindAndRepeat(0.6, 2)
    ours, base = (again.chosen(x, REFERENCE[:2])[0] for x in (REWARDS[:2], REFERENCE[:2]))
    found = weighted_win_rate(REWARDS[:2], ours, REFERENCE[:2], base)
    for p, threshold in enumerate(sorted(x)[2] for x in REFERENCE[:2].tolist()):
        a, _ = by_orders(REWARDS[p].tolist(), threshold, 2)
        b, _ = by_orders(REFERENCE[p].tolist(), threshold, 2)
        wins = sum((x > y) + (x == y) / 2 for x in a for y in b) / (len(a) * len(b))
        assert float(found[p]) == pytest.approx(wins, abs=1e-12)


def test_a_quantile_that_falls_on_a_sample_is_that_sample():
    """0.85 of 20 samples are 17, although 0.85 * 20 is a little more in floating point."""
    reference = torch.arange(20.0)[None]
    assert RewindAndRepeat(0.85, 4).threshold(reference).tolist() == [16.0]


@pytest.mark.parametrize("text", ["rewind", "rewind:0.85", "rewind:2:4", "rewind:0.85:0", "rewind:a:4", "rewind:nan:4"])
def test_what_is_no_rewind(text):
    with pytest.raises(ValueError, match="expected rewind:QUANTILE:MOST, such as"):
        parse_rewind(text)


def test_names():
    assert parse_rewind("bon:4") is None
    assert parse_rewind("rewind:0.85:32") == RewindAndRepeat(0.85, 32)
    assert str(RewindAndRepeat(0.85, 32)) == "rewind:0.85:32"


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"rewind:.* needs 7 samples per prompt, got 6; draw more"):
        RewindAndRepeat(0.5, 7).chosen(REWARDS, REFERENCE)
    with pytest.raises(ValueError, match="without NaN"):
        RewindAndRepeat(0.5, 2).chosen(REWARDS * torch.nan, REFERENCE)
    with pytest.raises(ValueError, match="a probability per sample"):
        weighted_win_rate(REWARDS, REWARDS[:, :3], REFERENCE, REFERENCE)
