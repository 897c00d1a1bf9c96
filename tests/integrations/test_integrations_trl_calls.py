"""`linearized` and `aggregated` without a trainer: abstention, sync and async functions, and errors."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from support.trl_truths import TRUTH, M, numbers, of_aggregate, with_absent

from nlgrpo.integrations.trl import aggregated, linearized
from nlgrpo.objectives.aggregation import SmoothMin, WeightedSum

A = [0.3, 1.7, -0.4, 0.3, 2.0, 2.0, -1.0, 0.1]  # two groups
B = [0.9, -0.2, 0.4, 0.0, 1.0, 0.7, 0.2, -0.6]
GAP = [0.5, None, 1.3, 0.2, None, None, None, None]


def call(function, count=8, **columns):
    out = function(prompts=["p"] * count, completions=["c"] * count, **columns)
    return asyncio.run(out) if asyncio.iscoroutine(out) else out


def returning(values):
    return lambda **_: values


def kernel_of(values):
    """Similarities of numbers; the row of None is None."""
    points = numbers([math.nan if x is None else x for x in values]).view(-1, M)
    rows = (-(points[:, :, None] - points[:, None, :]).abs()).exp().flatten(0, 1).tolist()
    return [None if x is None else row for x, row in zip(values, rows, strict=True)]


def test_rewards_abstain_independently():
    """The result is None only if all abstain; values are means over the groups that have one."""
    b = [None, None, *B[2:7], None]
    function = aggregated(
        {"a": returning(GAP), "b": returning(b)}, ["bon:4", "soft:0.5"], M, "smooth_min:2", [0.3, 0.9]
    )
    logged = {}
    ours = call(function, log_metric=lambda name, x: logged.setdefault(name, []).append(x))
    weights = numbers([0.25, 0.75])
    pairs = [with_absent("bon:4", GAP), with_absent("soft:0.5", b)]
    truth, aggregate = of_aggregate(lambda R: -(weights * (-2 * R).exp()).sum().log() / 2, pairs)
    assert [x is None for x in ours] == [False, True, False, False, False, False, False, True]
    assert [x or 0.0 for x in ours] == pytest.approx(truth.tolist())
    assert logged["objective/aggregate"] == pytest.approx([aggregate])
    assert sorted(logged) == ["objective/a", "objective/aggregate", "objective/b", "rewards/a/mean", "rewards/b/mean"]
    assert logged["rewards/a/mean"] == [0.5, 1.3, 0.2]


def test_a_kernel_function_abstains():
    values = [0.5, None, 1.3, 0.2, 0.1, None, None, 0.4]  # two samples are too few for rao
    logged = []
    ours = call(linearized(returning(kernel_of(values)), "rao", M, "k"), log_metric=lambda *pair: logged.append(pair))
    truth, value = with_absent("rao", values)
    assert [x is None for x in ours] == [x is None for x in values]
    assert [x or 0.0 for x in ours] == pytest.approx(truth.tolist())
    assert truth[4:].tolist() == [0.0] * 4
    assert logged == [("rewards/k/mean", pytest.approx(value))] * 3 + [("objective/k", pytest.approx(value))]
    with_numbers = [[math.nan] * M if row is None else row for row in kernel_of(values)]
    assert call(linearized(returning(numbers(with_numbers)), "rao", M)) == ours


def test_a_reward_that_abstains_on_the_whole_batch_is_ignored():
    only = call(aggregated([returning(A)], "bon:4", M))
    for aggregate in ("sum", "min", SmoothMin(2.0)):
        logged = {}
        functions = {"a": returning(A), "absent": returning([None] * 8)}
        assert call(aggregated(functions, "bon:4", M, aggregate), log_metric=logged.__setitem__) == pytest.approx(only)
        assert "objective/absent" not in logged
        assert not any(math.isnan(x) for x in logged.values())


def test_sum_is_the_weighted_sum_that_trl_computes():
    weighted = call(
        aggregated({"a": returning(A), "b": returning(B)}, {"b": "wor:3", "a": "mean"}, M, weights=[0.7, -1.3])
    )
    a, b = call(linearized(returning(A), "mean", M)), call(linearized(returning(B), "wor:3", M))
    assert weighted == pytest.approx([0.7 * x - 1.3 * y for x, y in zip(a, b, strict=True)])
    of_object = aggregated([returning(A)], "mean", M, WeightedSum([2.0]), name="twice")
    assert of_object.__name__ == "twice"
    assert call(of_object) == pytest.approx([2 * x for x in a])


def test_sync_and_async_functions_together():
    """The async function starts first; an error in the sync one cancels it."""
    order = []

    async def slow(fails=False, **_):
        order.append("request")
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            order.append("cancelled")
            raise
        return B

    def quick(fails=False, **_):
        order.append("compute")
        if fails:
            raise KeyError("quick")
        return A

    function = aggregated([quick, slow], "bon:4", M)
    assert asyncio.iscoroutinefunction(function)
    plain = call(aggregated({"a": returning(A), "b": returning(B)}, "bon:4", M))
    assert call(function) == plain
    assert order == ["request", "compute"]

    async def failing():
        with pytest.raises(KeyError, match="quick"):
            await function(prompts=["p"] * 8, completions=["c"] * 8, fails=True)
        await asyncio.sleep(0.01)  # the loop keeps running, as TRL's does
        return order[-2:]

    assert asyncio.run(failing()) == ["compute", "cancelled"]


def test_an_unbiased_estimator_is_0_for_groups_of_n():
    """The baseline for n of n is not the mean of the group, which TRL subtracts."""
    values = [0.5, None, 1.3, None, *A[4:]]
    logged = {}
    ours = call(linearized(returning(values), "bon:2:unbiased", M, "a"), log_metric=logged.__setitem__)
    assert ours[:4] == [0, None, 0, None]
    truth, _ = TRUTH["bon:2:unbiased"](numbers(A[4:]))
    assert ours[4:] == pytest.approx(truth.tolist())
    both = []
    call(linearized(returning(values), "bon:2:unbiased", M, "a"), log_metric=lambda *pair: both.append(pair))
    assert ("objective/a", pytest.approx(1.3)) in both  # it has a value


class FakeTrainer:
    """The attributes of TRL's trainer that are read."""

    num_generations, num_generations_eval = M, 2
    multi_objective_aggregation = "sum_then_normalize"

    def __init__(self, scale, training=True):
        self.scale_rewards, self.model, self.logged = scale, SimpleNamespace(training=training), {}

    def log(self, name, value):
        self.logged[name] = value


