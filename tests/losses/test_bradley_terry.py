"""The loss of preference pairs; accuracy, intervals, calibration and margins: SciPy, autograd, counting by hand."""

import math

import pytest
import torch
from scipy.stats import binomtest
from torch.nn.functional import logsigmoid

from nlgrpo.apps.report.result_tables import held_out_table
from nlgrpo.losses.bradley_terry import bradley_terry_loss, evaluate_pairs, reliability, wilson


def test_the_loss_is_the_likelihood_of_the_choice():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 50, generator=generator, dtype=torch.float64).requires_grad_()
    win = chosen.exp() / (chosen.exp() + rejected.exp())  # Bradley and Terry: strengths exp(r)
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), -win.log())
    asked = bradley_terry_loss(chosen, rejected, margin, centering=0.3)
    torch.testing.assert_close(asked, -logsigmoid(chosen - rejected - margin) + 0.3 * (chosen + rejected) ** 2)
    (gradient,) = torch.autograd.grad(bradley_terry_loss(chosen, rejected).sum(), chosen)
    torch.testing.assert_close(gradient, win.detach() - 1)


def test_the_loss_of_far_scores_is_finite():
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry_loss(far, torch.zeros(2))
    assert loss.tolist() == [0, 1e4]
    loss.sum().backward()
    assert far.grad.tolist() == [0, -1]


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 7), (7, 7), (160, 312), (311, 312), (3, 4)])
def test_the_interval_is_that_of_scipy(right, n):
    truth = binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right / n, n) == pytest.approx((truth.low, truth.high), abs=1e-12)


def test_the_interval_has_its_nominal_coverage():
    generator = torch.Generator().manual_seed(0)
    for share, n in ((0.6, 300), (0.9, 40)):
        draws = (torch.rand(4000, n, generator=generator) < share).double().mean(1).tolist()
        inside = [low <= share <= high for low, high in (wilson(draw, n) for draw in draws)]
        assert 0.93 < sum(inside) / len(inside) < 0.97


def test_numbers_by_hand():
    chosen, rejected = [2.0, 0.5, -1.0, 1.0], [1.0, 1.0, -1.0, -2.0]  # margins 1, -0.5, 0, 3
    found = evaluate_pairs(torch.tensor(chosen), torch.tensor(rejected), bins=5)
    win = [1 / (1 + math.exp(r - c)) for c, r in zip(chosen, rejected, strict=True)]
    assert found["accuracy"] == 2.5 / 4  # a tie is half right
    assert found["log_loss"] == pytest.approx(-sum(map(math.log, win)) / 4)
    assert found["brier"] == pytest.approx(sum((1 - p) ** 2 for p in win) / 4)
    assert found["margin"]["mean"] == pytest.approx(3.5 / 4)
    assert found["margin"]["quantiles"]["50%"] == pytest.approx(0.5)
    assert found["reward"]["mean"] == pytest.approx(1.5 / 8)
    # confidence 0.731, 0.622, 0.5 and 0.953 in fifths of [0.5, 1]: the second twice over
    sure = [max(p, 1 - p) for p in win]
    assert [(row["pairs"], row["accuracy"]) for row in found["reliability"]] == [(1, 0.5), (1, 0), (1, 1), (1, 1)]
    gaps = abs(0.5 - sure[2]) + sure[1] + (1 - sure[0]) + (1 - sure[3])
    assert found["ece"] == pytest.approx(gaps / 4)


def test_a_calibrated_model_has_no_calibration_error_and_a_boastful_one_has():
    generator = torch.Generator().manual_seed(1)
    margin = 2 * torch.randn(200_000, generator=generator, dtype=torch.float64)
    wins = torch.rand(len(margin), generator=generator) < margin.sigmoid()
    seen = torch.where(wins, margin, -margin)  # the winner is called "chosen"
    zero = torch.zeros_like(seen)
    calibrated, boastful = evaluate_pairs(seen, zero), evaluate_pairs(3 * seen, zero)
    assert calibrated["ece"] < 0.005
    assert boastful["ece"] > 0.1
    assert boastful["accuracy"] == calibrated["accuracy"]
    assert boastful["log_loss"] > calibrated["log_loss"]


def test_the_most_confident_pair_is_in_the_last_bin():
    assert [row["pairs"] for row in reliability(torch.tensor([1e3, -1e3, 0.0], dtype=torch.float64), 10)] == [1, 2]


def test_one_pair_has_an_interval():
    found = evaluate_pairs(torch.tensor([1.0]), torch.tensor([0.0]))
    assert found["accuracy"] == 1
    assert 0.2 < found["low"] < 0.21
    assert found["margin"]["std"] == 0


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [([], [], "n >= 1"), ([1.0], [1.0, 2.0], r"\(1,\) and \(2,\)"), ([math.nan, 1.0], [0.0, 0.0], "1 of 2 pairs")],
)
def test_bad_scores(chosen, rejected, message):
    with pytest.raises(ValueError, match=message):
        evaluate_pairs(torch.tensor(chosen), torch.tensor(rejected))


def test_bad_shares():
    with pytest.raises(ValueError, match=r"share in \[0, 1\]"):
        wilson(1.5, 3)


def test_the_table_shows_both():
    found = [evaluate_pairs(torch.tensor([1.0, x]), torch.tensor([0.0, 0.0])) for x in (-1.0, 1.0)]
    first = [next(iter(column.cells)) for column in held_out_table(*found).columns]
    assert first == ["accuracy", "0.500 [0.095, 0.905]", "1.000 [0.342, 1.000]"]
