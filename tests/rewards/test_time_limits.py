"""Sync rewards run in the main thread, and their time limits hold whatever they do."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from support.helpers import environment
from user_rewards import swallows

from nlgrpo.rewards.composite import Gated, Weighted
from nlgrpo.rewards.reward_functions import Reward, RewardError, score
from nlgrpo.runtime.supervision import terminator, time_limit

P, M = 2, 2
INPUTS = {
    "prompts": ["q"] * P * M,
    "completions": ["1/2", "0.5", "7", "x"],
    "completion_ids": [[1]] * P * M,
    "columns": {"answer": ["1/2"] * P * M},
    "samples": M,
    "step": 3,
    "total_steps": 9,
}
CONNECTION = sqlite3.connect(":memory:")  # SQLite refuses a connection of another thread


def scored(function, timeout=600.0, on_error="stop"):
    return score([Reward("mine", function, timeout, on_error)], **INPUTS)


def values(function, **more):
    return scored(function, **more).values["mine"].flatten().tolist()


def test_an_alarm_in_a_reward_works():
    """The pattern of math-verify: a handler of SIGALRM, and 0 for any error. In another thread all would be 0."""

    def correct(completions, answer, **_):
        grades = []
        for text, gold in zip(completions, answer, strict=True):
            try:
                before = signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.alarm(5)
                try:
                    grades.append(float(eval(text) == eval(gold)))
                finally:
                    signal.alarm(0)
                    signal.signal(signal.SIGALRM, before)
            except Exception:
                grades.append(0.0)
        return grades

    expected = [1.0, 1.0, 0.0, 0.0]
    assert values(correct) == expected
    assert values(Weighted({correct: 2.0})) == [2.0, 2.0, 0.0, 0.0]
    assert values(Gated(lambda completions: [1.0] * 4, by=correct)) == expected


def test_an_alarm_beside_an_async_part_of_a_composite():
    def in_main(completions):
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    async def judge(completions):
        await asyncio.sleep(0.01)
        return [0.5] * len(completions)

    assert values(Weighted({in_main: 1.0, judge: 1.0})) == [1.5] * 4
    assert values(Gated(judge, by=in_main)) == [0.5] * 4


def test_a_loop_a_connection_and_a_figure_of_the_main_thread():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    async def later():
        await asyncio.sleep(0.001)
        return 1.0

    def uses(completions, **_):
        pyplot.close(pyplot.figure())
        return [asyncio.run(later()) + CONNECTION.execute("SELECT 1").fetchone()[0] for _ in completions]

    assert values(uses) == [2.0] * 4


def forever(completions, **_):
    while True:
        pass


def sleeps(completions, **_):
    time.sleep(600)


def waits_for_a_lock(completions, **_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_process(completions, **_):
    subprocess.run(["sleep", "600"], check=True)


def reads_a_socket(completions, **_):
    one, other = socket.socketpair()
    with one, other:
        one.recv(1)


def backtracks(completions, **_):
    return [float(bool(re.match("(a+)+b", "a" * 64)))] * len(completions)  # holds the interpreter's lock


def has_a_large_power(completions, **_):
    return [float(7 ** (7 ** (7**3)) > 0)] * len(completions)  # holds it, too


def swallows_for_each(completions, **_):
    grades = []
    for _text in completions:
        try:
            time.sleep(600)
            grades.append(1.0)
        except BaseException:
            grades.append(0.0)
    return grades


def raises_another(completions, **_):
    try:
        time.sleep(600)
    except BaseException as error:
        raise KeyError("another") from error


def runs_a_loop(completions, **_):
    return asyncio.run(asyncio.sleep(600))


def generates(completions, **_):
    for _text in completions:
        time.sleep(600)
        yield 1.0


HANGING = [
    forever, sleeps, waits_for_a_lock, waits_for_a_process, reads_a_socket, backtracks, has_a_large_power, swallows,
    swallows_for_each, raises_another, runs_a_loop, generates,
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("function", HANGING, ids=lambda function: function.__name__)
def test_a_reward_over_its_limit_is_interrupted(function):
    before = signal.getsignal(terminator.INTERRUPT)
    tracing = sys.gettrace()
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"'mine' did not return within its timeout of 0.3 s \(step 3"):
        scored(function, timeout=0.3)
    assert 0.3 <= time.monotonic() - begun < 5
    assert scored(function, timeout=0.3, on_error="skip").skipped.all()
    assert values(lambda completions, **_: [1.0] * len(completions)) == [1.0] * 4
    assert signal.getsignal(terminator.INTERRUPT) == before
    assert sys.gettrace() is tracing


def test_the_message_says_where_it_was():
    with pytest.raises(RewardError) as error:
        scored(sleeps, timeout=0.2)
    line = sleeps.__code__.co_firstlineno + 1
    assert f"It was interrupted at {__file__}, line {line}, in sleeps" in str(error.value)


def test_a_call_that_returns_in_time_is_not_interrupted():
    for _ in range(50):
        assert values(lambda completions, **_: [1.0] * len(completions), timeout=0.5) == [1.0] * 4
    time.sleep(0.6)  # no late signal


def test_a_limit_holds_after_its_process_was_killed():
    values(lambda completions, **_: [1.0] * 4)
    os.kill(time_limit._keeper.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert scored(sleeps, timeout=0.2, on_error="skip").skipped.all()


def test_a_forked_process_has_limits_of_its_own():
    values(lambda completions, **_: [1.0] * 4)
    child = os.fork()
    if child == 0:
        skipped = False
        with contextlib.suppress(BaseException):
            skipped = scored(sleeps, timeout=0.2, on_error="skip").skipped.all()
        os._exit(0 if skipped else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert scored(sleeps, timeout=0.2, on_error="skip").skipped.all()


@pytest.mark.slow
def test_the_time_in_which_the_process_is_stopped_does_not_count():
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = time_limit.limited(lambda: os.kill(os.getpid(), signal.SIGSTOP) or 0, 0.5, "")
        os._exit(status)
    os.waitpid(child, os.WUNTRACED)
    time.sleep(1.2)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ctrl_c_passes_after_the_limit():
    def work():
        try:
            time.sleep(600)
        except BaseException:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        time_limit.limited(work, 0.1, "")
    assert scored(sleeps, timeout=0.2, on_error="skip").skipped.all()


def test_async_rewards_run_while_sync_ones_do_and_are_cancelled():
    done = threading.Event()

    async def sets(completions):
        done.set()
        return [1.0] * len(completions)

    def waits(completions):
        return [float(done.wait(5))] * len(completions)

    found = score([Reward("sync", waits), Reward("async", sets)], **INPUTS)
    assert found.values["sync"].min() == found.values["async"].min() == 1


def test_a_function_of_the_user_in_another_thread_is_named(caplog):
    result = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: result.append(values(lambda completions, **_: [1.0] * 4)), name="mine")
        thread.start()
        thread.join()
    assert result == [[1.0] * 4]
    [record] = [record for record in caplog.records if "thread" in record.getMessage()]
    assert "reward 'mine' runs in the thread 'mine'" in record.getMessage()
    assert "signal.alarm" in record.getMessage()
    assert "process = true" in record.getMessage()


PROGRAM = """
import ctypes, sys
from nlgrpo.rewards.reward_functions import Reward, score
from nlgrpo.runtime.supervision import terminator