def test_an_evaluation_of_groups_that_are_too_small_has_no_value():
    trainer = FakeTrainer("none", training=False)
    sizes = []

    def alike(completions, samples, **_):
        sizes.append(samples)
        return [[1.0] * samples] * len(completions)

    functions = {"a": returning(A), "b": returning(B), "c": alike}
    assert (
        call(aggregated(functions, ["bon:3:unbiased", "bon:2:unbiased", "dpp:2"], M), log_metric=trainer.log)
        == [0.0] * 8
    )
    assert {"rewards/a/mean", "rewards/b/mean", "objective/b", "objective/aggregate"} == trainer.logged.keys()
    best = [max(pair) for pair in zip(B[::2], B[1::2], strict=True) if None not in pair]  # of two: dpp:2 has no value
    assert trainer.logged["objective/aggregate"] == pytest.approx(sum(best) / len(best))
    assert sizes == [2]


def test_scaling_warns_once_per_trainer(caplog):
    function = linearized(returning(A), "bon:4", M)
    call(function, log_metric=FakeTrainer("none").log)
    assert not caplog.records
    first, second = FakeTrainer("group"), FakeTrainer("none")
    second.multi_objective_aggregation = "normalize_then_sum"
    for trainer in (first, first, second, second):
        call(function, log_metric=trainer.log)
        call(linearized(returning(B), "mean", M), log_metric=trainer.log)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "scale_rewards='group'" in caplog.records[0].getMessage()
    assert "multi_objective_aggregation='normalize_then_sum'" in caplog.records[1].getMessage()


