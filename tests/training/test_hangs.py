"""Ranks that stop, hang or are interrupted: the run says which, ends, and resumes to the same result."""

import faulthandler
import os
import re
import signal
import time
from pathlib import Path

import pytest
from chaos import commands
from support.helpers import Forked, training_folder
from support.runs import arguments, same, steps_in

from nlgrpo import train
from nlgrpo.runtime.supervision import watchdog

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_figures")]

REWARDS = '''
import os, re, signal, sys, threading, time
from pathlib import Path

FOLDER = Path(__file__).parent


def digest(completions, trainer_state, **kwargs):
    """A reward that does what the file "RANK STEP" says, once."""
    plan = FOLDER / f"{os.environ.get('RANK', 0)} {trainer_state.global_step}"
    if plan.exists():
        code = plan.read_text()
        plan.unlink()
        (FOLDER / "began").write_text(str(time.time()))
        exec(compile(code, str(plan), "exec"))  # after exec of a text, Python exits by SIGINT
    return [len(set(text)) / 8 for text in completions]
'''
SILENT = 8.0  # seconds after which a stopped rank is named, in place of 30
STOPS = "time.sleep(3); os.kill(os.getpid(), signal.SIGSTOP)"
HOLDS_THE_LOCK = "re.match('(a+)+b', 'a' * 64)"
# A mutex that is locked twice: no signal interrupts it.
NEVER_RETURNS = """import ctypes
lock = ctypes.PyDLL(None).pthread_mutex_lock
mutex = ctypes.create_string_buffer(64)
lock(mutex)
lock(mutex)"""


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return training_folder(tmp_path_factory.mktemp("hangs"), REWARDS)


def options(work: Path, out: str, **more) -> list[str]:
    return arguments(work, out, {"digest": "digest"}, train__checkpoint_every=1, **more)


def run_two(options: list[str]) -> tuple[int, str, float]:
    """Train on two ranks, which are restarted once; return the exit status, the output, and when the error came."""

    def launch() -> int:
        watchdog.Watchdog.__init__.__kwdefaults__["silent"] = SILENT
        return commands.on_ranks(lambda *_: train.main(options), 2)(None, None)

    run = Forked(launch, OMP_NUM_THREADS="1", COLUMNS="200", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3")
    said = 0.0
    for line in run.lines():
        said = said or time.time() * line.startswith("error: ")
    status = os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1])
    return status, run.printed, said


@pytest.fixture(scope="module")
def undisturbed(work) -> Path:
    status, output, _ = run_two(options(work, "undisturbed"))
    assert status == 0, output
    return work / "undisturbed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_the_restart_is_equal(work, undisturbed, rank):
    (work / f"{rank} 3").write_text(STOPS)
    out = f"stopped {rank}"
    status, output, said = run_two(options(work, out))
    assert status == 0, output
    assert said - float((work / "began").read_text()) < 3 + SILENT + 30
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.match(
        rf"error: rank {rank} \(process \d+ on \S+, stopped by a signal\) has been silent for \d+ s. It was in the "
        r"phase 'rewards' of step 3 since \d\d:\d\d:\d\d; its stack was$",
        line,
    )
    stack = output[output.index(line) :].split("All ranks end.")[0]
    assert "in digest" in stack  # the main thread runs the reward
    assert "rewards/calling.py" in stack
    assert output.count("resuming from step 3") == 1
    assert same(work / out, undisturbed)


def test_a_reward_that_holds_the_interpreter_on_one_rank(work, undisturbed):
    (work / "1 2").write_text(NEVER_RETURNS)
    limits = {"train__timeout": 5, "rewards__digest__timeout": 5}
    status, output, said = run_two(options(work, "lock", **limits))
    assert status == 0, output
    assert 8 <= said - float((work / "began").read_text()) < 30  # reports come every 2 s
    assert re.search(r"^error: rank 1 \(process \d+ on \S+\) has been silent for 1\d s", output, re.MULTILINE)
    assert "resuming from step 2" in output
    assert same(work / "lock", undisturbed)


def test_a_rank_that_hangs_outside_of_a_reward(work, undisturbed):
    """In a process of the main thread of one rank, which no timeout of a reward covers."""
    (work / "0 2").write_text(
        "from nlgrpo.training.global_batch import GlobalBatch\nGlobalBatch.gather = lambda *_: time.sleep(600)\n"
    )
    status, output, _ = run_two(options(work, "hangs", train__timeout=5))
    assert status == 0, output
    assert re.search(r"^error: no rank has made progress for \d+ s \(train.timeout\)$", output, re.MULTILINE)
    blamed = [line for line in output.splitlines() if re.match(r"rank \d \(process", line)]
    assert "hangs in the phase 'linearize' of step 2" in blamed[0]
    assert blamed[0].startswith("rank 0 (")
    assert "waits for the others in the phase 'linearize' of step 2" in blamed[1]
    assert "time.sleep(600)" in output or "in <lambda>" in output
    assert same(work / "hangs", undisturbed)


@pytest.mark.parametrize("seconds", ["600", "inf"])
def test_a_keyboard_interrupt_in_a_reward_is_its_error(work, seconds):
    (work / "0 3").write_text("raise KeyboardInterrupt")
    given = [*options(work, f"interrupt {seconds}"), "--rewards.digest.timeout", seconds]
    ended = Forked(lambda: train.main(given)).end()
    assert ended.status == 2
    [line] = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: reward 'digest' raised KeyboardInterrupt:")
    assert steps_in(work / f"interrupt {seconds}") == [2, 3]


def test_sigterm_ends_a_run_whose_reward_hangs(work):
    (work / "0 3").write_text(HOLDS_THE_LOCK)
    given = options(work, "sigterm", train__grace_period=2)
    (work / "began").unlink(missing_ok=True)

    def main() -> int:
        faulthandler.disable()  # pytest's prints elsewhere
        return train.main(given)

    run = Forked(main)
    while not (work / "began").exists():
        assert os.waitpid(run.pid, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    begun = time.monotonic()
    os.kill(run.pid, signal.SIGTERM)
    ended = run.end()
    assert 2 <= time.monotonic() - begun < 10
    assert ended.status == -signal.SIGABRT
    assert "did not stop in time" in ended.output
    assert 'rewards.py", line' in ended.output  # its stack
    assert steps_in(work / "sigterm") == [2, 3]
    assert os.path.exists(work / "sigterm" / "checkpoints" / "step-00000003")
