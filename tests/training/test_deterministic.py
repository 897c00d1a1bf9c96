"""Runs with train.deterministic on a CPU: the same digits, nothing left on, and errors that name the op."""

import os

import pytest
import torch
from support.helpers import training_folder

from nlgrpo import train
from nlgrpo.config.schema import Config, LossConfig, RolloutConfig, TrainConfig
from nlgrpo.config.validate import check_config
from nlgrpo.model.decoder import load
from nlgrpo.runtime.seeding import WORKSPACE
from nlgrpo.training.learner import Learner
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

REWARDS = """
import torch


def shorter(completion_ids, log_metric, **kwargs):
    log_metric("deterministic", float(torch.are_deterministic_algorithms_enabled()))
    return [-abs(len(ids) - 4) / 10 for ids in completion_ids]
"""
ALGORITHMS = {
    "grpo": {"loss.beta": 0.05, "loss.epochs": 2, "loss.minibatches": 2},
    "gspo with adapters": {"loss.level": "sequence", "lora.rank": 2, "loss.correction": "tis:2"},
    "ppo": {"loss.algorithm": "ppo", "critic.trunk": "shared", "rollout.top_p": 0.9},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return training_folder(tmp_path_factory.mktemp("work"), REWARDS)


def run(work, out, **changes):
    options = {
        "model.path": work / "model",
        "data.source": work / "prompts.jsonl",
        "rewards.short.function": f"{work / 'rewards.py'}:shorter",
        "rollout.prompts": 4,
        "rollout.samples": 4,
        "rollout.max_new_tokens": 8,
        "train.micro_batch_tokens": 50,
        "train.steps": 2,
        "optim.lr": 0.01,
        "evaluation.prompts": 0,
        "train.out": out,
    }
    arguments = ["blank"]
    for name, value in (options | changes).items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return train.main(arguments)


def untimed(folder):
    lines = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "step_time", "perf/"))} for line in lines]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_a_cpu_no_digit_changes(work, tmp_path, algorithm):
    plain, exact = tmp_path / "plain", tmp_path / "exact"
    assert run(work, plain, **ALGORITHMS[algorithm]) == 0
    assert run(work, exact, **ALGORITHMS[algorithm], **{"train.deterministic": True}) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ
    seen = [[line.pop("deterministic") for line in lines] for lines in (untimed(plain), untimed(exact))]
    assert seen == [[0, 0], [1, 1]]
    without = [[{k: v for k, v in x.items() if k != "deterministic"} for x in untimed(out)] for out in (plain, exact)]
    assert without[0] == without[1]
    states = [load(out / "model").state_dict() for out in (plain, exact)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_run_may_resume_with_it(work, tmp_path, capsys):
    assert run(work, tmp_path / "run") == 0
    assert run(work, tmp_path / "run", **{"train.deterministic": True, "train.steps": 3}) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    assert [line["deterministic"] for line in untimed(tmp_path / "run")] == [0, 0, 1]


def test_the_error_names_the_op_and_the_setting(work, tmp_path, monkeypatch, capsys):
    update = Learner.update

    def with_put(learner, *arguments, **options):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        return update(learner, *arguments, **options)

    monkeypatch.setattr(Learner, "update", with_put)
    assert run(work, tmp_path / "run", **{"train.deterministic": True}) == 2
    error = capsys.readouterr().err
    assert "error: train.deterministic: PyTorch has no deterministic version of put_ on this device" in error
    assert "train.deterministic = false" in error
    assert not torch.are_deterministic_algorithms_enabled()


def test_completions_of_vllm_are_refused():
    config = Config(train=TrainConfig(deterministic=True), rollout=RolloutConfig(engine="vllm"))
    with pytest.raises(ValueError, match=r"train.deterministic: completions of vLLM depend on how it batches"):
        check_config(config)
    offline = Config(
        train=TrainConfig(deterministic=True), rollout=RolloutConfig(engine="vllm"), loss=LossConfig("dpo")
    )
    with pytest.raises(ValueError, match="the configuration cannot be run") as raised:  # of other things
        check_config(offline)
    assert "train.deterministic" not in str(raised.value)
