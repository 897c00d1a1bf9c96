"""The row `estimators` of the plan: how biased the estimates of a run's objectives are in its groups."""

import subprocess
import sys

import pytest

from nlgrpo.apps.plan import estimates
from nlgrpo.config.schema import RewardConfig
from nlgrpo.objectives.registry import Functional, parse


def lines(*objectives, M=8, baseline="mean", **reward):
    rewards = {f"r{number}": RewardConfig("length", "mean", **reward) for number in range(len(objectives))}
    parsed = [parse(x) if isinstance(x, str) else x for x in objectives]
    return estimates.lines(dict(zip(rewards, parsed, strict=True)), rewards, M, baseline)


def test_rewards_with_one_objective_share_a_line():
    (line,) = lines("bon:4", "bon:4")
    assert line.startswith("r0, r1: the expected gradient of bon:4 in groups of 8 is the exact one times 0.60, 0.64, ")
    assert "3.75 for rewards of 0 and 1 where 2, 10, 30, 60, 80% of the samples succeed" in line
    assert line.endswith("'bon:4:unbiased' is exact")


def test_far_more_samples_in_use_than_in_a_group():
    """With N = 64 and M = 8 the best sample is N (7/8)^63 = 0.0142 above the second, per unit of their gap."""
    (line,) = lines("bon:64")
    assert "The last gap, between the best two samples, weighs 0.014" in line
    assert line.endswith("'bon:64:unbiased' is exact from rollout.samples = 64 on")


def test_ranks_are_not_0_or_1():
    (line,) = lines("bon:4", transform="exp:10")
    assert "rewards of 0 and 1" not in line
    assert "normally distributed" in line


@pytest.mark.parametrize("objective", ["bon:4", "wor:16", "cvar:0.25", "bop:3.0", "soft:0.5", "erm:2.0", "bon:4:kde"])
def test_plug_in_estimates_have_a_line(objective):
    assert len(lines(objective)) == 1


@pytest.mark.parametrize("objective", ["mean", "bon:1", "bon:8:unbiased", "wor:4:unbiased", "maj:4", "rao"])
@pytest.mark.parametrize("baseline", ["mean", "loo", "none"])
def test_exact_estimates_have_no_line(objective, baseline):
    assert lines(objective, baseline=baseline) == []


def test_objectives_that_depend_on_the_scale_of_rewards():
    """A small tau looks only at rewards that a simulation of normal ones never draws."""
    (line,) = lines("soft:0.1")
    assert "rewards of 0 and 1" in line
    assert "normally" not in line
    assert lines("soft:0.1", transform="exp:10") == []


def test_large_groups_take_no_memory():
    """A smoothed objective of a group needs the square of its size."""
    assert len(lines("bon:4:kde", M=16)) == 1
    assert lines("bon:4:kde", M=64) == []
    assert len(lines("bon:4", M=4096)) == 1


def test_nothing_that_is_no_number():
    (line,) = lines("bon:1000", M=2)
    assert "inf" not in line
    assert "nan" not in line


def test_what_has_no_line():
    assert lines("bon:4", weight=0.0) == []
    assert lines("bon:4", M=1) == []
    assert lines(Functional(lambda p, r: (p * r).sum(-1).log())) == []  # not defined for normally distributed rewards


def test_a_dry_run_prints_it_without_the_compiler_of_pytorch(tmp_path):
    code = "import sys; from nlgrpo import cli; cli.main(['train', 'length-bon', '--dry-run']); "
    code += "sys.exit('torch._dynamo' in sys.modules)"  # takes two seconds
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "the expected gradient of bon:4 in groups of 8" in " ".join(ran.stdout.split())
    assert ran.returncode == 0, ran.stderr
