"""Some injections of ``make chaos``, and that each of its checks fails when what it checks is taken out."""

import atexit
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from chaos import injection, library, processes
from support.helpers import REPOSITORY, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="faults are injected on Linux only")]

RUN = "\nimport sys\nfrom chaos import trials\nsys.exit(trials.main(sys.argv[1:]))"


def chaos(*options: str, before: str = "") -> tuple[int, str]:
    """Run the command after the statements ``before``; return its exit status and output."""
    settings = environment() | library.environment() | {"PYTHONPATH": f"{REPOSITORY / 'tests'}:{REPOSITORY / 'bench'}"}
    command = [sys.executable, "-c", before + RUN, *options]
    ended = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=550)
    return ended.returncode, ended.stdout + ended.stderr


# Each kind is injected where most depends on it: lost ranks in commands on two ranks, damaged files where there are
# checkpoints, errors of a disk where results are written. Of each it is injection number 0, except for damage in
# training: that place is before any checkpoint.
DISTURBED = {
    "train": ("process-killed", "all-killed", "rank-stopped", "newest-file-damaged:1"),
    "train-server": ("server-down", "server-hangs"),
    "rollout": ("launcher-killed", "rank-lost", "IO-error"),
    "iro": ("disk-full", "SIGINT", "newest-file-damaged"),
    "generate": ("disk-full", "slow-disk", "clock-jump"),
    "serve": ("suspended", "SIGTERM"),
}
INJECTIONS = 2 * 56  # numbers 0 and 1 of each kind in each command
# another process that makes shared memory while a run is disturbed
NEIGHBOUR = """
from pathlib import Path
from chaos import injection
alone = injection.Injection.start
def start(*arguments):
    Path("/dev/shm/nlgrpo-test-neighbour").touch()
    return alone(*arguments)
injection.Injection.start = start
"""


@pytest.fixture(autouse=True)
def no_shared_memory_is_left():
    yield
    for path in Path("/dev/shm").glob("*nlgrpo-test-*"):
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_forked_process_runs_its_own_exit_functions_and_not_its_parents(tmp_path):
    parents = tempfile.TemporaryDirectory(dir=tmp_path)
    atexit.register(parents.cleanup)

    def main() -> int:
        atexit.register((tmp_path / "own").mkdir)
        return 3

    run = processes.Forked(main)
    atexit.unregister(parents.cleanup)
    assert run.wait(30)
    assert run.status == 3
    assert (tmp_path / "own").is_dir()
    assert Path(parents.name).is_dir()
    parents.cleanup()


def test_each_kind_is_injected():
    kinds = (*injection.INSIDE, *injection.OUTSIDE)
    named = {kind.replace(" ", "-").replace("/", "") for kind in kinds}
    assert {kind.partition(":")[0] for chosen in DISTURBED.values() for kind in chosen} == named


@pytest.mark.parametrize("command", DISTURBED)
def test_disturbed_runs_are_equal(tmp_path, command):
    """17 injections: each of the 15 kinds, and each command but the sweep. `make chaos` has all combinations."""
    names = [f"{command}:{kind}" if ":" in kind else f"{command}:{kind}:0" for kind in DISTURBED[command]]
    options = ["--only", ",".join(names), "--injections", str(INJECTIONS), "--seed", "1", "--folder", str(tmp_path)]
    status, output = chaos(*options, before=NEIGHBOUR)
    print(output)
    assert status == 0, output
    injections = int(re.search(r"^(\d+) injections in \d+ minutes, 0 lost$", output, re.MULTILINE)[1])
    chosen = len(DISTURBED[command])
    assert chosen - 1 <= injections <= chosen  # a place near the end is not always reached
    assert not list(tmp_path.iterdir())


SHORT = """
import dataclasses
from chaos import injection, trials
injection.ENDING = 5.0
trials.WORKLOADS = tuple(dataclasses.replace(workload, seconds=60.0) for workload in trials.WORKLOADS)
"""
WRAPPED = """
import os, subprocess
from pathlib import Path
from nlgrpo import cli
main = cli.main
def leaves(arguments):
    {}
    return main(arguments)
cli.main = leaves
"""
# shared memory as each of its makers makes it: a file, vLLM's weights, torch and multiprocessing
MEMORY = "; ".join(
    (
        "import _multiprocessing, _posixshmem",
        "Path(f'/dev/shm/nlgrpo-test-file-{os.getpid()}').touch()",
        "os.mkdir(f'/dev/shm/nlgrpo-test-folder-{os.getpid()}')",
        "_posixshmem.shm_open(f'/nlgrpo-test-memory-{os.getpid()}', os.O_CREAT | os.O_RDWR, mode=0o600)",
        "_multiprocessing.SemLock(1, 1, 1, f'/nlgrpo-test-semaphore-{os.getpid()}', False)",
    )
)
# what is taken out: statements that do it, an injection, and what is reported then
TAKEN_OUT = {
    "the verification of checkpoints": (
        "from nlgrpo.runtime.checkpoint import folders\nfolders.verify = lambda *_: None",
        "train:newest-file-damaged",
        "not equal to the undisturbed run|started again, it ended with status",
    ),
    "the restoring of random states": (
        "from nlgrpo.runtime.checkpoint import loading\nloading.set_random_state = lambda _: None",
        "train:all-killed",
        "not equal to the undisturbed run",
    ),
    "the second seed, after the first evaluation": (
        "from nlgrpo import train\ncalls = []\nseed = train.seed_everything\n"
        "train.seed_everything = lambda s: None if calls else (calls.append(s), seed(s))",
        "train:all-killed",
        "not equal to the undisturbed run",
    ),
    "the removal of unfinished checkpoints": (
        "from nlgrpo.runtime.checkpoint import folders\nfolders.tidy = lambda _: None\n"
        "from chaos import commands\ncommands.RESTARTS = 0",  # a rank that cannot save removes what is there
        "train:all-killed",
        "partial files are left|started again, it ended with status",
    ),
    "the watchdog": (
        "from contextlib import nullcontext\nfrom nlgrpo.runtime.supervision import watchdog\n"
        "watchdog.watching = lambda *_: nullcontext()",
        "rollout:rank-stopped",
        "it has not ended after 60 s",
    ),
    "the error of a full disk": (
        "from contextlib import nullcontext\nfrom nlgrpo.runtime import atomic_files\n"
        "atomic_files.into = lambda _: nullcontext()",
        "generate:disk-full",
        "a traceback was printed",
    ),
    "the end of child processes": (
        WRAPPED.format("subprocess.Popen(['sleep', '100'])"),
        "generate:SIGTERM",
        r"processes are left: \d+ sleep",
    ),
    "the release of shared memory": (
        WRAPPED.format(MEMORY),
        "generate:SIGTERM",
        "shared memory is left: nlgrpo-test-file.* nlgrpo-test-folder.* nlgrpo-test-memory.* sem.nlgrpo-test-semaphore",
    ),
}


@pytest.mark.records
@pytest.mark.parametrize("name", TAKEN_OUT)
def test_without_a_protection_injections_are_lost(tmp_path, name):
    statements, only, reported = TAKEN_OUT[name]
    options = ["--only", only, "--injections", "312", "--folder", str(tmp_path), "--stop"]
    status, output = chaos(*options, before=SHORT + statements)
    print(output)
    assert status == 1, output
    assert re.search(rf"LOST .*({reported})", output)
