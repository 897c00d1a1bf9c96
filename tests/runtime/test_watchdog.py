"""The watchdog on ranks that are threads: which rank is blamed, when, and that healthy ranks are left alone."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nlgrpo.config.schema import Config, RewardConfig
from nlgrpo.runtime.supervision import phases, rendezvous, watchdog
from nlgrpo.runtime.supervision.phases import TimeLimits
from nlgrpo.runtime.supervision.rendezvous import Rendezvous
from nlgrpo.runtime.supervision.watchdog import Watchdog

EVERY = 0.05


def run(*work, limits=TimeLimits(0.6), silent=0.5, store=None):
    """Call a function on each rank, with a watchdog that ends it; return what each one said that was ended."""
    store, ended = store or dist.HashStore(), {}

    def on_rank(rank, do):
        done = threading.Event()

        def end(message):
            ended[rank] = message
            done.set()

        dog = Watchdog(store, rank, len(work), limits, end=end, every=EVERY, silent=silent)
        do(done)
        if rank not in ended:
            dog.close()

    threads = [threading.Thread(target=on_rank, args=each, daemon=True) for each in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def busy(done, seconds=1.2):
    """Make progress: at different instructions at different times."""
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until and not done.is_set():
        turn += 1
        if turn % 2:
            time.sleep(0.01)
        else:
            time.sleep(0.011)


def long(done):
    busy(done, 8.0)


def hangs(done):
    done.wait(10)


def in_collective(done):
    """A frame in a file of torch.distributed, as of a rank that waits in a collective."""
    source = "def all_reduce(done):\n    done.wait(10)\n"
    space = {}
    exec(compile(source, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), space)
    space["all_reduce"](done)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(watchdog, "LAST", 0.2)
    phases.enter("update", 7)


@pytest.mark.slow
def test_ranks_that_make_progress_are_left_alone():
    assert run(busy, busy, busy) == {}


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_works_is_left_alone():
    assert run(lambda done: done.wait(1.0), busy) == {}


def test_the_rank_that_hangs_is_named_first_and_all_end():
    ended = run(in_collective, hangs, in_collective)
    assert ended.keys() == {0, 1, 2}
    assert ended[1] is ended[2] is None  # one rank prints
    first, *rest = ended[0].splitlines()
    assert first.startswith("no rank has made progress for ")
    assert first.endswith("s (train.timeout)")
    ranks = [line for line in rest if line.startswith("rank ")]
    assert [line.split(" (")[0] for line in ranks] == ["rank 1", "rank 0", "rank 2"]
    assert "hangs in the phase 'update' of step 7 since " in ranks[0]
    assert all("waits for the others in the phase 'update'" in line for line in ranks[1:])
    assert "in hangs" in ended[0]
    assert "in all_reduce" in ended[0]


@pytest.mark.slow
def test_a_phase_with_a_longer_limit():
    limits = TimeLimits(0.6, {"rewards": 60.0})
    work = [lambda done: done.wait(1.5)] * 2
    assert run(*work, limits=limits).keys() == {0, 1}
    phases.enter("rewards")
    assert run(*work, limits=limits) == {}


class Silent:
    """A store that loses the reports of one rank from its third on, as if its process were stopped."""

    def __init__(self, rank, state=None):
        self.store, self.rank, self.state = dist.HashStore(), str(rank), state

    def set(self, key, value):
        if key != self.rank or json.loads(value)["number"] < 3:
            self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def check(self, keys):
        return self.store.check(keys)

    def multi_get(self, keys):
        return self.store.multi_get(keys)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "why"), [("T", "stopped by a signal"), ("D", "waiting for a disk"), ("Z", "dead")])
def test_a_silent_rank_that_cannot_run_is_named_soon(monkeypatch, state, why):
    monkeypatch.setattr(watchdog, "_state", lambda report: state)
    begun = time.monotonic()
    ended = run(long, long, long, limits=TimeLimits(60.0), silent=0.4, store=Silent(0))
    assert time.monotonic() - begun < 1.8
    assert ended[1].startswith("rank 0 (process ")  # the first that is alive speaks
    assert f", {why}) has been silent for 0 s. It was in the phase 'update' of step 7 since " in ended[1]
    assert "its stack was\n  File " in ended[1]
    assert ended[2] is None


@pytest.mark.slow
def test_a_silent_rank_that_can_run_has_the_time_of_the_longest_phase(monkeypatch):
    monkeypatch.setattr(watchdog, "_state", lambda report: "R")
    begun = time.monotonic()
    ended = run(long, long, limits=TimeLimits(0.3, {"rewards": 1.2}), silent=0.2, store=Silent(1))
    assert time.monotonic() - begun > 1.2
    assert "rank 1 (process " in ended[0]
    assert "silent for 1 s" in ended[0]


@pytest.mark.slow
def test_a_rank_that_has_finished_is_not_missed():
    assert run(lambda done: None, busy) == {}
    assert run(lambda done: busy(done, 0.5), lambda done: done.wait(1.5)) == {}  # nobody waits for the one that hangs


@pytest.mark.slow
def test_a_rank_that_never_starts():
    store = dist.PrefixStore("other", dist.HashStore())
    ended = {}
    dog = Watchdog(store, 0, 2, TimeLimits(0.5), end=lambda text: ended.update({0: text}), every=EVERY, silent=0.2)
    busy(threading.Event(), 1.2)
    dog.close()
    assert ended[0].startswith("not all ranks have started within ")


class Gone(Silent):
    """A store that stops answering: it raises, or it hangs."""

    def __init__(self, hangs):
        super().__init__(rank=-1)
        self.hangs, self.calls = hangs, 0

    def set(self, key, value):
        self.calls += 1
        if self.calls > 6:
            if self.hangs:
                time.sleep(3)
            raise dist.DistNetworkError("connection reset")
        super().set(key, value)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_is_gone(hangs):
    ended = run(long, long, limits=TimeLimits(60.0), silent=0.4, store=Gone(hangs))
    why = "for 0 s" if hangs else "(connection reset)"
    for rank in ended:
        assert ended[rank].startswith(
            f"rank {rank}: the store of the process group does not answer {why}; the launcher"
        )
    assert ended


def test_a_process_that_was_stopped_itself_blames_nobody(monkeypatch):
    """After all processes of a job were suspended, the first that runs again has heard nothing for a long time."""
    clock, jump = time.monotonic, [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + jump[0])
    threading.Timer(0.5, lambda: jump.__setitem__(0, 3600.0)).start()
    assert run(busy, busy) == {}


READS = """
import gc, threading, time
from nlgrpo.runtime.supervision import watchdog

