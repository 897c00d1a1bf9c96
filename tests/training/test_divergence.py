"""Bands of metrics: real changes are found, and ordinary training is left alone."""

import math
import random

import pytest

from nlgrpo.config.schema import out_of_bounds
from nlgrpo.training.divergence import BANDS, CONSTANT, VALUE, Detector, Diverged, DivergenceConfig


def ordinary(steps, seed=0):
    """Metrics of a run that learns: noise, a KL that grows, a reward that rises, shorter completions."""
    dice = random.Random(seed)
    for step in range(steps):
        share = step / steps
        yield {
            "loss": dice.gauss(0, 0.05),
            "kl": 0.2 * share + 0.02 * share * dice.expovariate(1),
            "grad_norm": math.exp(dice.gauss(0, 0.5)),
            VALUE: 3 * share + dice.gauss(0, 0.3),
            "completions/mean_length": 100 * (1 - 0.8 * share) + dice.gauss(0, 5),
            CONSTANT: dice.choice([0.0, 0.25, 0.5, 1.0]),
        }


def follow(rows, **config):
    """What a detector finds, by step."""
    detector = Detector(DivergenceConfig(**config))
    found = ((step, detector.look(step, row)) for step, row in enumerate(rows))
    return {step: fault for step, fault in found if fault is not None}


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_training_is_left_alone(seed):
    assert follow(ordinary(1000, seed)) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", 5.0),
        ("loss", -5.0),
        ("kl", 3.0),
        ("grad_norm", 1000.0),
        (VALUE, -9.0),
        ("completions/mean_length", 1.0),
        ("completions/mean_length", 2000.0),
        *((name, value) for name in BANDS for value in (math.nan, math.inf, None) if name != VALUE),
        (VALUE, math.inf),
    ],
)
def test_a_metric_that_leaves_its_band_is_found(name, value):
    rows = list(ordinary(200))
    for row in rows[100:110]:
        row[name] = value
    found = follow(rows)
    assert found.keys() == {102}  # after three steps, and once: the band begins again
    assert found[102].onset == 100
    assert str(found[102]).startswith(f"{name} is ")
    assert "at step 103, " in str(found[102])
    assert str(found[102]).endswith(f" for 3 steps: {BANDS[name].advice}")
    assert follow(rows, patience=11) == {}
    assert found.keys() == follow(rows, action="stop").keys()  # the action is the caller's


@pytest.mark.parametrize(
    ("name", "value"), [(VALUE, 50.0), (VALUE, math.nan), (VALUE, None), ("kl", 0.0), ("grad_norm", 0.0)]
)
def test_some_directions_are_no_fault(name, value):
    rows = list(ordinary(200))
    for row in rows[100:110]:
        row[name] = value
    assert follow(rows) == {}


def test_a_single_spike_is_no_fault():
    rows = list(ordinary(300))
    for step in (50, 100, 101, 150, 250):
        rows[step]["loss"] = rows[step]["kl"] = 1e6
    assert follow(rows) == {}


def test_a_limit_of_the_kl_holds_from_the_first_step():
    rows = [{"kl": 0.5}] * 10
    assert follow(rows) == {}
    assert follow(rows, max_kl=0.4).keys() == {2}


def test_rewards_do_not_decide():
    """The sum of opposed users' rewards is the same for all; their mean may fall while the objective rises."""
    rows = list(ordinary(200))
    for row in rows:
        row["frac_reward_zero_std"] = 1.0
        row["reward"] = 0.0
    for row in rows[100:]:
        row["reward"] = -1000.0
    assert follow(rows, action="stop") == {}


@pytest.mark.parametrize("absent", [math.nan, None])
def test_sums_of_other_rewards_are_not_compared(absent):
    """One of two tasks is in no prompt of some steps: the objective is that of the other task alone."""
    rows = list(ordinary(200))
    for row in rows:
        row |= {"objective/code": row[VALUE] - 10, "objective/math": 10.0}
    for row in rows[100:110]:
        row |= {"objective/math": absent, VALUE: row["objective/code"]}
    assert follow(rows, action="stop") == {}
    for row in rows[150:]:
        row |= {"objective/math": 0.0, VALUE: row["objective/code"]}
    assert follow(rows, action="stop").keys() == {152}


def test_a_reward_that_is_the_same_for_all():
    rows = list(ordinary(60))
    for row in rows[20:40]:
        row[CONSTANT] = 1.0
    found = follow(rows)
    assert found.keys() == {29}
    assert found[29].onset == 20
    assert "the same linearised reward for 10 steps" in str(found[29])
    detector = Detector(DivergenceConfig(), groups=False)  # with one completion per prompt it always is
    assert all(detector.look(step, {CONSTANT: 1.0}) is None for step in range(50))


def test_several_faults_are_one():
    rows = list(ordinary(100))
    for row in rows[50:55]:
        row["kl"], row["loss"] = 9.0, 9.0
    [fault] = follow(rows).values()
    assert isinstance(fault, Diverged)
    assert "loss is 9 at step 53" in str(fault)
    assert "; kl is 9 at step 53" in str(fault)


def test_a_detector_that_reads_the_log_continues():
    rows = list(ordinary(200))
    for row in rows[100:110]:
        row["kl"] = 9.0
    whole = follow(rows)
    for begun in (90, 101, 103, 150):
        detector = Detector(DivergenceConfig())
        for step, row in enumerate(rows[:begun]):
            detector.look(step, row)
        found = {step: str(detector.look(step, rows[step])) for step in range(begun, 200)}
        assert {k: v for k, v in found.items() if v != "None"} == {k: str(v) for k, v in whole.items() if k >= begun}


def test_impossible_values_are_listed():
    config = DivergenceConfig(window=1, factor=0, patience=0, max_kl=-1, rollbacks=-1)
    names = [name for name, _, _ in out_of_bounds(config)]
    assert names == ["window", "factor", "patience", "max_kl", "rollbacks"]
    assert list(out_of_bounds(DivergenceConfig())) == []