LOCKED = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(LOCKED)

def stuck(completions, **_):
    {code}

score([Reward("stuck", stuck, 0.3, "skip")], prompts=["q"], completions=["a"], completion_ids=[[1]], columns={{}},
      samples=1, step=0, total_steps=1)
print("returned")
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_a_reward_that_cannot_be_interrupted_ends_the_process_with_its_name_and_stack(library):
    """A mutex that is locked twice never returns; PyDLL holds the interpreter's lock."""
    code = f"ctypes.{library}(None).pthread_mutex_lock(LOCKED)"
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=code)], capture_output=True, text=True, env=environment(),
        timeout=60, check=False,
    )  # fmt: skip
    assert time.monotonic() - begun > terminator.GRACE
    assert ended.returncode == -signal.SIGABRT
    assert "returned" not in ended.stdout
    assert "error: reward 'stuck' did not return within its timeout of 0.3 s, and nothing can" in ended.stderr
    assert "process = true" in ended.stderr
    assert 'File "<string>", line 10 in stuck' in ended.stderr


def test_ctrl_c_ends_a_reward_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            scored(sleeps, timeout=60, on_error="skip")
    finally:
        signal.signal(signal.SIGINT, before)
    assert values(lambda completions, **_: [1.0] * 4) == [1.0] * 4
