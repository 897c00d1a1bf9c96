"""`linearized` and `aggregated` called without a trainer: abstention, sync and async functions, what is refused."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from test_integrations_trl_training import PAIRWISE, TRUTH, M, numbers, of_aggregate, zeros

from nlgrpo.integrations.trl import aggregated, linearized
from nlgrpo.objectives.aggregation import SmoothMin, WeightedSum

A = [0.3, 1.7, -0.4, 0.3, 2.0, 2.0, -1.0, 0.1]  # two groups
B = [0.9, -0.2, 0.4, 0.0, 1.0, 0.7, 0.2, -0.6]
GAP = [0.5, None, 1.3, 0.2, None, None, None, None]


def call(function, count=8, **columns):
    out = function(prompts=["p"] * count, completions=["c"] * count, **columns)
    return asyncio.run(out) if asyncio.iscoroutine(out) else out


def giving(values):
    return lambda **_: values


def kernel_of(values):
    """Similarities of numbers of which some are None, with None for their rows."""
    there = numbers([math.nan if x is None else x for x in values]).view(-1, M)
    rows = (-(there[:, :, None] - there[:, None, :]).abs()).exp().flatten(0, 1).tolist()
    return [None if x is None else row for x, row in zip(values, rows, strict=True)]


def present(objective, values, size=M):
    """`expected` of the values that are there, spread over all with 0; of a kernel, of their likeness."""
    out, found = zeros(len(values)), []
    for i in range(0, len(values), size):
        there = [i + j for j in range(size) if values[i + j] is not None]
        if len(there) > (objective in PAIRWISE) * 2:
            data = numbers([values[j] for j in there])
            data = (-(data[:, None] - data).abs()).exp() if objective in PAIRWISE else data
            out[there], value = TRUTH[objective](data)
            found.append(value)
    return out, sum(found) / len(found)


def test_each_abstains_for_itself():
    """None only where all abstain; values are means over the groups that have one."""
    b = [None, None, *B[2:7], None]
    function = aggregated({"a": giving(GAP), "b": giving(b)}, ["bon:4", "soft:0.5"], M, "smooth_min:2", [0.3, 0.9])
    logged = {}
    ours = call(function, log_metric=lambda name, x: logged.setdefault(name, []).append(x))
    weights = numbers([0.25, 0.75])
    each = [present("bon:4", GAP), present("soft:0.5", b)]
    truth, worth = of_aggregate(lambda R: -(weights * (-2 * R).exp()).sum().log() / 2, each)
    assert [x is None for x in ours] == [False, True, False, False, False, False, False, True]
    assert [x or 0.0 for x in ours] == pytest.approx(truth.tolist())
    assert logged["objective/aggregate"] == pytest.approx([worth])
    assert sorted(logged) == ["objective/a", "objective/aggregate", "objective/b", "rewards/a/mean", "rewards/b/mean"]
    assert logged["rewards/a/mean"] == [0.5, 1.3, 0.2]


def test_a_kernel_function_abstains():
    values = [0.5, None, 1.3, 0.2, 0.1, None, None, 0.4]  # two are too few for a pair to tell them apart
    logged = []
    ours = call(linearized(giving(kernel_of(values)), "rao", M, "k"), log_metric=lambda *pair: logged.append(pair))
    truth, value = present("rao", values)
    assert [x is None for x in ours] == [x is None for x in values]
    assert [x or 0.0 for x in ours] == pytest.approx(truth.tolist())
    assert truth[4:].tolist() == [0.0] * 4
    assert logged == [("rewards/k/mean", pytest.approx(value))] * 3 + [("objective/k", pytest.approx(value))]
    with_numbers = [[math.nan] * M if row is None else row for row in kernel_of(values)]
    assert call(linearized(giving(numbers(with_numbers)), "rao", M)) == ours


def test_a_reward_that_is_given_nowhere_is_left_out():
    only = call(aggregated([giving(A)], "bon:4", M))
    for aggregate in ("sum", "min", SmoothMin(2.0)):
        logged = {}
        functions = {"a": giving(A), "nowhere": giving([None] * 8)}
        assert call(aggregated(functions, "bon:4", M, aggregate), log_metric=logged.__setitem__) == pytest.approx(only)
        assert "objective/nowhere" not in logged
        assert not any(math.isnan(x) for x in logged.values())


def test_a_sum_is_what_trl_adds():
    weighted = call(aggregated({"a": giving(A), "b": giving(B)}, {"b": "wor:3", "a": "mean"}, M, weights=[0.7, -1.3]))
    a, b = call(linearized(giving(A), "mean", M)), call(linearized(giving(B), "wor:3", M))
    assert weighted == pytest.approx([0.7 * x - 1.3 * y for x, y in zip(a, b, strict=True)])
    of_object = aggregated([giving(A)], "mean", M, WeightedSum([2.0]), name="twice")
    assert of_object.__name__ == "twice"
    assert call(of_object) == pytest.approx([2 * x for x in a])


def test_sync_and_async_functions_together():
    """The async one starts first; an error of a sync one ends it."""
    order = []

    async def slow(fails=False, **_):
        order.append("asks")
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            order.append("cancelled")
            raise
        return B

    def quick(fails=False, **_):
        order.append("computes")
        if fails:
            raise KeyError("quick")
        return A

    function = aggregated([quick, slow], "bon:4", M)
    assert asyncio.iscoroutinefunction(function)
    plain = call(aggregated({"a": giving(A), "b": giving(B)}, "bon:4", M))
    assert call(function) == plain
    assert order == ["asks", "computes"]

    async def failing():
        with pytest.raises(KeyError, match="quick"):
            await function(prompts=["p"] * 8, completions=["c"] * 8, fails=True)
        await asyncio.sleep(0.01)  # the loop goes on, as TRL's does
        return order[-2:]

    assert asyncio.run(failing()) == ["computes", "cancelled"]


def test_a_group_of_n_that_are_left_has_no_share():
    """Its baseline for n of n is not the mean, which TRL would subtract: all would get less than they should."""
    values = [0.5, None, 1.3, None, *A[4:]]
    logged = {}
    ours = call(linearized(giving(values), "bon:2:unbiased", M, "a"), log_metric=logged.__setitem__)
    assert ours[:4] == [0, None, 0, None]
    truth, _ = TRUTH["bon:2:unbiased"](numbers(A[4:]))
    assert ours[4:] == pytest.approx(truth.tolist())
    both = []
    call(linearized(giving(values), "bon:2:unbiased", M, "a"), log_metric=lambda *pair: both.append(pair))
    assert ("objective/a", pytest.approx(1.3)) in both  # a value it has


class Standing:
    """What is read of TRL's trainer."""

    num_generations, num_generations_eval = M, 2
    multi_objective_aggregation = "sum_then_normalize"

    def __init__(self, scale, training=True):
        self.scale_rewards, self.model, self.logged = scale, SimpleNamespace(training=training), {}

    def log(self, name, value):
        self.logged[name] = value


