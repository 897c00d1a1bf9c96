"""``weighted`` and ``gated`` against sums by hand, through the path of a training step; the penalty against TRL's."""

import asyncio

import pytest
from trl.rewards import get_soft_overlong_punishment

from nlgrpo.rewards import specs
from nlgrpo.rewards.builtin import Gsm8k, Length, Overlong, Regex
from nlgrpo.rewards.composite import Gated, Weighted
from nlgrpo.rewards.reward_functions import Reward, RewardError, check_columns, score
from nlgrpo.rewards.specs import load_reward

TEXTS = ["<think>a</think> 4", "4", "<think>b</think> 5", ""]


def scores(reward, texts=TEXTS, **columns):
    count, ids = len(texts), [list(range(len(text))) for text in texts]
    found = score([reward], prompts=["p"] * count, completions=texts, completion_ids=ids, columns=columns,
                  samples=count, step=0, total_steps=1)  # fmt: skip
    values = found.values[reward.name].flatten().tolist()
    return [None if x != x else x for x in values], found


def test_a_weighted_sum_of_specs():
    spec = "weighted(parts={'gsm8k()': 2.0, 'overlong(limit=10, margin=5)': 0.5, 'regex(pattern=\"think\")': -1})"
    values, found = scores(load_reward("x", spec, voted=True), answer=["4"] * 4)
    lengths = [len(text) for text in TEXTS]
    penalty = get_soft_overlong_punishment(10, 5)([[0] * n for n in lengths])
    assert values == pytest.approx([2 + 0.5 * penalty[0] - 1, 2.0 + 0.5 * penalty[1], 0.5 * penalty[2] - 1, 0.0])
    assert found.answers["x"].tolist() == [[0, 0, 1, -1]]  # those of gsm8k


def test_parts_that_abstain_are_left_out():
    none = [1.0, None, None, None]
    other = [0.5, 0.25, None, 1.0]
    both = Weighted([(lambda completions: none, 2.0), (lambda completions: other, 4.0)])
    assert scores(Reward("x", both))[0] == [4.0, 1.0, None, 4.0]


def test_a_gate():
    spec = "gated(reward='gsm8k()', by='regex(pattern=\"<think>.*</think>\")', otherwise=-1.0)"
    assert scores(load_reward("x", spec), answer=["4"] * 4)[0] == [1.0, -1.0, 0.0, -1.0]
    gate = Gated(lambda completions: [None, None, 3.0, 4.0], lambda completions: [0.0, 1.0, 1.0, None])
    assert scores(Reward("x", gate))[0] == [0.0, None, 3.0, None]
    graded = Gated(Length(target=1, scale=1), by=lambda completions: [0.4, 0.5, 0.6, 0.0], at_least=0.5, otherwise=9)
    assert scores(Reward("x", graded))[0] == [9.0, 0.0, -(17.0**2), 9.0]


def test_composites_of_composites_async_parts_and_columns():
    async def slow(completions, weights, **_):
        await asyncio.sleep(0.01)
        return [float(weight) for weight in weights]

    inner = Weighted({slow: 1.0, Length(target=0, scale=1.0): 0.0})
    reward = Reward("x", Gated(inner, by=Regex("4")))
    assert reward.function.data_columns == ("weights",)
    check_columns([reward], ["weights"])
    with pytest.raises(ValueError, match=r"reward 'x' needs 'weights'\. Columns of the data: none"):
        check_columns([reward], [])
    assert scores(reward, weights=[1, 2, 3, 4])[0] == [1.0, 2.0, 0.0, 0.0]
    assert Weighted({Gsm8k("gold"): 1.0}).data_columns == ("gold",)


def test_models_inside_are_in_the_memory_plan():
    part, gate = 'classifier(path="a")', 'classifier(path="b", dtype="bfloat16")'
    spec = f"gated(reward={f'weighted(parts={ ({part: 1.0})!r})'!r}, by={gate!r})"
    assert specs.models(spec) == [("a", "float32"), ("b", "bfloat16")]


def test_a_part_that_fails_is_named():
    reward = Reward("x", Weighted({Length(target=0, scale=1.0): 1.0, (lambda completions: [1.0]): 1.0}))
    with pytest.raises(RewardError, match="failed: <lambda> returned 1 values for 4 completions"):
        scores(reward)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("weighted()", "weighted needs parts"),
        ("weighted(parts={})", "parts must have at least one reward"),
        ("weighted(parts={'length(target=1)': 1.0})", "length needs scale"),
        ("weighted(parts={'regex(pattern=\"a\")': 'x'})", "a weight must be a finite number, got 'x'"),
        ("weighted(parts={'lenght(target=1)': 1.0})", "there is no reward 'lenght'; did you mean 'length'?"),
        ("gated(reward='gsm8k()')", "gated needs by"),
        ("gated(reward='gsm8k()', by='regex(pattern=\"a\")', at_least='x')", "at_least must be a finite number"),
        ("overlong(limit=0)", "expected 0 <= margin <= limit"),
        ("overlong(limit=5, margin=6)", "expected 0 <= margin <= limit"),
        ("overlong(limit=5.5)", "limit must be a whole number of tokens"),
    ],
)
def test_invalid_arguments(spec, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_reward("x", spec)


@pytest.mark.parametrize(("limit", "margin"), [(100, 20), (10, 10), (7, 1), (5, 0)])
def test_the_penalty_is_trl_s(limit, margin):
    ids = [list(range(length)) for length in range(limit + 10)]
    expected = get_soft_overlong_punishment(limit, margin)(ids) if margin else [-float(len(x) > limit) for x in ids]
    assert Overlong(limit, margin)(completion_ids=ids) == pytest.approx(expected)
