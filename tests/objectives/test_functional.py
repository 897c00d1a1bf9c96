"""User functionals, compared with the built-in objectives, finite differences and exact policy gradients."""

import json

import pytest
import torch

from nlgrpo import cli
from nlgrpo.objectives import BestOfN, EntropicRisk, Functional, Mean, SoftBestOfN, parse
from nlgrpo.objectives.advantages import centre
from nlgrpo.objectives.registry import linearize_present, value_present
from nlgrpo.runtime import user_code

GENERATOR = torch.Generator().manual_seed(0)
REWARDS = torch.randn(5, 7, generator=GENERATOR, dtype=torch.float64)
PROBS = torch.rand(5, 7, generator=GENERATOR, dtype=torch.float64).add(0.1)
PROBS = PROBS / PROBS.sum(-1, keepdim=True)


def mean(p, r):
    return (p * r).sum(-1)


def entropic(p, r):
    return (p * (2 * r).exp()).sum(-1).log() / 2


def soft(p, r):
    tilted = p * (r / 0.5).exp()
    return (tilted * r).sum(-1) / tilted.sum(-1)


def best_of_3(p, r):
    """From the definition: sorted rewards, each with the probability that it is the largest of three."""
    order = r.argsort(-1)
    cdf = p.gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(cdf[..., :-1], (1, 0))
    return ((cdf**3 - before**3) * r.gather(-1, order)).sum(-1)


def variance_penalised(p, r):
    first = (p * r).sum(-1)
    return first - ((p * r**2).sum(-1) - first**2)


@pytest.mark.parametrize(
    ("f", "builtin"),
    [(mean, Mean()), (entropic, EntropicRisk(2.0)), (soft, SoftBestOfN(0.5)), (best_of_3, BestOfN(3))],
)
@pytest.mark.parametrize("probs", [None, PROBS])
def test_the_same_functional_as_a_built_in_objective(f, builtin, probs):
    """Equal up to a constant per group."""
    ours, theirs = Functional(f), builtin
    torch.testing.assert_close(ours.value(REWARDS, probs), theirs.value(REWARDS, probs))
    found, expected = ours.linearize(REWARDS, probs), theirs.linearize(REWARDS, probs)
    if builtin == BestOfN(3):  # R is not defined for p off the simplex: two extensions, whose slopes differ by a tilt
        weights = torch.full_like(REWARDS, 1 / 7) if probs is None else probs
        found = found - (weights * found).sum(-1, keepdim=True)
        expected = expected - (weights * expected).sum(-1, keepdim=True)
    torch.testing.assert_close(centre(found), centre(expected))


def test_the_slope_is_that_of_finite_differences_along_the_simplex():
    ours, step = Functional(variance_penalised), 1e-5
    linear = ours.linearize(REWARDS, PROBS)
    for direction in torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64):
        tangent = direction - direction.mean(-1, keepdim=True)
        up, down = (ours.value(REWARDS, PROBS + sign * step * tangent) for sign in (1, -1))
        torch.testing.assert_close((linear * tangent).sum(-1), (up - down) / (2 * step), atol=1e-8, rtol=1e-6)


def test_the_gradient_of_a_tabular_policy_is_that_of_autograd():
    """pi = softmax(theta): sum_y pi(y) grad log pi(y) r~(y) is the gradient of R[pi]."""
    theta = torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(variance_penalised(theta.softmax(-1), REWARDS).sum(), theta)
    policy = theta.detach().softmax(-1)
    linear = Functional(variance_penalised).linearize(REWARDS, policy)
    found = policy * (linear - (policy * linear).sum(-1, keepdim=True))
    torch.testing.assert_close(found, expected)


def test_float32_rewards_missing_ones_and_inference_mode():
    ours = Functional(soft)
    rewards = REWARDS.float()
    with torch.inference_mode():
        linear = ours.linearize(rewards)
        assert ours.value(rewards).dtype == linear.dtype == torch.float32
    assert not linear.requires_grad
    torch.testing.assert_close(linear.double(), ours.linearize(REWARDS), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ours.linearize(REWARDS), ours.linearize(REWARDS.clone()))
    holes = REWARDS.clone()
    holes[0, 2] = holes[3, 5] = holes[3, 6] = torch.nan
    kept = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(linearize_present(ours, holes)[0, kept], ours.advantage(REWARDS[:1, kept])[0])
    torch.testing.assert_close(value_present(ours, holes)[3], ours.value(REWARDS[3:4, :5])[0])
    assert linearize_present(ours, holes)[3, 5] == 0