def test_an_evaluation_of_groups_that_are_too_small_has_no_value():
    trainer = Standing("none", training=False)
    sizes = []

    def alike(completions, samples, **_):
        sizes.append(samples)
        return [[1.0] * samples] * len(completions)

    functions = {"a": giving(A), "b": giving(B), "c": alike}
    assert (
        call(aggregated(functions, ["bon:3:unbiased", "bon:2:unbiased", "dpp:2"], M), log_metric=trainer.log)
        == [0.0] * 8
    )
    assert {"rewards/a/mean", "rewards/b/mean", "objective/b"} == trainer.logged.keys()
    assert sizes == [2]


def test_scaling_is_warned_of_once(caplog):
    function = linearized(giving(A), "bon:4", M)
    call(function, log_metric=Standing("none").log)
    assert not caplog.records
    first, second = Standing("group"), Standing("none")
    second.multi_objective_aggregation = "normalize_then_sum"
    for trainer in (first, first, second, second):
        call(function, log_metric=trainer.log)
        call(linearized(giving(B), "mean", M), log_metric=trainer.log)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "scale_rewards='group'" in caplog.records[0].getMessage()
    assert "multi_objective_aggregation='normalize_then_sum'" in caplog.records[1].getMessage()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[1.0] * 4] * 7, r"kernel function 'k' returned .* for 8 completions; expected a list of 4 similarities"),
        (None, r"'k' returned None for 8 completions"),
        (A, r"'k' returned 0.3 for completion 0; expected its 4 similarities with the completions of its group"),
        ([[1.0] * 4] * 7 + [[1.0] * 8], r"'k' returned 8 numbers for completion 7; expected its 4"),
        ([["one"] * 4] * 8, r"'k' returned \['one', 'one', 'one', 'one'\] for completion 0"),
        (
            [[1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4] * 2,
            r"kernel function 'k': the kernel of group 0, samples 0 and 1 is 0 and differs from that of the same two",
        ),
        ([[1.0] * 4] * 6 + [[1.0, 1.0, 1.0, math.inf]] * 2, r"'k': the kernel of group 1, samples 2 and 3 is inf"),
        ([[1.0] * 4, [1.0, 1.0, None, 1.0], *[[1.0] * 4] * 6], r"'k': the kernel of group 0, samples 1 and 2 is nan"),
    ],
)
def test_similarities_that_are_none_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        call(linearized(giving(values), "rao", M, "k"))


