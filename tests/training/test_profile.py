"""Profiles of some steps: the files, the phases in them, and what is refused."""

import gzip
import json

import pytest
from support.helpers import tiny_model

from nlgrpo import cli, train
from nlgrpo.runtime.profiling import steps_of
from nlgrpo.training.tracking.run_files import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

REWARDS = "def short(completion_ids, **columns):\n    return [-float(len(ids)) for ids in completion_ids]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiny_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(6)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(*more):
    return [
        "blank", "--model.path=model", "--data.source=prompts.jsonl", "--rewards.x.function=rewards.py:short",
        "--rollout.prompts=2", "--rollout.samples=2", "--rollout.max-new-tokens=4", "--train.steps=4",
        "--evaluation.prompts=0", "--train.samples-every=0", "--train.out=run", *more,
    ]  # fmt: skip


def phases_in(folder):
    """Number of ranges of each name that a trace has as annotations."""
    with gzip.open(folder / "run" / "profile" / "rank-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in names}


def test_the_trace_has_the_phases_of_the_steps(folder):
    assert train.main(run_of("--train.profile=1:3")) == 0
    found = phases_in(folder)
    for phase in ("generate", "rewards", "linearize", "update"):
        assert found[phase] == 2
    assert len(read_jsonl(folder / "run" / "metrics.jsonl")) == 4


def test_a_run_that_ends_before_the_last_step_writes_its_profile(folder):
    assert train.main(run_of("--train.profile=2:9")) == 0
    assert phases_in(folder)["update"] == 2


@pytest.mark.slow
def test_a_profile_changes_no_digit_and_may_come_when_a_run_resumes(folder):
    assert train.main(run_of("--train.steps=2")) == 0
    assert not (folder / "run" / "profile").exists()
    assert train.main(run_of("--train.profile=2:3")) == 0
    assert phases_in(folder)["update"] == 1
    resumed = read_jsonl(folder / "run" / "metrics.jsonl")
    assert train.main(run_of("--train.out=plain")) == 0
    plain = read_jsonl(folder / "plain" / "metrics.jsonl")
    assert [row["loss"] for row in resumed] == [row["loss"] for row in plain]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["5", "3:1", "3:3", "a:b", "-1:2", ":4"])
def test_other_texts_are_refused(text, folder, capsys):
    with pytest.raises(ValueError, match="expected FIRST:LAST"):
        steps_of(text)
    assert train.main(run_of(f"--train.profile={text}")) == 2
    assert "train.profile = " in capsys.readouterr().err


@pytest.fixture
def pairs(folder):
    rows = [{"prompt": f"w{i}", "chosen": " w1 w2", "rejected": " w3"} for i in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["reward-model", "train", "--model.path=model", "--data.source=pairs.jsonl", "--evaluation.pairs=0",
            "--train.pairs=4", "--train.out=run"]  # fmt: skip


def test_a_reward_model_is_profiled_too(folder, pairs):
    assert cli.main([*pairs, "--train.profile=1:3"]) == 0
    assert phases_in(folder)["update"] == 2


def test_what_is_no_range_is_refused_for_a_reward_model_too(pairs, capsys):
    assert cli.main([*pairs, "--train.profile=3"]) == 2
    assert "train.profile = '3': expected FIRST:LAST" in capsys.readouterr().err
