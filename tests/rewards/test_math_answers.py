"""The reward ``math`` against TRL's ``accuracy_reward``, and expressions that would never end."""

import os
import signal
import subprocess
import sys
import time

import pytest
from trl.rewards import accuracy_reward

from nlgrpo.rewards.processes.math_answers import SCRIPT, Math
from nlgrpo.rewards.processes.workers import NoAnswer, Worker, Workers
from nlgrpo.rewards.reward_functions import score
from nlgrpo.rewards.specs import load_reward

CASES = [
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"The answer is $\boxed{0.50}$.", r"\frac{1}{2}"),
    (r"\boxed{x(x+1)}", "$x^2+x$"),
    (r"\boxed{\{2, 1\}}", r"$\{1, 2\}$"),
    (r"\boxed{3} no, \boxed{4}", "4"),
    (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$"),
    (r"\boxed{10\%}", "0.1"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{[0, 1)}", "$[0,1)$"),
    (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}", r"$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"Final answer: $\frac{3}{4}$", "0.75"),
    ("the answer is 4", "4"),
    (r"\boxed{}", "4"),
    (r"\boxed{", "4"),
    ("", "4"),
    (r"\boxed{4}", "no number here"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{-3}", "3"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{\pi}", "3.14159"),
]


@pytest.fixture(scope="module")
def reward():
    return Math(column="answer", workers=1)


def test_it_is_trl_s_accuracy_reward(reward):
    texts, golds = zip(*CASES, strict=True)
    theirs = accuracy_reward([[{"role": "assistant", "content": text}] for text in texts], list(golds))
    assert reward(completions=list(texts), answer=list(golds)) == theirs
    assert {0.0, 1.0, None} == set(theirs)


def test_plain_expressions():
    assert Math(boxed=False, workers=1)(completions=["the answer is 1/2", "2"], answer=["0.5", "3"]) == [1.0, 0.0]


def test_through_the_path_of_a_training_step_with_logs_and_votes():
    texts = [r"\boxed{1/2}", r"\boxed{0.50}", r"\boxed{7}", "nothing"]
    reward = load_reward("m", "math(column='gold', workers=1)", voted=True)
    found = score([reward], prompts=["p"] * 4, completions=texts,
                  completion_ids=[[1]] * 4, columns={"gold": ["0.5"] * 4}, samples=4, step=0,
                  total_steps=1)  # fmt: skip
    assert found.values["m"].tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert found.answers["m"].tolist() == [[0, 0, 1, -1]]
    assert found.extra["answer_parsed"] == ["1/2", "1/2", "7", ""]
    assert found.metrics["math/timeouts"] == [0.0]


@pytest.mark.slow
def test_an_expression_that_never_ends_counts_as_wrong_and_the_next_one_works():
    reward, logged = Math(workers=1, seconds=0.5), {}
    values = reward(
        completions=[r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}"], answer=["3", "2"], log_metric=logged.__setitem__
    )
    assert values == [0.0, 1.0]
    assert logged == {"math/timeouts": 1.0}


# --- workers ----------------------------------------------------------------------------------------------------------

ECHO = """
import json, os, sys, time
print('"ready"', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question == "hang":
        time.sleep(60)
    if question == "end":
        os._exit(1)
    if question == "nonsense":
        print("{", flush=True)
        continue
    print(json.dumps([os.getpid(), question]), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    return tmp_path / "echo.py"


@pytest.mark.slow
def test_answers_are_in_the_order_of_the_questions_and_faulty_processes_are_replaced(script):
    workers = Workers(script, count=2, seconds=2.0)
    answers = workers.ask(["a", "hang", "b", "end", "c", "nonsense", "x" * 200_000])
    assert [answer and answer[1] for answer in answers] == ["a", None, "b", None, "c", None, "x" * 200_000]
    again = workers.ask(["d"] * 10)
    assert all(again)
    assert len({answer[0] for answer in again}) <= 2


def test_a_process_that_does_not_start(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    with pytest.raises(NoAnswer, match="the process has ended"):
        Worker(tmp_path / "broken.py").ask("a", 1.0)


@pytest.mark.slow
def test_no_process_is_left_when_the_trainer_is_killed():
    code = f"""
from pathlib import Path
from nlgrpo.rewards.processes.workers import Workers
workers = Workers(Path({str(SCRIPT)!r}), 2, 10.0)
workers.ask([{{"gold": "1", "text": "1", "boxed": True}}] * 4)
print(*[worker.process.pid for worker in [workers.idle.get(), workers.idle.get()] if worker.process], flush=True)
import time; time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert pids
        os.kill(trainer.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("seconds=0", "seconds must be above 0"),
        ("workers=-1", "workers must be a whole number"),
        ("x=1", "does not take 'x'"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_reward("m", f"math({arguments})")
