"""The number of threads: from the load at the start, and the same when a run resumes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from nlgrpo.runtime import cpu_threads
from nlgrpo.runtime.distributed import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def free(monkeypatch):
    """No number that a user has set; four cores."""
    for name in cpu_threads.SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_threads, "usable", lambda: {0, 1, 2, 3})


def load(monkeypatch, *looks):
    """Make the looks at the load find these numbers of busy cores."""
    answers = list(looks)
    monkeypatch.setattr(cpu_threads, "busy_cores", lambda seconds: answers.pop(0))


@pytest.mark.parametrize(
    ("looks", "count", "said"),
    [
        ([0], 4, ""),
        ([2, 0], 4, ""),  # a short burst
        ([1, 1], 3, "another process uses a core"),
        ([3, 2], 2, "other processes use 2 of 4 cores"),
        ([4, 4], 1, "1 thread: other processes use 4 of 4 cores"),
        ([9, 9], 1, "use 4 of 4 cores"),
    ],
)
def test_a_run_takes_the_idle_cores(free, monkeypatch, looks, count, said):
    load(monkeypatch, *looks)
    chosen = cpu_threads.choose(4, None)
    assert chosen.count == count
    assert said in chosen.note
    assert bool(said) == bool(chosen.note)


def test_fewer_threads_than_cores_leave_room_for_others(free, monkeypatch):
    load(monkeypatch, 2, 2)
    assert cpu_threads.choose(2, None) == cpu_threads.Threads(2)


def test_the_number_of_the_user_stays(free, monkeypatch):
    load(monkeypatch, 4, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert cpu_threads.choose(4, None) == cpu_threads.Threads(4)
    assert cpu_threads.choose(4, 4) == cpu_threads.Threads(4)
    note = cpu_threads.choose(4, 1).note
    for part in ("4 threads (OMP_NUM_THREADS)", "began with 1 thread", "round differently"):
        assert part in note


def test_a_run_keeps_its_number(free, monkeypatch):
    load(monkeypatch)  # nobody looks at the load
    assert cpu_threads.choose(4, 4) == cpu_threads.Threads(4)
    assert cpu_threads.choose(4, 1) == cpu_threads.Threads(1, "1 thread, as when this run began")
    smaller = cpu_threads.choose(4, 8)
    assert smaller.count == 4
    assert "no 8 cores" in smaller.note


def test_several_ranks_keep_the_number_of_pytorch(free, monkeypatch):
    load(monkeypatch)
    assert cpu_threads.choose(4, None, alone=False) == cpu_threads.Threads(4)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"threads": "2"}', '{"threads": 0}', '{"threads": null}'])
def test_a_damaged_file_counts_as_none(tmp_path, content):
    (tmp_path / cpu_threads.THREADS_FILE).write_text(content)
    assert cpu_threads.saved_count(tmp_path) is None
    assert cpu_threads.saved_count(tmp_path / "missing") is None


def test_the_first_number_is_recorded(free, monkeypatch, tmp_path):
    before = torch.get_num_threads()
    load(monkeypatch, 4, 4, 0)
    try:
        torch.set_num_threads(2)
        assert "1 thread" in cpu_threads.use(tmp_path, ALONE)
        cpu_threads.record(tmp_path, ALONE)
        torch.set_num_threads(2)
        assert "as when this run began" in cpu_threads.use(tmp_path, ALONE)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)
        assert cpu_threads.use(tmp_path, ALONE, restart=True) == ""
        assert torch.get_num_threads() == 2
        cpu_threads.record(tmp_path, ALONE)
        assert json.loads((tmp_path / cpu_threads.THREADS_FILE).read_text()) == {"threads": 1}
    finally:
        torch.set_num_threads(before)


def test_ticks_of_usable_cores_are_read(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  100 0 0 0 0 0 0 0 0 0\ncpu0 10 1 2 70 5 3 4 5 9 9\ncpu1 1 0 0 9 0 0 0 0\ncpu9 5 0 0 5 0 0 0 0\nintr 1 2\n"
    )
    monkeypatch.setattr(cpu_threads, "STAT", stat)
    monkeypatch.setattr(cpu_threads, "usable", lambda: {0, 9})
    assert cpu_threads.times() == {0: (25, 100), 9: (5, 10)}
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "none")
    assert cpu_threads.times() == {}
    assert cpu_threads.busy_cores(0.0) == 0


@pytest.mark.skipif(not cpu_threads.STAT.exists(), reason="no /proc/stat")
def test_a_process_that_computes_is_seen():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert cpu_threads.busy_cores(0.5) >= 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_run_that_began_on_a_busy_machine_resumes_bit_for_bit(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in cpu_threads.SET_BY_USER}

    def train(out, steps, **more):
        options = ["--rollout.prompts", "2", "--rollout.samples", "4", "--rollout.max-new-tokens", "16"]
        options += ["--evaluation.prompts", "0", "--train.out", str(tmp_path / out), "--train.steps", str(steps)]
        command = [sys.executable, "-m", "nlgrpo", "train", "length-bon", *options]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        output = train("busy", 2)
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert "1 thread: other processes use" in output
    assert "1 thread, as when this run began" in train("busy", 4)
    train("given", 4, OMP_NUM_THREADS="1")

    def losses(out):
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert losses("busy") == losses("given")
