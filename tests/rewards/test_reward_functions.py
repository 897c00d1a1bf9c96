"""Rewards are called like in TRL, and their errors are handled."""

import asyncio
import logging
import math
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer

from nlgrpo.rewards.reward_functions import Reward, RewardError, Scores, score
from nlgrpo.rewards.specs import load_reward
from nlgrpo.runtime.supervision.stop_signal import StopSignal

P, M = 3, 2
COMPLETIONS = [f"answer {i}" for i in range(P * M)]
INPUTS = {
    "prompts": [f"question {i // M}" for i in range(P * M)],
    "completions": COMPLETIONS,
    "completion_ids": [[5] * (i + 1) for i in range(P * M)],
    "columns": {"answer": [str(i // M) for i in range(P * M)]},
    "samples": M,
    "step": 12,
    "total_steps": 40,
    "first_prompt": 6,
}


def chat(text, role="assistant"):
    return [{"role": role, "content": text}]


def scored(function, timeout=600.0, on_error="stop", **changes):
    reward = function if isinstance(function, Reward) else Reward("mine", function, timeout, on_error)
    return score([reward], **{**INPUTS, **changes})


def returning(value):
    return lambda completions, **_: value


# ---- the call ----


def test_values_are_prompt_major_and_float64():
    def count(completion_ids):
        return [len(ids) / 3 for ids in completion_ids]

    result = scored(count)
    assert isinstance(result, Scores)
    assert result.values["mine"].dtype == torch.float64
    assert result.values["mine"].tolist() == [[1 / 3, 2 / 3], [1, 4 / 3], [5 / 3, 2]]
    assert result.skipped.tolist() == [False] * P


def test_a_scale_multiplies_all_values_that_are_not_none():
    reward = Reward("mine", returning([1.0, None, -2, True, 0.0, 3]), scale=-0.25)
    values = scored(reward).values["mine"].flatten()
    assert values.nan_to_num(9).tolist() == [-0.25, 9, 0.5, -0.25, 0, -0.75]
    assert load_reward("x", "gsm8k()", scale=-2).scale == -2


@pytest.mark.parametrize("scale", [0, math.nan, math.inf, True, "2"])
def test_a_bad_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"reward 'mine': scale must be a finite number other than 0, got"):
        Reward("mine", len, scale=scale)


def test_a_scaled_value_that_overflows_is_an_error_of_the_reward():
    with pytest.raises(RewardError, match=r"'mine' returned 1e\+300, scaled by 1e\+09 \(step 12, prompt 6, sample 1\)"):
        scored(Reward("mine", returning([1, 1e300, 1, 1, 1, 1]), scale=1e9))


def trl_scores(functions, inputs, prompts, completions, completion_ids):
    """Rewards (P*M, m) computed by TRL's trainer."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=12, max_steps=40),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[str(i) for i in range(len(functions))],
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
    )
    values = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, completion_ids)
    loop.call_soon_threadsafe(loop.stop)
    return values


@pytest.mark.parametrize("conversation", [False, True])
def test_arguments_and_values_equal_those_of_trl(conversation):
    wrap = chat if conversation else str
    prompts, completions = [wrap(text) for text in INPUTS["prompts"]], [wrap(text) for text in COMPLETIONS]
    calls = []

    def spy(**arguments):
        calls.append(arguments)
        return [0.5, None, 2, True, -1.0, np.float32(0.25)]

    async def async_spy(prompts, completion_ids, answer, **arguments):
        calls.append(arguments)
        return [len(ids) + float(gold) for ids, gold in zip(completion_ids, answer, strict=True)]

    columns = {**INPUTS["columns"], "prompt": prompts, "source": list("abcdef")}
    inputs = [{name: column[i] for name, column in columns.items()} for i in range(P * M)]
    theirs = trl_scores([spy, async_spy], inputs, prompts, completions, INPUTS["completion_ids"])
    ours = score(
        [Reward("spy", spy), Reward("async", async_spy)],
        **{**INPUTS, "prompts": prompts, "completions": completions, "columns": columns},
    )
    for name, their_values in zip(ours.values, theirs.T, strict=True):
        torch.testing.assert_close(ours.values[name].flatten(), their_values.double(), equal_nan=True)
    by_size = sorted(calls, key=len)  # the two calls of async_spy, which names some arguments, then those of spy
    for theirs, ours in (by_size[:2], by_size[2:]):
        assert theirs.keys() == ours.keys()
        plain = theirs.keys() - {"trainer_state", "log_metric", "log_extra"}
        assert all(theirs[key] == ours[key] for key in plain)
        assert (theirs["trainer_state"].global_step, theirs["trainer_state"].max_steps) == (12, 40)
        assert (ours["trainer_state"].global_step, ours["trainer_state"].max_steps) == (12, 40)


def test_trl_rewards_run_unchanged():
    texts = ["<think>\nwell\n</think>\nyes", "<think>no end", "plain", "<think>a</think>b", "", "<think></think>"]
    ids = [[1, 2, 3] * i for i in range(P * M)]
    rewards = [
        load_reward("format", "trl.rewards:think_format_reward"),
        Reward("repetition", get_repetition_penalty_reward(ngram_size=2)),
        Reward("overlong", get_soft_overlong_punishment(max_completion_len=12, soft_punish_cache=8)),
    ]
    inputs = {**INPUTS, "completions": [chat(text) for text in texts], "completion_ids": ids}
    values = score(rewards, **inputs).values
    assert values["format"].flatten().tolist() == [1, 0, 0, 1, 0, 1]
    for name, function in (("repetition", rewards[1].function), ("overlong", rewards[2].function)):
        assert values[name].flatten().tolist() == function(completion_ids=ids, completions=None)


def test_a_function_gets_only_the_names_it_takes():
    def picky(answer, *, completions, source="none"):
        assert source == "none"
        return [float(a) for a in answer]

    assert scored(picky).values["mine"][:, 0].tolist() == [0, 1, 2]


def test_rewards_can_log_metrics_and_columns():
    def logs(completions, log_metric, log_extra):
        log_metric("loud", 0.5)
        log_metric("loud", torch.tensor(1.5))
        log_extra("words", [text[:1] for text in completions])
        return [0.0] * len(completions)

    found = scored(logs)
    assert found.metrics == {"loud": [0.5, 1.5]}
    assert found.extra == {"words": [text[:1] for text in INPUTS["completions"]]}


@pytest.mark.parametrize(
    "log",
    [
        lambda log_metric, log_extra: log_metric("a", "0.5"),
        lambda log_metric, log_extra: log_metric(0.5, "a"),
        lambda log_metric, log_extra: log_extra("a", [1]),
    ],
)
def test_a_bad_log_call_is_an_error_of_the_reward(log):
    def logs(completions, log_metric, log_extra):
        log(log_metric, log_extra)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"'mine' (raised|failed).*log_"):
        scored(logs)


def test_every_reward_gets_its_own_lists():
    def empties(prompts, completions, answer):
        count = len(prompts)
        for column in (prompts, completions, answer):
            column.clear()
        return [0.0] * count

    found = score([Reward("first", empties), Reward("second", empties)], **INPUTS)
    assert found.values["second"].shape == (P, M)


def test_a_reward_that_changes_its_arguments_changes_no_data():
    columns = {"parts": [[[1], {"a": [2]}]] * (P * M), "answer": ["x"] * (P * M)}
    conversations = [chat(f"question {i // M}", "user") for i in range(P * M)]

    def counts(prompts, completion_ids, parts, **_):
        found = [len(p) + len(p[0]) + len(p[1]["a"]) + len(ids) for p, ids in zip(parts, completion_ids, strict=True)]
        for prompt, part, ids in zip(prompts, parts, completion_ids, strict=True):
            part[0].append(0)
            part[1]["a"].append(0)
            part.append(0)
            ids.append(0)
            prompt[0]["content"] = ""
        return found

    changes = {"prompts": conversations, "columns": columns}
    for _ in range(2):
        found = score([Reward("first", counts), Reward("second", counts)], **{**INPUTS, **changes})
        for values in found.values.values():
            assert values.flatten().tolist() == [4 + i + 1 for i in range(P * M)]
    assert conversations[0] == chat("question 0", "user")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(P * M).to_sparse(), "returned a Tensor that cannot be converted to a list"),
        (torch.zeros(P * M, device="meta"), "returned a Tensor that cannot be converted to a list"),
    ],
)
def test_an_unreadable_tensor_is_an_error_of_the_reward(value, says):
    with pytest.raises(RewardError, match=says):
        scored(returning(value))
    assert scored(returning(value), on_error="skip").skipped.all()


def test_a_pandas_series_is_accepted():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    values = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert scored(returning(pandas.Series(values))).values["mine"].flatten().tolist() == values


@pytest.mark.parametrize("timeout", [600.0, math.inf])
def test_an_awaitable_of_a_sync_function_is_awaited(timeout):
    async def two(count):
        await asyncio.sleep(0.01)
        return [2.0] * count

    async def fails():
        raise KeyError("gone")

    assert scored(lambda completions, **_: two(len(completions)), timeout).values["mine"].min() == 2
    with pytest.raises(RewardError, match="raised KeyError: 'gone'"):
        scored(lambda **_: fails(), timeout)


@pytest.mark.parametrize(
    "value",
    [
        [0, 1.5, None, True, np.float16(2), torch.tensor(3.0)],
        (0, 1.5, None, 1, np.int64(2), Ellipsis),
        np.array([0, 1.5, np.nan, 1, 2, 3], dtype=np.float32),
        torch.tensor([0, 1.5, math.nan, 1, 2, 3], requires_grad=True),
    ],
    ids=["list", "tuple", "array", "tensor"],
)
def test_numbers_of_many_types_are_accepted(value):
    """All stand for [0, 1.5, None, 1, 2, 3]; the Ellipsis is refused."""
    expected = torch.tensor([0, 1.5, math.nan, 1, 2, 3]).double()
    result = scored(returning(value), on_error="skip")
    bad = [2] if isinstance(value, tuple) else []
    assert result.skipped.nonzero().flatten().tolist() == bad
    keep = ~result.skipped
    torch.testing.assert_close(result.values["mine"][keep], expected.view(P, M)[keep], equal_nan=True)


def test_async_functions_run_together_and_keep_their_loop():
    gate = asyncio.Semaphore(1)  # bound to the first loop in which a task waits for it
    loops = []

    async def first(completions, **_):
        loops.append(asyncio.get_running_loop())
        async with gate:
            await asyncio.sleep(0.01)
        met.set()
        return [1.0] * len(completions)

    async def second(completions, **_):
        async with gate:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(met.wait(), 5)
        return [2.0] * len(completions)

    for _ in range(2):
        met = asyncio.Event()
        rewards = [Reward("b", second), Reward("plain", returning([0.0] * P * M)), Reward("a", first)]
        values = score(rewards, **INPUTS).values
        assert list(values) == ["b", "plain", "a"]
        assert [values[name][0, 0].item() for name in values] == [2, 0, 1]
    assert loops[0] is loops[1]


def test_async_functions_run_while_sync_ones_run():
    done = threading.Event()

    async def sets(completions, **_):
        done.set()
        return [0.0] * len(completions)

    def waits(completions, **_):
        return [float(done.wait(5))] * len(completions)

    assert score([Reward("waits", waits), Reward("sets", sets)], **INPUTS).values["waits"].min() == 1


def test_async_objects_are_awaited():
    class Constant:
        async def __call__(self, completions, bonus=0.0, **_):
            return [bonus] * len(completions)

    assert scored(Constant()).values["mine"].max() == 0


@pytest.mark.parametrize("timeout", [600.0, math.inf])
def test_a_reward_runs_in_the_main_thread(timeout):
    def alarmed(completions, **_):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))  # raises in any other thread
        return [0.0] * len(completions)

    assert scored(alarmed, timeout).values["mine"].max() == 0


# ---- errors ----


def test_the_full_message_for_a_wrong_count():
    with pytest.raises(RewardError) as error:
        scored(returning([0.0] * 5))
    assert str(error.value) == (
        "reward 'mine' returned 5 values for 6 completions (step 12, prompts 6 to 8).\n"
        "  A reward function returns one float or None per completion; "
        'see the guide "Your own model, data and reward".'
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "of type NoneType, not a list"),
        ("abcdef", "of type str, not a list"),
        (0.5, "of type float"),
        (dict.fromkeys(range(6), 1.0), "of type dict"),
        (torch.zeros(6, 2), r"shape \(6, 2\)"),
        (np.float32(1), "of type float32"),
        (torch.tensor(1.0), r"shape \(\)"),
        ([], "0 values for 6 completions"),
    ],
)
def test_the_message_of_a_failed_call_names_the_batch(value, says):
    with pytest.raises(RewardError, match=rf"reward 'mine' returned .*{says}.*\(step 12, prompts 6 to 8\)"):
        scored(returning(value))
    result = scored(returning(value), on_error="skip")
    assert result.skipped.all()
    assert result.values["mine"].isnan().all()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ("1.0", "'1.0'"),
        ([1.0], r"\[1.0\]"),
        (1j, "1j"),
        (10**400, "10000"),
        (torch.tensor([1.0, 2.0]), "tensor"),
        (torch.tensor(math.inf), "tensor"),
        (np.str_("x"), "'x'"),
    ],
)
def test_the_message_of_a_bad_value_names_its_completion_and_skip_drops_its_group(value, says):
    values = [0.0, 1.0, 2.0, value, 4.0, None]
    with pytest.raises(RewardError, match=rf"'mine' returned .*{says}.*\(step 12, prompt 7, sample 1\)") as error:
        scored(returning(values))
    assert "prompt:     'question 1'" in str(error.value)
    assert "completion: 'answer 3'" in str(error.value)

    result = scored(returning(values), on_error="skip")
    assert result.skipped.tolist() == [False, True, False]
    expected = torch.tensor([[0, 1], [math.nan, math.nan], [4, math.nan]]).double()
    torch.testing.assert_close(result.values["mine"], expected, equal_nan=True)


ERRORS = [KeyError("gold"), SystemExit(3), TimeoutError("server"), asyncio.CancelledError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["sync", "inline", "async", "task"])
def test_an_exception_of_a_reward_is_chained(error, kind):
    def fails(**_):
        raise error

    async def fails_async(**_):
        raise error

    async def fails_in_a_task(**_):
        await asyncio.create_task(fails_async())

    function = {"async": fails_async, "task": fails_in_a_task}.get(kind, fails)
    timeout = math.inf if kind == "inline" else 600.0
    with StopSignal(math.inf):  # as in training: Ctrl-C does not raise
        with pytest.raises(RewardError, match=rf"raised {type(error).__name__}:.*step 12, prompts 6 to 8") as caught:
            scored(function, timeout)
        assert type(caught.value.__cause__).__name__ == type(error).__name__
        assert scored(function, timeout, on_error="skip").skipped.all()


def test_ctrl_c_is_not_an_error_of_the_reward():
    def interrupted(**_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            scored(interrupted, timeout=math.inf, on_error="skip")
        with StopSignal(math.inf):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):  # of a second Ctrl-C
                scored(interrupted, timeout=math.inf, on_error="skip")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async", "blocking async"])
def test_a_reward_that_hangs_times_out(kind):
    release, cancelled = threading.Event(), threading.Event()

    def hangs(**_):
        release.wait(30)

    async def hangs_async(**_):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def blocks(**_):
        release.wait(30)

    async def healthy(completions, **_):
        return [1.0] * len(completions)

    function = {"sync": hangs, "async": hangs_async, "blocking async": blocks}[kind]
    started = time.monotonic()
    with pytest.raises(
        RewardError, match=r"'mine' did not return within its timeout of 0.2 s \(step 12, prompts 6 to 8"
    ):
        scored(function, timeout=0.2)
    assert 0.2 <= time.monotonic() - started < 2
    if kind == "async":
        assert cancelled.wait(5)
    result = score([Reward("hung", function, 0.2, "skip"), Reward("fine", returning([1.0] * P * M))], **INPUTS)
    assert result.skipped.all()
    assert result.values["fine"].eq(1).all()
    assert scored(healthy, timeout=10).values["mine"].eq(1).all()  # in a new event loop if the old one is blocked
    release.set()


def test_skipped_groups_are_logged_and_combined_over_rewards(caplog):
    one = Reward("one", returning([0.0, 0.0, 0.0, -math.inf, math.inf, 0.0]), on_error="skip")
    two = Reward("two", returning([math.inf, 1.0, 1.0, 1.0, 1.0, None]), on_error="skip")
    with caplog.at_level(logging.WARNING, logger="nlgrpo.rewards.reward_functions"):
        result = score([one, two], **INPUTS)
    assert result.skipped.tolist() == [True, True, True]
    assert result.values["two"][1:].tolist()[0] == [1, 1]
    assert ["Dropped 2 of 3 groups" in record.getMessage() for record in caplog.records] == [True, False]
    assert "reward 'two' returned inf (step 12, prompt 6, sample 0)" in caplog.records[1].getMessage()


def test_a_missing_argument_stops_the_run_even_if_errors_are_skipped():
    with pytest.raises(RewardError, match=r"'mine' takes 'gold', which nothing provides .*\n.*answer"):
        scored(lambda completions, gold: [0.0] * P * M, on_error="skip")


def test_long_texts_are_shortened_in_messages():
    prompts = [chat("x" * 10_000, "user")] * P * M
    with pytest.raises(RewardError) as error:
        scored(returning([math.inf] * 6), prompts=prompts, completions=[chat("y" * 10_000)] * 6)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "change",
    [{"samples": 4}, {"samples": 0}, {"completions": ["a"]}, {"completion_ids": [[1]]}, {"columns": {"answer": ["1"]}}],
)
def test_lists_of_different_lengths_are_refused(change):
    with pytest.raises(ValueError, match="items in every list"):
        scored(returning([0.0] * 6), **change)


def test_two_rewards_with_the_same_name_are_refused():
    with pytest.raises(ValueError, match="must have different names"):
        score([Reward("a", returning([0.0] * 6))] * 2, **INPUTS)


def test_no_prompts_and_no_rewards_are_fine():
    empty = {**INPUTS, "prompts": [], "completions": [], "completion_ids": [], "columns": {}}
    assert scored(returning([]), **empty).values["mine"].shape == (0, M)
    assert score([], **INPUTS).values == {}
    assert score([], **INPUTS).skipped.tolist() == [False] * P
