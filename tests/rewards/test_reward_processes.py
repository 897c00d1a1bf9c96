"""Rewards with ``process = true``: in the main thread of a process of their own, whatever they do there."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.helpers import environment

from nlgrpo.rewards.reward_functions import Reward, RewardError, check_columns, score
from nlgrpo.rewards.specs import load_reward

FILE = Path(__file__).with_name("user_rewards.py")
OUTPUTS = Path(__file__).with_name("user_outputs.py")
P, M = 2, 2
COUNT = P * M


def own(name, arguments="", **more):
    return load_reward("mine", f"{FILE}:{name}{arguments}", process=True, **more)


def scored(*rewards, answer=("1", "2", "3", "4"), completions=("a", "bb", "ccc", "dddd"), **more):
    return score(list(rewards), prompts=["q"] * COUNT, completions=list(completions), completion_ids=[[1]] * COUNT,
                 columns={"answer": list(answer)}, samples=M, step=3, total_steps=9, **more)  # fmt: skip


def values(reward, **more):
    return scored(reward, **more).values[reward.name].flatten().tolist()


def gone(pid):
    limit = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_functions_have_the_values_that_they_have_here():
    for name, expected in (("lengths", [1, 2, 3, 4]), ("generated", [1, 2, 3, 4]), ("later", [1, 2, 3, 4])):
        assert values(own(name)) == expected == values(load_reward("mine", f"{FILE}:{name}"))
    assert values(own("lengths", scale=-0.5)) == [-0.5, -1, -1.5, -2]


def test_it_runs_in_the_main_thread_of_one_process_that_is_kept():
    assert values(own("alarmed")) == [1.0] * 4
    reward = own("process")
    [pid] = set(values(reward))
    assert pid != os.getpid()
    assert set(values(reward)) == {pid}
    counted = own("counted")
    assert [values(counted)[0] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_what_it_logs_and_prints_passes_through(capfd):
    found = scored(own("logs"))
    assert found.metrics == {"steps": [3.0]}
    assert found.extra == {"upper": ["A", "BB", "CCC", "DDDD"]}
    printed = capfd.readouterr()
    assert printed.out == "printed by the reward\n"
    assert "complained by the reward\n" in printed.err


@pytest.fixture(scope="module")
def returns():
    return load_reward("mine", f"{OUTPUTS}:returns", process=True)


@pytest.mark.parametrize("kind", ["generator", "map", "array", "tensor", "nested", "scalars"])
def test_it_may_return_what_it_may_return_here(returns, kind):
    expected = pytest.approx([1.0, 0.5, 1.0, math.nan], nan_ok=True)
    assert values(load_reward("mine", f"{OUTPUTS}:returns"), answer=[kind] * 4) == expected
    assert values(returns, answer=[kind] * 4) == expected


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("dict", "type dict, not a list"),
        ("text", "type str, not a list"),
        ("short", "3 values for 4 completions"),
        ("endless", "5 values for 4|more than 4 values for 4"),
        ("infinite", "returned inf"),
        ("text inside", "returned '1.0'"),
    ],
)
def test_what_is_refused_here_is_refused_there(returns, kind, says):
    for reward in (load_reward("mine", f"{OUTPUTS}:returns"), returns):
        with pytest.raises(RewardError, match=rf"reward 'mine' .*({says})"):
            scored(reward, answer=[kind] * 4)


def test_an_error_keeps_its_type_text_and_traceback():
    with pytest.raises(RewardError, match=r"'mine' raised KeyError: 'gold' \(step 3, prompts 0 to 1") as error:
        scored(own("fails"))
    assert f'File "{FILE}"' in str(error.value.__cause__)
    assert 'raise KeyError("gold")' in str(error.value.__cause__)
    reward = own("fails", on_error="skip")
    assert scored(reward).skipped.all()
    pid = reward.function.idle[0].process.pid
    assert scored(reward).skipped.all()
    assert reward.function.idle[0].process.pid == pid  # an error ends no process


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hangs_in_c", "swallows"])
def test_over_the_limit_its_process_is_ended_and_started_again(name):
    reward = own(name, timeout=0.5, on_error="skip")
    pid = reward.function.idle[0].process.pid
    begun = time.monotonic()
    assert scored(reward, answer=["hang"] * 4).skipped.all()
    assert time.monotonic() - begun < 5
    gone(pid)
    with pytest.raises(RewardError, match=r"'mine' did not return within its timeout of 0.5 s"):
        scored(own(name, timeout=0.5), answer=["hang"] * 4)
    if name == "hangs_in_c":
        assert values(reward) == [1, 2, 3, 4]


def test_a_process_that_ends_is_an_error_and_replaced():
    reward = own("exits", on_error="skip")
    assert scored(reward).skipped.all()
    with pytest.raises(RewardError, match="'mine' raised ProcessEnded: the process has ended with exit status 3"):
        scored(own("exits"))
    lengths = own("lengths")
    os.kill(lengths.function.idle[0].process.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert values(lengths) == [1, 2, 3, 4]


def test_its_input_is_empty():
    assert values(own("reads")) == [0.0] * 4


def test_signatures_columns_and_votes_are_those_of_the_function():
    with pytest.raises(ValueError, match=r"reward 'mine' needs 'answer'\. Columns of the data: source"):
        check_columns([own("later")], ["source"])
    reward = own("Voted", "(scale=2.0)", voted=True)
    check_columns([reward], ["answer"])
    found = scored(reward, completions=["a", "ab", "b", ""], answer=["a", "a", "b", "c"])
    assert found.values["mine"].tolist() == [[2.0, 0.0], [2.0, 0.0]]
    assert found.answers["mine"].tolist() == [[0, 0], [0, -1]]
    assert reward.function.source_file == str(FILE)


def test_a_kernel_in_a_process():
    assert scored(own("alike", pairwise=True)).values["mine"].tolist() == [[[1.0, 1.0]] * 2] * 2


def test_composites_and_built_in_rewards_in_a_process():
    part = f"{FILE}:alarmed"
    both = load_reward("x", f"weighted(parts={{{part!r}: 1.0, 'regex(pattern=\"b\")': 2.0}})", process=True)
    assert values(both) == [1.0, 3.0, 1.0, 1.0]


def test_a_function_or_an_object_of_a_module():
    import user_rewards

    assert values(Reward("f", user_rewards.lengths, process=True)) == [1, 2, 3, 4]
    assert values(Reward("o", user_rewards.Voted(3.0), process=True), answer=["a", "x", "x", "x"]) == [3, 0, 0, 0]


def test_several_run_at_the_same_time():
    import user_rewards

    rewards = [Reward(name, user_rewards.later, process=True) for name in "ab"]
    found = scored(*rewards, Reward("here", user_rewards.lengths))
    assert [found.values[name].flatten().tolist() for name in ("a", "b", "here")] == [[1, 2, 3, 4]] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Reward("x", lambda: [], process=True), r"reward 'x' with process = true: .*'file.py:function'"),
        (lambda: own("missing"), r"reward 'mine' = .* has no 'missing'"),
        (lambda: load_reward("x", "no.such:function", process=True), r"reward 'x' = .*No module named 'no'"),
        (lambda: load_reward("x", "length(target=1)", process=True), "length needs scale"),
    ],
)
def test_what_cannot_be_loaded_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_arguments_that_cannot_be_sent_are_named():
    with pytest.raises(RewardError, match=r"'mine' failed: its arguments cannot be sent to a process"):
        scored(own("later"), answer=[lambda: None] * 4)


TRAINER = """
import sys, threading
from nlgrpo.rewards.reward_functions import score
from nlgrpo.rewards.specs import load_reward

def polite(completions, **_):
    return [float("please" in text) for text in completions]

if __name__ == "__main__":
    from nlgrpo.rewards.reward_functions import Reward
    given = dict(prompts=["q"], completions=["please"], completion_ids=[[1]], columns={"answer": ["hang"]}, samples=1,
                 step=0, total_steps=1)
    print(score([Reward("polite", polite, process=True)], **given).values["polite"].tolist())
    reward = load_reward("mine", sys.argv[1], process=True)
    print(reward.function.idle[0].process.pid, flush=True)
    score([reward], **given)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_trainer_also_while_it_hangs(tmp_path, number):
    """The function of a script, and a process that holds its interpreter's lock when the trainer is killed."""
    (tmp_path / "train.py").write_text(TRAINER)
    command = [sys.executable, "train.py", f"{FILE}:hangs_in_c"]
    trainer = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "[[1.0]]\n"
    pid = int(trainer.stdout.readline())
    time.sleep(1.0)
    assert Path(f"/proc/{pid}").exists()
    trainer.send_signal(number)
    trainer.wait(10)
    trainer.stdout.close()
    gone(pid)