def starts():
    while True:
        thread = threading.Thread(target=list)
        thread.start()
        thread.join()

for _ in range(2):
    threading.Thread(target=starts, daemon=True).start()
gc.callbacks.append(lambda phase, info: time.sleep(0))  # lets other threads run
gc.set_threshold(1)
until = time.monotonic() + 1.0
while time.monotonic() < until:
    watchdog._frames(threading.get_ident())
assert gc.isenabled()
"""


@pytest.mark.slow
def test_stacks_are_read_while_threads_start_and_garbage_is_collected():
    """CPython 3.11 deadlocks without the protection."""
    subprocess.run([sys.executable, "-c", READS], check=True, timeout=60)


@pytest.mark.slow
def test_a_rank_ends_though_its_message_cannot_be_printed():
    code = """
import os, threading
from nlgrpo.runtime.supervision import watchdog
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)  # as a terminal that is gone
thread = threading.Thread(target=watchdog._exit, args=("a rank is silent",))
thread.start()
thread.join()
os._exit(7)  # the watchdog's thread has died instead
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 1


def test_limits():
    limits = TimeLimits(10.0, {"rewards": 30.0, "update": 5.0})
    assert [limits.of(phase) for phase in ("rewards", "update", "start")] == [30.0, 10.0, 10.0]
    assert limits.largest == limits.silence == 30.0
    assert TimeLimits(10.0, {"checkpoint": 60.0}).silence == 10.0
    assert TimeLimits(float("inf")).of("update") == float("inf")


