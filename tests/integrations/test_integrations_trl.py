"""`linearized` in TRL 1.16's trainer: its advantages compared with the first variation, by enumeration and autograd.

Also `aggregated` on two ranks. test_integrations_trl_training.py tests all kinds of objectives.

The expected values treat a group as a distribution over its M completions with probabilities p: R(p) is a sum over all
draws, and its first variation is autograd's gradient at p = 1/M.
"""

import asyncio
import functools
import math
import os

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from support.helpers import run_ranks, tiny_model
from support.trl_truths import M, of_aggregate, with_absent
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nlgrpo.integrations.trl import aggregated, linearized
from nlgrpo.objectives.registry import BestOfN, SoftBestOfN

ACCURACY = [0.3, 1.7, -0.4, 0.3, 2.0, 2.0, -1.0, 0.1, 5.0, 4.0, 4.5, -3.0]  # three groups; ties in two of them
JUDGE = [0.9, -0.2, 0.4, 0.0, 1.0, 0.7, 0.2, -0.6, 0.3, 0.8, 0.1, -0.7]
SLOW = [0.5, 0.1, 1.3, 0.2, -0.9, 0.4, 0.6, 1.1, -0.3, 0.7, 0.9, 0.0]
WEIGHTS = [0.7, -1.3, 0.4]
NONE = [None] * len(ACCURACY)


# ---- TRL's trainer with fixed rewards ----


class Scripted:
    """Fixed rewards by name, and delays of the async ones. ``part``: slice of this rank's completions."""

    def __init__(self):
        self.values, self.delays, self.part = {}, {"judge": 0.0, "slow": 0.0}, slice(None)

    def accuracy(self, completions, **_):
        return self.values["accuracy"][self.part]

    async def judge(self, completions, **_):
        await asyncio.sleep(self.delays["judge"])
        return self.values["judge"][self.part]

    async def slow(self, completions, **_):
        await asyncio.sleep(self.delays["slow"])
        return self.values["slow"][self.part]