def test_a_kernel_is_no_reward():
    with pytest.raises(ValueError, match=r"reward 'r' returned .*; expected a list of one number or None a completion"):
        call(linearized(giving(torch.eye(M).repeat(2, 1)), "bon:4", M, "r"))
    with pytest.raises(ValueError, match="expected a list of one number or None a completion"):
        call(linearized(giving(list(torch.eye(M).repeat(2, 1))), "bon:4", M, "r"))


def test_samples_is_given_to_those_who_take_it():
    kernel = [[1.0] * M] * 8
    assert call(linearized(lambda prompts, completions: kernel, "rao", M)) == [0.0] * 8
    assert call(linearized(lambda prompts, completions, samples: [[1.0] * samples] * 8, "rao", M)) == [0.0] * 8


@pytest.mark.parametrize(
    ("objective", "least"), [("bon:4:unbiased", 5), ("wor:4:unbiased", 5), ("dpp:4", 5), ("dpp:9", 10)]
)
def test_too_few_samples_are_refused(objective, least):
    with pytest.raises(ValueError, match=rf"{objective} with samples=4: expected more samples, {least} at least"):
        linearized(len, objective, 4)
    linearized(len, objective, least)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], "mean", 4), r"rewards \[\] of aggregate 'aggregate': expected one at least"),
        ((len, "mean", 4), r"expected several reward functions, \[f, g\] or .*; for a single one there is linearized"),
        (("f", "mean", 4), r"expected several reward functions"),
        (([len, len], "mean", 4), r"rewards \['len', 'len'\] .* each with a name of its own; a mapping"),
        (({"aggregate": len}, "mean", 4), r"rewards \['aggregate'\] of aggregate 'aggregate'"),
        (({"a": "org/model"}, "mean", 4), r"expected a reward function .*, got str"),
        (([len, sum], ["mean"], 4), r"objectives=\['mean'\]: expected one for each of the rewards \['len', 'sum'\]"),
        (({"a": len}, {"b": "mean"}, 4), r"objectives=\{'b': 'mean'\}: expected one for each"),
        (([len], [4], 4), r"objective=4: expected one of nlgrpo.objectives"),
        (([len], "mean", 1), r"samples=1"),
        (([len], "mean", 4, "max"), r"aggregate 'max' is not known"),
        (([len, sum], "mean", 4, "sum", [1.0]), r"expected one value per weight, \(1,\), got \(2,\)"),
        (([len], "mean", 4, WeightedSum([1.0]), [1.0]), r"with weights=\[1.0\]: expected the name of one, or one of"),
        (([len], "mean", 4, 3), r"aggregate=3 with weights=None: expected the name"),
    ],
)
def test_bad_arguments_of_an_aggregate_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        aggregated(*arguments)
