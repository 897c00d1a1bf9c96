"""Some injections of ``make chaos``, and that each of its checks fails when what it checks is taken out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import library
from support.helpers import REPOSITORY, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="faults are injected on Linux only")]

RUN = "\nimport sys\nfrom chaos import trials\nsys.exit(trials.main(sys.argv[1:]))"


def chaos(*options: str, before: str = "") -> tuple[int, str]:
    """Run the command after the statements ``before``; return its exit status and output."""
    settings = environment() | library.environment() | {"PYTHONPATH": f"{REPOSITORY / 'tests'}:{REPOSITORY / 'bench'}"}
    command = [sys.executable, "-c", before + RUN, *options]
    ended = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=550)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("command", "kinds"),
    [("train", 13), ("train-server", 2), ("rollout", 13), ("iro", 10), ("generate", 10), ("serve", 4)],
)
def test_disturbed_runs_are_equal(tmp_path, command, kinds):
    """Each kind once; `make chaos` also disturbs a sweep."""
    status, output = chaos("--only", command, "--injections", "56", "--seed", "1", "--folder", str(tmp_path))
    print(output)
    assert status == 0, output
    injections = int(re.search(r"^(\d+) injections in \d+ minutes, 0 lost$", output, re.MULTILINE)[1])
    assert kinds - 2 <= injections <= kinds  # a place near the end is not always reached
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
        WRAPPED.format("Path(f'/dev/shm/nlgrpo-test-{os.getpid()}').touch()"),
        "generate:SIGTERM",
        "shared memory is left: nlgrpo-test-",
    ),
}


@pytest.mark.parametrize("name", TAKEN_OUT)
def test_without_a_protection_injections_are_lost(tmp_path, name):
    statements, only, reported = TAKEN_OUT[name]
    try:
        status, output = chaos(
            "--only", only, "--injections", "312", "--folder", str(tmp_path), "--stop", before=SHORT + statements
        )
    finally:
        for path in Path("/dev/shm").glob("nlgrpo-test-*"):
            path.unlink()
    print(output)
    assert status == 1, output
    assert re.search(rf"LOST .*({reported})", output)
