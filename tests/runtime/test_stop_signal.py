"""Signals that stop a process: it ends in time, whatever it does."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.helpers import children

from nlgrpo.runtime.supervision.stop_signal import StopSignal

FINISHES = "while not stop.received: time.sleep(0.01)\nprint('finished', flush=True)"
IGNORES = "while True: time.sleep(1)"
HOLDS_THE_LOCK = "import re; re.match('(a+)+b', 'a' * 64)"
HOLDS_IT_IN_A_THREAD = f"""import threading
thread = threading.Thread(target=exec, args=({HOLDS_THE_LOCK!r},))
thread.start()
thread.join()"""


@contextmanager
def running(work, grace=600.0, again=5.0):
    """Run ``work`` in a process, from the time when its signals are handled."""
    reader, writer = os.pipe()
    code = (
        "import os, signal, sys, time\n"
        "from nlgrpo.runtime.supervision.stop_signal import StopSignal\n"
        f"StopSignal.AGAIN = {again}\n"
        f"with StopSignal({grace}) as stop:\n"
        f"    os.write({writer}, b'x'); os.close({writer})\n" + "".join(f"    {line}\n" for line in work.splitlines())
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "pass_fds": [writer]}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"x"
        yield process
    finally:
        os.close(reader)
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def end(process):
    """Return the exit status, what the process printed, and the seconds until it and its children had ended."""
    begun, helpers = time.monotonic(), children(process.pid)
    printed, errors = process.communicate(timeout=60)
    while any(Path(f"/proc/{pid}").exists() for pid in helpers):
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    return process.returncode, printed, errors, time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_first_signal_lets_the_work_finish(number):
    with running(FINISHES, grace=20.0) as process:
        assert len(children(process.pid)) == 1
        process.send_signal(number)
        status, printed, errors, _ = end(process)
    assert (status, printed) == (0, "finished\n")
    assert errors == f"{number.name}: saving and stopping within 20 s; a second signal stops at once\n"


@pytest.mark.slow
@pytest.mark.parametrize("work", [IGNORES, HOLDS_THE_LOCK, HOLDS_IT_IN_A_THREAD], ids=["ignores", "lock", "thread"])
def test_after_the_grace_period_it_is_ended_with_its_stacks(work):
    with running(work, grace=0.5) as process:
        time.sleep(0.2)  # be inside
        process.send_signal(signal.SIGTERM)
        status, _, errors, seconds = end(process)
    assert status == -signal.SIGABRT
    assert 0.5 <= seconds < 5
    assert f"error: process {process.pid} received a signal and did not stop in time" in errors
    assert "Fatal Python error: Aborted" in errors
    assert 'File "<string>", line' in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("work", [IGNORES, HOLDS_THE_LOCK], ids=["ignores", "lock"])
def test_a_second_signal_ends_it_at_once(work, number):
    with running(work, again=0.5) as process:
        time.sleep(0.2)
        process.send_signal(number)
        time.sleep(0.3)
        process.send_signal(number)
        status, _, _, seconds = end(process)
    assert status in (-number, -signal.SIGABRT, 1)
    assert seconds < 5


@pytest.mark.slow
def test_a_notice_does_not_count_as_the_first_of_two():
    with running(IGNORES, again=0.2) as process:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            process.send_signal(number)
            time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert end(process)[0] == -signal.SIGTERM


@pytest.mark.slow
def test_a_process_that_ignores_everything_is_killed():
    ignoring = "import faulthandler; faulthandler.disable(); signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
    with running(ignoring + IGNORES, grace=0.2) as process:
        process.send_signal(signal.SIGTERM)
        status, _, _, seconds = end(process)
    assert status == -signal.SIGKILL
    assert seconds < 10


@pytest.mark.slow
def test_the_helper_ends_with_the_process():
    with running(IGNORES) as process:
        process.kill()
        assert end(process)[3] < 2


@pytest.mark.slow
def test_signals_of_forked_processes_are_their_own():
    work = (
        "pid = os.fork()\n"
        "if not pid: time.sleep(60)\n"
        "os.kill(pid, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stop.received, flush=True)\n"
        "time.sleep(1.0)\n"
        "print('alive', flush=True)"
    )
    with running(work, grace=0.3) as process:
        status, printed, errors, _ = end(process)
    assert (status, printed, errors) == (0, f"{-signal.SIGTERM} False\nalive\n", "")


def test_a_terminal_that_is_gone_changes_nothing():
    """SIGTERM after the connection was lost: nothing can be printed, and the work is finished all the same."""
    with running(FINISHES) as process:
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "finished\n"
        assert process.wait(20) == 0
    with running(IGNORES, grace=0.3) as process:
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGABRT


@pytest.mark.slow
def test_other_ranks_are_quiet(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with running(FINISHES) as process:
        process.send_signal(signal.SIGTERM)
        assert end(process)[:3] == (0, "finished\n", "")


def test_handlers_and_the_wakeup_descriptor_are_restored():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with StopSignal() as outer:
        with StopSignal(float("inf")) as inner:
            signal.raise_signal(signal.SIGUSR1)
        assert (outer.received, inner.received) == (False, True)
        assert len(children()) >= 1
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