def test_loading_and_saving_have_longer_limits():
    """A download or a slow disk can keep the main thread in one place."""
    limits = Config().limits()
    assert [limits.of(phase) for phase in ("start", "checkpoint", "export")] == [3600.0] * 3
    assert (limits.of("update"), limits.silence) == (600.0, 600.0)
    config = Config(rewards={"a": RewardConfig("x", timeout=30.0), "b": RewardConfig("y", timeout=50.0)})
    assert config.limits().of("rewards") == 680.0


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launcher(monkeypatch):
    """The store of torchrun, and its environment variables."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 0, "WORLD_SIZE": 1,
                        "TORCHELASTIC_USE_AGENT_STORE": True}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return server


def test_one_rank_and_no_limit_are_not_watched(launcher):
    before = threading.active_count()
    one = Rendezvous(timedelta(seconds=5))
    with watchdog.watching(one, TimeLimits(1.0)), watchdog.watching(None, TimeLimits(1.0)):
        assert threading.active_count() == before
    one.world = 2
    with watchdog.watching(one, TimeLimits(float("inf"))):
        assert threading.active_count() == before


def test_the_reports_are_in_the_store_of_the_launcher(launcher, monkeypatch):
    monkeypatch.setattr(watchdog, "EVERY", EVERY)
    met = Rendezvous(timedelta(seconds=5))
    met.world = 2
    with watchdog.watching(met, TimeLimits(60.0)):
        busy(threading.Event(), 0.5)
    report = json.loads(dist.PrefixStore(f"{met.prefix}/watchdog", launcher).get("0"))
    assert report["left"] is True
    assert report["number"] >= 1


def test_rank_0_serves_a_store_that_no_launcher_serves(launcher, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    met = Rendezvous(timedelta(seconds=5))
    met.store.set("key", "value")
    assert met.connect("", timedelta(seconds=5)).check(["key"]) is False
    assert dist.PrefixStore(met.prefix, met.root).get("key") == b"value"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_half_of_the_variables_of_a_launcher_are_one_line(launcher, monkeypatch, missing):
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"MASTER_ADDR is set, but not {missing}: start the ranks with torchrun, or"):
        Rendezvous(timedelta(seconds=5))


def meet(store, ranks, world, seconds=10.0):
    with ThreadPoolExecutor(world) as pool:
        limit = timedelta(seconds=seconds)
        return list(pool.map(lambda rank: rendezvous.agree(store, rank, world, limit), ranks))


def test_each_attempt_has_a_name_of_its_own():
    store = dist.HashStore()
    names = [meet(store, ranks, 4) for ranks in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 3, 0))]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 3


def test_questions_of_ranks_that_have_ended_do_no_harm():
    """Of an attempt that ended before rank 0 had answered, or before all had confirmed."""
    store = dist.HashStore()
    for rank in (1, 2):
        with pytest.raises((RuntimeError, TimeoutError)):
            rendezvous.agree(store, rank, 3, timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not start within 0 s"):
        rendezvous.agree(store, 0, 3, timedelta(seconds=0.2))
    with ThreadPoolExecutor(3) as pool:  # rank 0 sees the old questions first
        limit = timedelta(seconds=10)
        first = pool.submit(rendezvous.agree, store, 0, 3, limit)
        time.sleep(0.3)
        others = [pool.submit(rendezvous.agree, store, rank, 3, limit) for rank in (1, 2)]
        assert [other.result() for other in others] == [first.result()] * 2