def make_trainer(folder, rewards, batch):
    args = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to="none", num_generations=M,
        num_generations_eval=2, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        max_completion_length=3, gradient_checkpointing=False, scale_rewards="none", reward_weights=WEIGHTS,
        temperature=0.9, logging_steps=1, disable_tqdm=True, save_strategy="no", max_steps=1,
    )  # fmt: skip
    functions = [
        linearized(rewards.accuracy, "bon:3", M),
        linearized(rewards.judge, SoftBestOfN(0.5), M),
        linearized(rewards.slow, "mean", M),
    ]
    data = Dataset.from_dict({"prompt": ["w4 w5", "w6 w7", "w8"]})
    model, tokenizer = (load.from_pretrained(folder) for load in (AutoModelForCausalLM, AutoTokenizer))
    return GRPOTrainer(model, functions, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, rewards = tmp_path_factory.mktemp("trl"), Scripted()
    tiny_model(folder)
    return make_trainer(folder, rewards, batch=12), rewards


def step(made, accuracy, judge=NONE, slow=NONE, mode="train"):
    """TRL's advantages and metrics for one generation batch."""
    trainer, rewards = made
    rewards.values = {"accuracy": accuracy, "judge": judge, "slow": slow}
    trainer.model.train(mode == "train")
    trainer._metrics[mode].clear()
    inputs = [{"prompt": f"w{4 + i // M}"} for i in range(len(accuracy))]
    advantages = trainer._generate_and_score_completions(inputs)["advantages"]
    return advantages.double(), {name: values[0] for name, values in trainer._metrics[mode].items()}


def close(ours, truth):
    assert truth.abs().max() > 0.1
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


def test_advantages_are_the_first_variation(made):
    advantages, _ = step(made, ACCURACY)
    close(advantages, WEIGHTS[0] * with_absent("bon:3", ACCURACY)[0])


def test_async_rewards_and_weighted_sums(made):
    advantages, _ = step(made, ACCURACY, JUDGE, SLOW)
    parts = zip(WEIGHTS, ("bon:3", "soft:0.5", "mean"), (ACCURACY, JUDGE, SLOW), strict=True)
    close(advantages, sum(w * with_absent(objective, values)[0] for w, objective, values in parts))


def test_mean_gives_the_same_advantages_as_trl_alone(made, monkeypatch):
    trainer, rewards = made
    monkeypatch.setattr(trainer, "reward_funcs", [rewards.accuracy, *trainer.reward_funcs[1:]])
    bare, _ = step(made, ACCURACY)
    monkeypatch.setattr(trainer, "reward_funcs", [linearized(rewards.accuracy, "mean", M), *trainer.reward_funcs[1:]])
    ours, _ = step(made, ACCURACY)
    assert bare.abs().max() > 1
    torch.testing.assert_close(ours, bare, rtol=0, atol=1e-5)


def test_none_abstains(made):
    """In one reward or both; with one reward or no reward left in a group."""
    accuracy, judge = list(ACCURACY), list(JUDGE)
    accuracy[1] = accuracy[4] = accuracy[5] = accuracy[6] = None
    accuracy[8:] = [None] * M
    judge[0], judge[1], judge[8:] = math.nan, None, [None] * M
    missing = [None if x is None or math.isnan(x) else x for x in judge]
    advantages, metrics = step(made, accuracy, judge)
    close(advantages, WEIGHTS[0] * with_absent("bon:3", accuracy)[0] + WEIGHTS[1] * with_absent("soft:0.5", missing)[0])
    assert advantages[8:].tolist() == [0] * M
    assert metrics["rewards/accuracy/mean"] == pytest.approx(sum(x for x in accuracy if x is not None) / 4)
    assert metrics["objective/judge"] == pytest.approx(with_absent("soft:0.5", missing)[1])


def test_none_stays_none():
    values = [1.0, None, 3.0, math.nan, *[None] * M]
    ours = linearized(lambda **_: values, "bon:3", M)(prompts=["a"] * 8, completions=["b"] * 8)
    assert [x is None for x in ours] == [False, True, False, True, True, True, True, True]
    truth, _ = with_absent("bon:3", [1.0, None, 3.0, None])
    assert ours[::2][:2] == pytest.approx(truth[::2].tolist())


def test_logged_metrics(made):
    _, metrics = step(made, ACCURACY, JUDGE, SLOW)
    for name, objective, values in (("accuracy", "bon:3", ACCURACY), ("judge", "soft:0.5", JUDGE)):
        assert metrics[f"rewards/{name}/mean"] == pytest.approx(sum(values) / len(values))
        assert metrics[f"objective/{name}"] == pytest.approx(with_absent(objective, values)[1])
        assert metrics[f"rewards/{name}_linearized/mean"] == pytest.approx(0, abs=1e-6)


def test_the_logged_mean_is_right_if_ranks_have_different_numbers_of_rewards():
    """TRL logs the mean over all calls of ``log_metric`` on all ranks."""
    calls, on_ranks = {}, ([1.0, None, None, 5.0, *[None] * M], [2.0, 4.0, 4.0, 6.0, 0.5, 1.5, -1.0, 3.0])
    for values in on_ranks:
        log = lambda name, value: calls.setdefault(name, []).append(value)  # noqa: E731
        linearized(lambda values=values, **_: values, "bon:3", M, "mine")(["p"] * 8, ["c"] * 8, log_metric=log)
    means = {name: sum(numbers) / len(numbers) for name, numbers in calls.items()}
    everywhere = [*on_ranks[0], *on_ranks[1]]
    assert means["rewards/mine/mean"] == pytest.approx(26 / 10)
    assert means["objective/mine"] == pytest.approx(with_absent("bon:3", everywhere)[1])


def test_an_evaluation_uses_num_generations_eval(made):
    """Groups of 2, although groups of 4 would fit."""
    advantages, metrics = step(made, ACCURACY, mode="eval")
    truth, value = with_absent("bon:3", ACCURACY, size=2)
    close(advantages, WEIGHTS[0] * truth)
    assert metrics["objective/accuracy"] == pytest.approx(value)


def test_a_run_logs_metrics_of_training_and_evaluation(made, monkeypatch):
    trainer, rewards = made
    rewards.values = {"accuracy": ACCURACY, "judge": JUDGE, "slow": SLOW}
    trainer.train()
    monkeypatch.setattr(rewards, "part", slice(6))  # three prompts, two completions each
    trainer.evaluate()
    logs = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    assert logs["objective/accuracy"] == pytest.approx(with_absent("bon:3", ACCURACY)[1], rel=1e-5)
    assert {"rewards/slow/mean", "eval_rewards/slow/mean", "eval_objective/judge"} <= logs.keys()
    assert logs["grad_norm"] > 0


# ---- invalid arguments and return values ----


def call(values, count, samples=M):
    return linearized(lambda **_: values, "bon:3", samples, name="mine")(["p"] * count, ["c"] * count)


def test_an_estimator_that_draws_all_samples_is_refused():
    """Its baseline is not the mean of the group, which TRL subtracts."""
    linearized(len, "bon:3:unbiased", 4)
    with pytest.raises(ValueError, match="samples=4: expected at least 5 samples, because TRL subtracts the mean"):
        linearized(len, "bon:4:unbiased", 4)


def test_another_number_of_generations_is_refused(made, monkeypatch):
    trainer, rewards = made
    monkeypatch.setattr(trainer, "reward_funcs", [linearized(rewards.accuracy, "bon:3", 3), *trainer.reward_funcs[1:]])
    with pytest.raises(ValueError, match=r"samples=3, but the trainer's num_generations is 4"):
        step(made, ACCURACY)


@pytest.mark.parametrize(
    ("values", "count", "message"),
    [
        ([1.0] * 7, 7, r"7 completions on each of 1 rank cannot be split into groups of 4"),
        ([1.0] * 3, 4, r"'mine' returned 3 values for 4 completions"),
        ([1.0, 2.0, -math.inf, None], 4, r"'mine' returned -inf for completion 2; expected a list of one finite"),
        (None, 4, r"'mine' returned a value of type NoneType, not a list, .*; expected a list of one"),
        (["good", 1, 2, 3], 4, r"'mine' returned 'good' for completion 0; expected a list"),
    ],
)
def test_bad_rewards_are_refused(values, count, message):
    with pytest.raises(ValueError, match=message):
        call(values, count)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("org/reward-model", "bon:4", 4), r"expected a reward function .*, got str"),
        ((torch.nn.Linear(2, 1), "bon:4", 4), r"got Linear; for a reward model, write a function"),
        ((len, "bon:4", 1), r"samples=1: expected TRL's num_generations"),
        ((len, "bon:4", 4.0), r"samples=4.0: expected"),
        ((len, "best:4", 4), r"'best:4' is not known"),
        ((len, 4, 4), r"objective=4: expected one of nlgrpo.objectives"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        linearized(*arguments)


def test_names_of_wrapped_functions():
    class Judge:
        async def __call__(self, completions, **_):
            return [1.0] * len(completions)

    def accuracy(completions, **_):
        return [1.0] * len(completions)

    names = [
        linearized(f, BestOfN(4), 4, name).__name__
        for f, name in ((accuracy, None), (functools.partial(accuracy, k=1), None), (Judge(), None), (accuracy, "mine"))
    ]
    assert names == [f"{name}_linearized" for name in ("accuracy", "accuracy", "Judge", "mine")]
    assert asyncio.run(linearized(Judge(), "bon:2", 2)(prompts=["p"] * 2, completions=["c"] * 2)) == [0, 0]


# ---- two ranks with six completions each: the second of three groups is on both ----


def work(rank, folder):
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= ranks | {"ACCELERATE_USE_CPU": "true"}
    # The parent of this fork may have used accelerate with one rank.
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.save(scored(rank, folder), folder / f"{rank}.pt")


def scored(rank, folder):
    rewards = Scripted()
    trainer = make_trainer(folder, rewards, batch=6)
    rewards.part = slice(6 * rank, 6 * rank + 6)
    # Answers arrive in a different order on each rank.
    rewards.delays = {"judge": 0.3 * (rank == 0), "slow": 0.3 * (rank == 1)}
    trainer.model.train()
    rewards.values = {"accuracy": ACCURACY, "judge": JUDGE, "slow": SLOW}
    output = trainer._generate_and_score_completions([{"prompt": "w4"}] * 6)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return {
        "advantages": output["advantages"],
        "metrics": metrics,
        "together": together(trainer, rewards),
        "whole": whole_groups(rank),
        "few": refusal(linearized(lambda **_: [1.0] * 5, "mean", M), 5),
        "kernel": refusal(linearized(lambda **_: None, "rao", M, "alike"), 6),
    }


AGGREGATED = {"accuracy": "bon:3", "judge": "soft:0.5", "slow": "mean"}


def smooth_min(values):
    return -(-0.7 * values).exp().mean().log() / 0.7


def together(trainer, rewards):
    """TRL's advantages for an aggregate of all three rewards, and its value."""
    functions = [getattr(rewards, name) for name in AGGREGATED]
    others = [  # with weight 0; they add collectives, which must not be mixed up
        aggregated([rewards.slow, rewards.judge], "mean", M, "min", name="other"),
        linearized(rewards.slow, "bon:3", M),
    ]
    trainer.reward_funcs = [aggregated(functions, list(AGGREGATED.values()), M, "smooth_min:0.7"), *others]
    trainer.reward_weights = torch.tensor([1.0, 0.0, 0.0])
    trainer._metrics["train"].clear()
    output = trainer._generate_and_score_completions([{"prompt": "w4"}] * 6)
    return output["advantages"], trainer._metrics["train"]["objective/aggregate"]


def whole_groups(rank):
    """One group per rank; the second reward abstains on rank 0."""
    a, b = (values[4 * rank : 4 * rank + 4] for values in (ACCURACY, JUDGE))
    logged = {}
    functions = {"a": lambda **_: a, "b": lambda **_: b if rank else [None] * M}
    function = aggregated(functions, ["bon:3", "soft:0.5"], M, "smooth_min:0.7")
    ours = function(prompts=["p"] * M, completions=["c"] * M, log_metric=logged.__setitem__)
    return ours, logged["objective/aggregate"]


def refusal(function, count):
    try:
        function(prompts=["p"] * count, completions=["c"] * count)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder)
    run_ranks(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_groups_on_two_ranks(ranks):
    parts = zip(WEIGHTS, ("bon:3", "soft:0.5", "mean"), (ACCURACY, JUDGE, SLOW), strict=True)
    truth = sum(w * with_absent(objective, values)[0] for w, objective, values in parts)
    close(torch.cat([rank["advantages"] for rank in ranks]).double(), truth)


@pytest.mark.slow
def test_metrics_and_refusals_on_two_ranks(ranks):
    for rank in ranks:
        assert rank["metrics"]["rewards/accuracy/mean"] == pytest.approx(sum(ACCURACY) / len(ACCURACY))
        assert rank["metrics"]["objective/judge"] == pytest.approx(with_absent("soft:0.5", JUDGE)[1])
        assert "5 completions on each of 2 ranks cannot be split into groups of 4" in rank["few"]
        assert "'alike' needs all 4 samples of a prompt on one rank, but this rank has 6 completions" in rank["kernel"]
        assert "per_device_train_batch_size" in rank["kernel"]


def test_an_aggregate_of_groups_on_two_ranks(ranks):
    values = {"accuracy": ACCURACY, "judge": JUDGE, "slow": SLOW}
    truth, aggregate = of_aggregate(
        smooth_min, [with_absent(objective, values[name]) for name, objective in AGGREGATED.items()]
    )
    close(torch.cat([rank["together"][0] for rank in ranks]).double(), truth)
    assert [rank["together"][1] for rank in ranks] == [[pytest.approx(aggregate)]] * 2


def test_an_aggregate_uses_the_values_of_all_ranks(ranks):
    """No group is split; the mean of a reward is over the ranks on which it does not abstain."""
    b = [None] * M + JUDGE[M : 2 * M]
    truth, aggregate = of_aggregate(smooth_min, [with_absent("bon:3", ACCURACY[: 2 * M]), with_absent("soft:0.5", b)])
    close(torch.tensor([x for rank in ranks for x in rank["whole"][0]], dtype=torch.float64), truth)
    alone, _ = of_aggregate(smooth_min, [with_absent("bon:3", ACCURACY[M : 2 * M]), with_absent("soft:0.5", b[M:])])
    assert (alone - truth[M:]).abs().max() > 0.01, "rank 1 alone would have another result"
    assert [rank["whole"][1] for rank in ranks] == [pytest.approx(aggregate)] * 2
