"""Runs whose rewards need the main thread, hang, or never vary."""

import json

import pytest
from support.helpers import training_folder
from support.runs import arguments

from nlgrpo import train

REWARDS = '''
import signal, threading, time


def alarmed(completion_ids, **kwargs):
    """As many rewards with math-verify: any error is 0."""
    grades = []
    for ids in completion_ids:
        try:
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(5)
            grades.append(float(len(ids)))
        except Exception:
            grades.append(0.0)
        finally:
            try:
                signal.alarm(0)
            except Exception:
                pass
    return grades


def hangs(completion_ids, trainer_state, **kwargs):
    while trainer_state.global_step == 1:
        try:
            time.sleep(600)
        except:
            pass
    return [float(len(ids)) for ids in completion_ids]


def nothing(completions, **kwargs):
    return [0.0 for text in completions]
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return training_folder(tmp_path_factory.mktemp("work"), REWARDS)


def logged(work, out):
    return [json.loads(line) for line in (work / out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("process", [False, True])
def test_a_reward_with_an_alarm_has_its_values(work, process):
    out = f"alarm {process}"
    changes = {"rewards__alarmed__process": process, "rewards__alarmed__objective": "mean", "train__steps": 2}
    assert train.main(arguments(work, out, {"alarmed": "alarmed"}, **changes)) == 0
    for line in logged(work, out):
        assert line["reward"] == pytest.approx(line["completions/mean_length"])


@pytest.mark.slow
@pytest.mark.parametrize("process", [False, True])
def test_a_reward_that_hangs_is_skipped_and_the_run_goes_on(work, process, capsys):
    out = f"hangs {process}"
    changes = {
        "rewards__hangs__process": process, "rewards__hangs__on_error": "skip", "rewards__hangs__timeout": 1,
        "train__steps": 3,
    }  # fmt: skip
    assert train.main(arguments(work, out, {"hangs": "hangs"}, **changes)) == 0
    assert [line["rewards/dropped_groups"] for line in logged(work, out)] == [0, 4, 0]


@pytest.mark.slow
def test_a_run_that_a_reward_has_stopped_resumes_in_a_process(work, capsys):
    changes = {"rewards__hangs__timeout": 1, "train__steps": 3}
    assert train.main(arguments(work, "resumed", {"hangs": "hangs"}, **changes)) == 2
    assert "error: reward 'hangs' did not return within its timeout of 1 s (step 1" in capsys.readouterr().err
    changes |= {"rewards__hangs__process": True, "rewards__hangs__timeout": 2}
    assert train.main(arguments(work, "resumed", {"hangs": "hangs"}, **changes)) == 2
    said = capsys.readouterr()
    assert "resuming from step 1" in said.out
    assert "did not return within its timeout of 2 s (step 1" in said.err


def test_a_reward_that_is_always_0_is_named_in_a_run(work, caplog):
    assert train.main(arguments(work, "nothing", {"nothing": "nothing"}, train__steps=6)) == 0
    messages = [record.getMessage() for record in caplog.records if "nothing" in record.getMessage()]
    assert len(messages) == 1
    assert "reward 'nothing' is 0 for all 80 completions of its first 5 calls" in messages[0]
    assert messages[0].count("\n  0 for '") == 3
