"""How commands end: mistakes of a user in one line with status 2, bugs of nlgrpo with their traceback and status 1."""

import errno
import faulthandler
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from support.helpers import REPOSITORY, environment, fork_ranks, tiny_model

import nlgrpo
from nlgrpo import cli, errors, train
from nlgrpo.engine.rollouts.sampler import Sampler
from nlgrpo.training.learner import Learner

pytestmark = pytest.mark.usefixtures("one_thread")

REWARDS = """
import os

def short(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]

def broken(completion_ids, **columns):
    return [table[0] for _ in completion_ids]

def on_rank_1(completion_ids, **columns):
    if os.environ.get("RANK") == "1":
        raise ConnectionError("the judge is down")
    return [1.0 for _ in completion_ids]

def no_kernel(completion_ids, samples, **columns):
    return [[1.0 if j == i % samples else 2.0 for j in range(samples)] for i in range(len(completion_ids))]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, prompts and rewards, and the current folder."""
    tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(6)))
    (tmp_path / "broken.jsonl").write_text('{"prompt": "w1"}\n{"prompt": \n')
    (tmp_path / "broken.toml").write_text("[optim\nlr = 1\n")
    (tmp_path / "unknown.toml").write_text("[optim]\nrate = 1\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(*more):
    return [
        "train", "blank", "--model.path=model", "--data.source=prompts.jsonl", "--rewards.x.function=rewards.py:short",
        "--rollout.prompts=2", "--rollout.samples=2", "--rollout.max-new-tokens=4", "--train.steps=2",
        "--evaluation.prompts=0", "--train.samples-every=0", "--train.out=run", *more,
    ]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "mase"], "unknown recipe 'mase'"),
        (["train", "nothere.toml"], "there is no configuration file nothere.toml"),
        (["train", "broken.toml"], "broken.toml"),
        (["train", "unknown.toml"], "rate"),
        (run_of("--optim.lr=-1"), "optim.lr = -1.0: allowed is >= 0"),
        (run_of("--rollout.samples=0"), "rollout.samples"),
        (run_of("--rewards.x.objective=bon:x"), "bon:x"),
        (run_of("--rewards.x.objective=bom:4"), "objective 'bom:4' is not known"),
        (run_of("--rewards.x.function=rewards.py:shrot"), "did you mean 'short'?"),
        (run_of("--rewards.x.function=lenght(target=3)"), "did you mean 'length'?"),
        (run_of("--rewards.x.transform=bonfp"), "bonfp"),
        (run_of("--loss.aggregate=median"), "median"),
        (run_of("--data.source=nothere.jsonl"), "There is no file nothere.jsonl"),
        (run_of("--data.source=broken.jsonl"), "broken.jsonl"),
        (run_of("--data.prompt-column=question"), "has no column 'question'"),
        (run_of("--model.path=nothere"), "model 'nothere' is neither a directory"),
        (run_of("--model.path=."), "has no config.json"),
        (run_of("--train.out=file/run"), "file/run cannot be used as the folder of a run"),
        (run_of("--train.profile=5:9"), "train.profile = '5:9': the run has the steps 0 to 1"),
        (
            run_of("--rewards.x.function=rewards.py:no_kernel", "--rewards.x.objective=dpp:2", "--rollout.samples=4"),
            "rewards.x.objective: dpp:2",
        ),
        (["generate", "w1", "--model", "model", "--procedure", "bon:0"], "bon:0"),
        (["generate", "w1", "--model", "model", "--procedure", "bon:4", "--choose", "lenght()"], "lenght"),
        (["evaluate", "nothere", "--rewards.x.function=rewards.py:short", "--data.source=prompts.jsonl"], "nothere"),
        (["report", "nothere"], "nothere is not a folder"),
        (["report", "model"], "model is a model directory"),
        (["serve", "--model", "model", "--port", "PORT"], "PORT"),
        (["curves", "--transforms", "exp:x"], "exp:x"),
        (["merge", "model", "--out", "merged"], "model"),
        (["push", "model", "--repo", "a/b/c"], "a/b/c"),
    ],
)
def test_a_mistake_of_the_user_is_one_message(arguments, says, folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main([port if argument == "PORT" else argument for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert (port if says == "PORT" else says) in said
    assert "Traceback" not in said
    assert errors.REPORT not in said


def index(*_, **__):
    return [][0]


def shape(*_, **__):
    return torch.zeros(2) @ torch.zeros(3)


def strict(*_, **__):
    return list(zip([1], [1, 2], strict=True))


def key(*_, **__):
    return {"kl": 0.0}["reward"]


def attribute(*_, **__):
    return None.shape


def division(*_, **__):
    return 1 // 0


def call(*_, **__):
    return len()


def invariant(*_, **__):
    raise AssertionError("P x M")


def pure(*_, **__):
    raise ValueError("weights (3,) for M = 4")


def number(*_, **__):
    return int("x")


BUGS = [
    ("nlgrpo.training.learner.Learner.update", index, "IndexError"),
    ("nlgrpo.train.combine", shape, "RuntimeError"),
    ("nlgrpo.training.global_batch.GlobalBatch.advantages", strict, "ValueError: zip()"),
    ("nlgrpo.training.global_batch.GlobalBatch.metrics", key, "KeyError: 'reward'"),
    ("nlgrpo.engine.rollouts.sampler.Sampler.draw", attribute, "AttributeError"),
    ("nlgrpo.training.learner.Learner.reference_logprobs", division, "ZeroDivisionError"),
    ("nlgrpo.training.divergence.DivergenceWatch.look", call, "TypeError"),
    ("nlgrpo.training.trainer.Trainer.save", invariant, "AssertionError: P x M"),
    ("nlgrpo.training.global_batch.GlobalBatch.linearize", pure, "ValueError: weights (3,) for M = 4"),
    ("nlgrpo.train.build_setup", number, "ValueError: invalid literal"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "bug", "says"), BUGS)
def test_a_bug_shows_its_traceback(place, bug, says, folder, monkeypatch, capsys):
    monkeypatch.setattr(place, bug)
    assert cli.main(run_of("--loss.beta=0.1")) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert f"in {bug.__name__}\n" in said
    assert says in said
    assert said.endswith(errors.REPORT + "\n")


def test_code_of_the_user_shows_its_own_traceback(folder, capsys):
    assert cli.main(run_of("--rewards.x.function=rewards.py:broken")) == 2
    said = capsys.readouterr().err
    assert 'rewards.py", line 8, in broken' in said
    assert "NameError: name 'table' is not defined" in said
    assert "error: reward 'x' raised NameError: name 'table' is not defined" in said
    assert "nlgrpo/" not in said.partition("error: ")[0], "frames of nlgrpo are not of interest"
    assert errors.REPORT not in said


def test_debug_shows_the_traceback_of_a_mistake_too(folder, monkeypatch, capsys):
    monkeypatch.setenv(errors.DEBUG, "0")  # restored at the end
    assert cli.main(["report", "nothere", "--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "error: nothere is not a folder" in said
    assert errors.REPORT not in said


@pytest.mark.parametrize(
    ("word", "n", "said"),
    [
        ("trian", 1, "; did you mean 'train'?"),
        ("trai", 2, "; did you mean 'train' or 'trail'?"),
        ("zzz", 1, ". Known: all"),
    ],
)
def test_nearest_names_are_suggested(word, n, said):
    near = errors.nearest(word, {"train": 1, "trail": 2, "evaluate": 3}, n=n)
    assert errors.did_you_mean(near, ". Known: all") == said
    assert errors.did_you_mean([]) == "."


def test_the_class_of_users_errors_is_public():
    assert nlgrpo.UserError is errors.UserError
    assert issubclass(nlgrpo.UserError, ValueError)


# --- several ranks ----------------------------------------------------------------------------------------------------


def on_two_ranks(disturb, *more):
    def main():
        faulthandler.dump_traceback_later(60, exit=True)  # ranks that wait for each other
        disturb(int(os.environ["RANK"]))
        return train.main(run_of("--loss.beta=0.1", *more)[1:])

    return fork_ranks(main)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_bug_on_one_rank_is_shown_once_with_its_rank(failing, folder):
    def disturb(rank):
        if rank == failing:
            Learner.update = index

    ended = on_two_ranks(disturb)
    assert [process.status for process in ended] == [1, 1] or ended[1 - failing].status == 2  # it lost the connection
    assert "IndexError" in ended[failing].output
    assert f"This is rank {failing}." in ended[failing].output
    assert sum(process.output.count("Traceback") for process in ended) == 1


@pytest.mark.slow
def test_a_bug_on_all_ranks_is_shown_by_the_first(folder):
    def disturb(rank):
        Learner.update = index

    ended = on_two_ranks(disturb)
    assert [process.status for process in ended] == [1, 1]
    assert "This is rank 0." in ended[0].output
    assert "Traceback" not in ended[1].output


@pytest.mark.slow
def test_a_bug_before_a_collective_of_the_other_rank_ends_both(folder):
    """Sampling gathers the model, in which rank 0 waits."""

    def disturb(rank):
        if rank == 1:
            Sampler.draw = strict

    ended = on_two_ranks(disturb)
    assert ended[0].status != 0
    assert ended[1].status == 1
    assert "zip()" in ended[1].output
    assert "Traceback" not in ended[0].output


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_is_shown_with_its_traceback(folder):
    ended = on_two_ranks(lambda rank: None, "--rewards.x.function=rewards.py:on_rank_1")
    assert [process.status for process in ended] == [2, 2]
    assert "ConnectionError: the judge is down" in ended[1].output
    assert "error: reward 'x' raised ConnectionError: the judge is down" in ended[1].output
    assert "error: " not in ended[0].output


@pytest.mark.slow
def test_a_disk_that_fails_on_one_rank_is_one_line(folder):
    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/x.json")

    def disturb(rank):
        if rank == 1:
            Learner.update = fails

    ended = on_two_ranks(disturb)
    assert ended[1].status == 2
    assert "error: /data/x.json: Input/output error" in ended[1].output
    assert all("Traceback" not in process.output for process in ended)


def test_local_rank_without_a_launcher_hides_nothing(folder, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["report", "nothere"]) == 2
    assert "error: nothere is not a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mistake_on_two_ranks_is_shown_once(folder):
    for more in ("--optim.lr=-1", "--rewards.x.function=rewards.py:broken"):
        ended = on_two_ranks(lambda rank: None, more)
        assert [process.status for process in ended] == [2, 2]
        assert sum(process.output.count("error: ") for process in ended) == 1


@pytest.mark.slow
def test_torchrun_s_entry(folder):
    line = [sys.executable, str(REPOSITORY / "nlgrpo" / "train.py"), *run_of("--optim.lr=-1")[1:]]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 2
    assert "error: the configuration cannot be run:" in done.stderr
