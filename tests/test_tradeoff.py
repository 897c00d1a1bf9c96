"""The parts of scripts/tradeoff.py: strengths, curves and what is said of them."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def tradeoff():
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "tradeoff.py")))


def test_beta_is_the_one_whose_optimum_is_as_far(tradeoff):
    phi = torch.tensor([[0.0, 1.0] * 8], dtype=torch.float64)  # two values: e^(1/beta) are the odds of the higher
    for kl in (0.05, 0.3, 0.6):
        odds = math.exp(1 / tradeoff.beta_for(phi, kl))
        p = odds / (1 + odds)
        assert math.isclose(math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p), kl, rel_tol=1e-4)
    with pytest.raises(ValueError, match="out of reach"):
        tradeoff.beta_for(phi, 0.7)  # above log 2


def test_strengths_are_those_of_best_of_n(tradeoff):
    """With K ranks the log transform's optimum is best-of-(1 + 1/beta) of the reference, up to the grid of ranks."""
    rewards = torch.rand(4, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = tradeoff.options("log", 4, "joy", rewards, 16)
    beta = float(found["loss.beta"]) / float(found["rewards.joy.weight"])
    assert math.isclose(1 + 1 / beta, 4, rel_tol=0.02)


def test_every_method_has_options_of_its_own(tradeoff):
    rewards = torch.rand(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = {method: tradeoff.options(method, 4, "joy", rewards, 16) for method in [*tradeoff.METHODS, "ipo", "wor:4"]}
    assert len({tuple(options.items()) for options in given.values()}) == len(given)
    assert given["vbon:bound"]["rewards.joy.transform"] == "vbon:4:bound"
    assert given["vbon"]["loss.beta"] == "1"  # the objective is E[log pi_bon / pi_ref] less 1 KL
    assert given["bon:4"]["rewards.joy.objective"] == "bon:4"
    sets = {m: int(given[m]["rollout.prompts"]) * 16 // int(given[m]["offline.n"]) for m in ("bon_sft", "dpo", "ipo")}
    assert set(sets.values()) == {tradeoff.SETS}


def test_curves_are_compared_where_both_are(tradeoff):
    flat = torch.arange(5, dtype=torch.float64)
    low = tradeoff.Curve.of(torch.tensor([2.0, 0.0]), {"single": torch.stack([flat + 2, flat])})
    high = tradeoff.Curve.of(torch.tensor([0.0, 1.0]), {"single": torch.stack([flat, flat + 3])})
    assert torch.equal(low.at("single", torch.tensor([0.0, 0.5, 2.0]))[:, 0], torch.tensor([0.0, 0.5, 2.0]).double())
    # over [0, 1] the gap is 3k - k at KL k: its mean is 1, at every prompt
    assert tradeoff.ahead("single", high, low, 100) == "+100.00 [+100.00, +100.00] over KL 0 to 1.00"


def test_who_is_on_the_front(tradeoff):
    where = [(0.0, 0.5), (1.0, 0.6), (1.0, 0.7), (2.0, 0.65), (0.5, 0.9)]
    assert tradeoff.undominated(where) == [True, False, False, False, True]


def test_best_of_n_of_the_reference(tradeoff):
    rewards = torch.rand(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reference = type("Sampled", (), {"rewards": {"joy": rewards}})
    curve = tradeoff.of_the_reference("joy", reference)
    assert curve.kl.tolist() == pytest.approx([0, math.log(2) - 1 / 2, math.log(4) - 3 / 4])
    torch.testing.assert_close(curve.values["reward"][[0, -1]], torch.stack([rewards.mean(1), rewards.amax(1)]))
    assert curve.values["single"][:, 0].tolist() == pytest.approx([1 / 2, 2 / 3, 4 / 5])