def of_all(p, r):
    return (p * r).sum()


def mixed(p, r):
    return (p * r).sum(-1) + r.mean()


def constant(p, r):
    return r.mean(-1)


def hard(p, r):
    return r.gather(-1, p.argmax(-1, keepdim=True))[:, 0]


def steep(p, r):
    return (p - 1 / p.shape[-1]).abs().sqrt().sum(-1)


def infinite(p, r):
    return (p * r).sum(-1) / 0


def number(p, r):
    return 3.0


def broken(p, r):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            of_all,
            r"functional:of_all returned \(\) for .* \(5, 7\); expected the value of each prompt, \(5,\): sum over",
        ),
        (mixed, "functional:mixed: the value of a group depends on the other groups"),
        (constant, "functional:constant is not differentiable in the probabilities"),
        (hard, "functional:hard is not differentiable"),
        (steep, r"functional:steep: the derivative of group 0, sample 0, whose reward is .*, is (nan|inf)"),
        (number, "functional:number returned a float"),
        (broken, "functional:broken raised KeyError: 'x'"),
    ],
)
def test_functions_that_cannot_be_linearised_are_refused(f, message):
    with pytest.raises(ValueError, match=message):
        Functional(f).linearize(REWARDS)


def test_a_value_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match=r"functional:infinite: the value of group 0 is (inf|-inf|nan)"):
        Functional(infinite).value(REWARDS)
    with pytest.raises(ValueError, match="expected a function"):
        Functional(3)


# --- by name ----------------------------------------------------------------------------------------------------------

FILE = """
def R(p, r):
    return (p * r.exp()).sum(-1).log()

def wrong(p, r):
    return (p * r).sum()

def undefined(p, r):
    return (p * r.log()).sum(-1)
"""


def test_a_name_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "risk.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    objective = parse("functional:risk.py:R", user_code.function)
    assert str(objective) == "functional:risk.py:R"
    torch.testing.assert_close(objective.advantage(REWARDS), EntropicRisk(1.0).advantage(REWARDS))
    with pytest.raises(ValueError, match=r"expected 'functional:file.py:R'"):
        parse("functional:R", user_code.function)
    with pytest.raises(ValueError, match="not loaded here"):
        parse("functional:risk.py:R")
    with pytest.raises(ValueError, match=r"did you mean 'R'|has no 'r'"):
        parse("functional:risk.py:r", user_code.function)


def train(folder, objective, *more):
    options = {
        "train.steps": 2, "rollout.prompts": 2, "rollout.samples": 4, "rollout.max-new-tokens": 6,
        "evaluation.prompts": 2, "evaluation.samples": 2, "evaluation.ns": "1", "train.out": folder / "run",
        "rewards.short.objective": objective,
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return cli.main(["train", "length-mean", *arguments, *more])


@pytest.mark.usefixtures("one_thread", "no_figures")
def test_training_on_a_functional(tmp_path, monkeypatch, capfd):
    """A step with the functional of the mean is a step with the mean; functions that fail are refused in one line."""
    (tmp_path / "risk.py").write_text(FILE + "\n\ndef mean(p, r):\n    return (p * r).sum(-1)\n")
    monkeypatch.chdir(tmp_path)
    logged = {}
    for objective in ("mean", "functional:risk.py:mean"):
        assert train(tmp_path / objective.partition(":")[0], objective) == 0
        lines = (tmp_path / objective.partition(":")[0] / "run" / "metrics.jsonl").read_text().splitlines()
        logged[objective] = [json.loads(line) for line in lines]
    for ours, theirs in zip(*logged.values(), strict=True):
        for name in ("objective/short", "objective/aggregate", "grad_norm", "advantage/ess"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert "functional:risk.py:mean(short)" in capfd.readouterr().out
    assert train(tmp_path / "wrong", "functional:risk.py:wrong") == 2
    refused = " ".join(capfd.readouterr().err.split())
    assert "rewards.short.objective: functional:risk.py:wrong returned ()" in refused
    assert train(tmp_path / "undefined", "functional:risk.py:undefined") == 2  # the reward is negative
    refused = " ".join(capfd.readouterr().err.split())
    said = "functional:risk.py:undefined: the value of group 0 is nan; expected a finite number."
    assert f"error: rewards.short.objective: {said}" in refused
    assert "Traceback" not in refused