# ---- invalid arguments and return values ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0] * 4] * 7, r"kernel function 'k' returned .* for 8 completions; expected a list of 4 similarities"),
        (None, r"'k' returned a value of type NoneType, not a list, for 8 completions"),
        (A, r"'k' returned a value of type float, .* in the row of completion 0; expected its 4 similarities"),
        ([[1.0] * 4] * 7 + [[1.0] * 8], r"'k' returned 8 values .* in the row of completion 7; expected its 4"),
        ([["one"] * 4] * 8, r"'k' returned 'one' in the row of completion 0"),
        (
            [[1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4] * 2,
            r"kernel function 'k': the kernel of group 0, samples 0 and 1 is 0 and differs from the entry of the same "
            r"two samples in the other order",
        ),
        ([[1.0] * 4] * 6 + [[1.0, 1.0, 1.0, math.inf]] * 2, r"'k' returned inf in the row of completion 6"),
        ([[1.0] * 4, [1.0, 1.0, None, 1.0], *[[1.0] * 4] * 6], r"'k': the kernel of group 0, samples 1 and 2 is nan"),
    ],
)
def test_bad_similarities_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        call(linearized(returning(values), "rao", M, "k"))


def test_similarities_are_refused_as_rewards():
    with pytest.raises(
        ValueError, match=r"reward 'r' returned shape \(8, 4\) .*; expected a list of one finite number"
    ):
        call(linearized(returning(torch.eye(M).repeat(2, 1)), "bon:4", M, "r"))
    with pytest.raises(ValueError, match="expected a list of one finite number, or None"):
        call(linearized(returning(list(torch.eye(M).repeat(2, 1))), "bon:4", M, "r"))


def test_samples_is_passed_to_functions_that_accept_it():
    kernel = [[1.0] * M] * 8
    assert call(linearized(lambda prompts, completions: kernel, "rao", M)) == [0.0] * 8
    assert call(linearized(lambda prompts, completions, samples: [[1.0] * samples] * 8, "rao", M)) == [0.0] * 8


@pytest.mark.parametrize(
    ("objective", "least"), [("bon:4:unbiased", 5), ("wor:4:unbiased", 5), ("dpp:4", 5), ("dpp:9", 10)]
)
def test_too_few_samples_are_refused(objective, least):
    reason = ", because TRL subtracts" if objective.endswith("unbiased") else r"\.$"
    with pytest.raises(ValueError, match=rf"{objective} with samples=4: expected at least {least} samples{reason}"):
        linearized(len, objective, 4)
    linearized(len, objective, least)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], "mean", 4), r"rewards \[\] of aggregate 'aggregate': expected at least one reward, and different names"),
        ((len, "mean", 4), r"expected several reward functions, \[f, g\] or .*; for a single function, use linearized"),
        (("f", "mean", 4), r"expected several reward functions"),
        (
            ([len, len], "mean", 4),
            r"rewards \['len', 'len'\] .* expected at least one reward, and different names; to name the rewards, "
            r"pass a mapping",
        ),
        (({"aggregate": len}, "mean", 4), r"rewards \['aggregate'\] of aggregate 'aggregate'"),
        (({"a": "org/model"}, "mean", 4), r"expected a reward function .*, got str"),
        (([len, sum], ["mean"], 4), r"objectives=\['mean'\]: expected one for each of the rewards \['len', 'sum'\]"),
        (({"a": len}, {"b": "mean"}, 4), r"objectives=\{'b': 'mean'\}: expected one for each"),
        (([len], [4], 4), r"objective=4: expected one of nlgrpo.objectives"),
        (([len], "mean", 1), r"samples=1"),
        (([len], "mean", 4, "max"), r"aggregate 'max' is not known"),
        (([len, sum], "mean", 4, "sum", [1.0]), r"expected one value per weight, \(1,\), got \(2,\)"),
        (
            ([len], "mean", 4, WeightedSum([1.0]), [1.0]),
            r"with weights=\[1.0\]: expected the name of an aggregate, or one of",
        ),
        (([len], "mean", 4, 3), r"aggregate=3 with weights=None: expected the name of an aggregate"),
    ],
)
def test_bad_arguments_of_an_aggregate_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        aggregated(*arguments)
