"""What rewards may return: all that TRL accepts, with the same values; the rest is refused by name."""

import asyncio
import itertools
import logging
import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from nlgrpo.integrations.trl import linearized
from nlgrpo.rewards.classifiers import Ensemble
from nlgrpo.rewards.composite import Gated, Weighted
from nlgrpo.rewards.environment import EnvironmentReward
from nlgrpo.rewards.history import FIRST
from nlgrpo.rewards.reward_functions import Reward, RewardError, score

P, M = 2, 2
COUNT = P * M
NAN = math.nan


def scored(*rewards, completions=("a", "b", "c", "d"), **columns):
    return score(list(rewards), prompts=["q"] * COUNT, completions=list(completions), completion_ids=[[1]] * COUNT,
                 columns=columns, samples=M, step=0, total_steps=9)  # fmt: skip


def values(output, **more):
    function = output if callable(output) else lambda completions, **_: output
    return scored(Reward("mine", function, **more)).values["mine"].flatten().tolist()


def trl_values(output):
    """Rewards computed by TRL's trainer."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0, max_steps=9),
        reward_funcs=[lambda **_: output, lambda **_: [0.0] * COUNT],  # it warns if all rewards abstain
        reward_processing_classes=[None] * 2,
        reward_func_names=["mine", "zero"],
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
    )
    inputs = [{"prompt": "q"}] * COUNT
    return GRPOTrainer._calculate_rewards(trainer, inputs, ["q"] * COUNT, list("abcd"), [[1]] * COUNT)[:, 0].tolist()


OUTPUTS = {
    "list": lambda: [1, 0.5, True, None],
    "nan": lambda: [1, 0.5, True, NAN],
    "tuple": lambda: (1, 0.5, True, None),
    "generator": lambda: (x for x in [1, 0.5, True, None]),
    "map": lambda: map(float, [1, 0.5, 1, NAN]),
    "deque": lambda: deque([1, 0.5, 1.0, None]),
    "values of a dict": lambda: dict(enumerate([1, 0.5, True, None])).values(),
    "array": lambda: np.array([1, 0.5, 1, NAN], dtype=np.float16),
    "tensor": lambda: torch.tensor([1, 0.5, 1, NAN], dtype=torch.bfloat16),
    "gradient": lambda: torch.tensor([1, 0.5, 1, NAN], requires_grad=True),
    "scalars": lambda: [np.float32(1), torch.tensor(0.5), np.bool_(True), None],
    "exact": lambda: [Decimal(1), Fraction(1, 2), Decimal("1.0"), None],
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_trl_accepts_has_its_values(kind):
    expected = [1.0, 0.5, 1.0, NAN]
    assert trl_values(OUTPUTS[kind]()) == pytest.approx(expected, nan_ok=True)
    assert values(OUTPUTS[kind]()) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "output",
    [
        np.array([[1], [0.5], [1], [NAN]]),
        torch.tensor([[1], [0.5], [1], [NAN]], dtype=torch.bfloat16),
        [[1], [0.5], [True], [None]],
        [[1], (0.5,), [Decimal(1)], None],
        [torch.tensor([1.0]), np.array([0.5]), torch.tensor(True), None],
        np.array([Decimal(1), Fraction(1, 2), True, None], dtype=object),
        np.ma.masked_invalid([1, 0.5, 1, NAN]),
    ],
    ids=["array", "tensor", "lists", "mixed", "tensors", "objects", "masked"],
)
def test_columns_and_nested_numbers_are_accepted(output):
    assert values(output) == pytest.approx([1.0, 0.5, 1.0, NAN], nan_ok=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_a_gpu_is_accepted():
    output = torch.tensor([[1], [0.5], [1], [NAN]], dtype=torch.bfloat16, device="cuda")
    assert values(output) == pytest.approx([1.0, 0.5, 1.0, NAN], nan_ok=True)


def test_tables_of_pandas_are_accepted():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for output in (pandas.Series([1, 0.5, 1, NAN]), pandas.DataFrame({"reward": [1, 0.5, 1, NAN]})):
        assert values(output) == pytest.approx([1.0, 0.5, 1.0, NAN], nan_ok=True)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("1111", "of type str, not a list"),
        (b"1111", "of type bytes"),
        (dict.fromkeys(range(4), 1.0), "of type dict"),
        ({1.0, 2.0, 3.0, 4.0}, "of type set"),
        (dict.fromkeys(range(4)).keys(), "of type dict_keys"),
        (None, "of type NoneType"),
        (0.5, "of type float"),
        ([1.0] * 3, "3 values for 4 completions"),
        (np.ones((3, 1)), "3 values for 4 completions"),
        (np.ones((4, 2)), r"shape \(4, 2\) for 4 completions"),
        (torch.ones(1, 4), r"shape \(1, 4\) for 4 completions"),
        (torch.ones(2, 2), r"shape \(2, 2\) for 4 completions"),
        (torch.tensor(1.0), r"shape \(\) for 4 completions"),
        (itertools.count(), "more than 4 values for 4 completions"),
        ([1.0, math.inf, 1.0, 1.0], "returned inf"),
        ([1.0, Decimal("Infinity"), 1.0, 1.0], "Infinity"),
        ([1.0, "0.5", 1.0, 1.0], "returned '0.5'"),
        ([1.0, 1j, 1.0, 1.0], "returned 1j"),
        ([[1.0], [1.0, 2.0], [1.0], [1.0]], r"returned \[1.0\]"),
        ([1.0, {"score": 1.0}, 1.0, 1.0], "score"),
    ],
)
def test_anything_else_is_refused_with_the_name_and_what_came(output, says):
    with pytest.raises(RewardError, match=rf"reward 'mine' returned .*{says}|reward 'mine' {says}") as error:
        values(output)
    assert "None" in str(error.value)  # what was expected


def test_an_error_inside_a_generator_is_one_of_the_reward():
    def generates(completions, **_):
        yield 1.0
        raise KeyError("gold")

    with pytest.raises(RewardError, match="'mine' raised KeyError: 'gold'"):
        values(generates)

    def wrong(completions, **_):
        yield len(completions) + "x"

    with pytest.raises(RewardError, match="'mine' raised TypeError"):
        values(wrong)


def test_nan_is_counted_and_named_once_with_its_share(caplog):
    reward = Reward("mine", lambda completions, **_: [1.0, NAN, None, np.nan])
    with caplog.at_level(logging.WARNING):
        found = scored(reward, Reward("other", lambda completions, **_: [None] * 4))
        scored(reward)
    assert found.nans == {"mine": 2}
    assert found.joined(scored(Reward("new", reward.function)), ["mine", "other", "new"]).nans == {"mine": 2, "new": 2}
    record, _ = caplog.records
    assert "reward 'mine' returned NaN for 2 of 4 completions (50%)" in record.getMessage()
    assert "None" in record.getMessage()


def test_none_is_no_nan(caplog):
    with caplog.at_level(logging.WARNING):
        values([1.0, None, 2.0, 3.0])
    assert not caplog.records


# ---- composites, kernels and others ----


@pytest.mark.parametrize("kind", OUTPUTS)
def test_parts_of_composites_return_the_same(kind):
    part = lambda completions: OUTPUTS[kind]()  # noqa: E731
    assert values(Weighted({part: 2.0})) == pytest.approx([2.0, 1.0, 2.0, NAN], nan_ok=True)
    assert values(Gated(part, by=lambda completions: [1.0] * 4)) == pytest.approx([1, 0.5, 1, NAN], nan_ok=True)
    assert values(Gated(lambda completions: [5.0] * 4, by=part)) == pytest.approx([5.0, 0.0, 5.0, NAN], nan_ok=True)


def test_a_part_with_nan_or_a_wrong_result_is_named(caplog):
    def broken(completions):
        return [NAN, 1.0, 1.0, 1.0]

    def short(completions):
        return [1.0]

    with caplog.at_level(logging.WARNING):
        values(Weighted({broken: 1.0, (lambda completions: [1.0] * 4): 1.0}))
    assert "broken returned NaN for 1 of 4 completions" in caplog.text
    with pytest.raises(RewardError, match="short returned 1 values for 4 completions"):
        values(Weighted({short: 1.0}))


async def _async_part(completions):
    await asyncio.sleep(0)
    return map(float, [1, 2, 3, 4])


def test_an_async_part_may_return_an_iterator():
    assert values(Weighted({_async_part: 1.0})) == [1.0, 2.0, 3.0, 4.0]
    assert values(_async_part) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "rows",
    [
        lambda: ([1.0, 0.25] if i % 2 == 0 else (0.25, 1.0) for i in range(4)),
        lambda: torch.tensor([[1, 0.25], [0.25, 1]] * 2, dtype=torch.bfloat16),
        lambda: np.array([[1, 0.25], [0.25, 1]] * 2),
        lambda: [map(float, row) for row in [[1, 0.25], [0.25, 1]] * 2],
        lambda: [[Decimal(1), Fraction(1, 4)], [Fraction(1, 4), 1]] * 2,
    ],
    ids=["generator", "tensor", "array", "maps", "exact"],
)
def test_kernels_return_the_same_types(rows):
    reward = Reward("k", lambda completions, **_: rows(), pairwise=True)
    assert scored(reward).values["k"].tolist() == [[[1.0, 0.25], [0.25, 1.0]]] * 2


def test_a_kernel_abstains_with_none_or_a_row_of_nan(caplog):
    rows = [[1.0, 0.5], [0.5, 1.0], [NAN, NAN], [0.5, 1.0]]
    with caplog.at_level(logging.WARNING):
        found = scored(Reward("k", lambda completions, **_: rows, pairwise=True)).values["k"]
    assert found.isnan().tolist() == [[[False] * 2] * 2, [[True, True], [True, False]]]
    assert "NaN for 1 of 4" in caplog.text
    rows[2] = [1.0, NAN]  # a missing similarity of two completions is a fault
    with pytest.raises(RewardError, match="'k' returned nan in the row of a completion"):
        scored(Reward("k", lambda completions, **_: rows, pairwise=True))


@pytest.mark.parametrize(("rows", "says"), [("abcd", "type str"), ({}, "type dict"), ([[1.0, 1.0]] * 3, "3 rows")])
def test_wrong_kernels_are_named(rows, says):
    with pytest.raises(RewardError, match=rf"reward 'k' returned .*{says}.* for 4 completions in groups of 2"):
        scored(Reward("k", lambda completions, **_: rows, pairwise=True))


def test_an_ensemble_with_nan_has_no_number_whatever_the_order():
    ensemble = Ensemble.__new__(Ensemble)
    ensemble.members, ensemble.how = [None, None], "min"
    assert math.isnan(ensemble._combine([1.0, NAN]))
    assert math.isnan(ensemble._combine([NAN, 1.0]))
    assert ensemble._combine([2.0, 1.0]) == 1.0


def test_an_environment_without_a_reward_abstains():
    outcomes = [{"error": None, "reward": x, "metrics": {"m": x}} for x in (1.0, None, NAN, 0.0)]
    for reward in (EnvironmentReward(), EnvironmentReward("m")):
        found = scored(Reward("e", reward), environment=outcomes).values["e"].flatten().tolist()
        assert found == pytest.approx([1.0, NAN, NAN, 0.0], nan_ok=True)


@pytest.mark.parametrize("output", [(x for x in (1.0, 0.0, 2.0, 3.0)), np.array([[1.0], [0.0], [2.0], [3.0]])])
def test_the_wrapper_for_trl_reads_the_same(output):
    function = linearized(lambda prompts, completions: output, "mean", 2)
    found = function(prompts=["q"] * 4, completions=list("abcd"))
    assert found == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_the_wrapper_for_trl_counts_nan(caplog):
    function = linearized(lambda prompts, completions: [NAN, None, 1.0, 2.0], "mean", 4, "mine")
    for _ in range(2):
        assert function(prompts=["q"] * 4, completions=list("abcd")) == [None, None, -0.5, 0.5]
    [record] = caplog.records
    assert "reward 'mine' returned NaN for 1 of 4 completions (25%)" in record.getMessage()


@pytest.mark.parametrize("rows", [lambda: iter(torch.eye(4)), lambda: [map(float, row) for row in torch.eye(4)]])
def test_kernels_in_the_wrapper_for_trl_return_the_same_types(rows):
    function = linearized(lambda prompts, completions: rows(), "rao", 4)
    assert function(prompts=["q"] * 4, completions=list("abcd")) == pytest.approx([0.0] * 4)


@pytest.mark.parametrize("output", ["1111", dict.fromkeys(range(4), 1.0), {1.0, 2.0, 3.0, 4.0}, ["1", "2", "3", "4"]])
def test_the_wrapper_for_trl_refuses_texts_and_dicts(output):
    with pytest.raises(ValueError, match="expected a list of one finite number, or None"):
        linearized(lambda prompts, completions: output, "mean", 2)(prompts=["q"] * 4, completions=list("abcd"))


# ---- rewards that never vary ----


@pytest.mark.parametrize(
    ("output", "says"), [([0.0] * 4, "is 0 for all 20"), ([1.0] * 4, "is 1 for all 20"), ([None] * 4, "has no value")]
)
def test_a_reward_that_does_not_vary_is_named_once_with_completions(output, says, caplog):
    reward = Reward("mine", lambda completions, **_: output)
    with caplog.at_level(logging.WARNING):
        for _ in range(FIRST - 1):
            scored(reward)
        assert not caplog.records
        for _ in range(3):
            scored(reward)
    [record] = caplog.records
    message = record.getMessage()
    assert "reward 'mine'" in message
    assert says in message
    shown = "no value" if output[0] is None else f"{output[0]:g}"
    assert [line for line in message.splitlines() if line.startswith("  ")] == [f"  {shown} for {c!r}" for c in "abc"]


def test_a_reward_that_fails_always_is_named(caplog, capsys):
    def fails(**_):
        raise KeyError("gold")

    reward = Reward("mine", fails, on_error="skip")
    with caplog.at_level(logging.WARNING):
        for _ in range(FIRST):
            scored(reward)
    assert "'mine' raised KeyError: 'gold' (step 0, prompts 0 to 1).\n  Its traceback is above" in caplog.text
    assert capsys.readouterr().err.count('raise KeyError("gold")') == 1
    assert "reward 'mine' has no value (None, NaN, or it failed) for all 20 completions" in caplog.text


def test_a_reward_that_varies_is_not_named(caplog):
    outputs = itertools.chain([[0.0] * 4, [0.0, 0.0, None, 1.0]], itertools.repeat([0.0] * 4))
    reward = Reward("mine", lambda completions, **_: next(outputs))
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * FIRST):
            scored(reward)
    assert not caplog.records
