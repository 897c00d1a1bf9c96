"""Sweeps as jobs of a cluster: by submitit's local executor, and by its SLURM executor on a stand-in for SLURM."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import fake_slurm
from support.helpers import environment
from support.sweep_runs import CODE

from nlgrpo import cli
from nlgrpo.apps.sweep import launchers, sweep
from nlgrpo.apps.sweep.options import SlurmOptions
from nlgrpo.apps.sweep.state import SWEEP_FILE, read_sweep_state
from nlgrpo.training.tracking.run_files import read_jsonl

submitit = pytest.importorskip("submitit", reason="submitit is not installed (the extra nlgrpo[slurm])")

pytestmark = pytest.mark.slow  # many processes
LAUNCHERS = ["submitit-local", "slurm"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Short polls, and pytest's own signal handlers afterwards."""
    monkeypatch.setattr(launchers.SubmititLauncher, "interval", 0.1)
    monkeypatch.setattr(submitit.core.core.Job, "_results_timeout_s", 0)
    monkeypatch.setattr(submitit.SlurmJob.watcher, "_delay_s", 0)
    submitit.SlurmJob.watcher.clear()
    submitit.SlurmJob.watcher._registered.clear()
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """The folder of the stand-in for SLURM, whose commands are on PATH."""
    for name, value in fake_slurm.install(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "slurm"


@pytest.fixture
def fake(tmp_path, monkeypatch, capsys, cluster):
    """``nlgrpo sweep`` into ``tmp_path / "out"``, whose points end as ``how`` says; returns which of them ran."""
    monkeypatch.setattr(launchers, "command", lambda arguments, *_: [sys.executable, "-c", CODE, *arguments])
    (tmp_path / "ran").write_text("")

    def run(where, *arguments, **how):
        (tmp_path / "how").write_text(json.dumps({f"beta={name[1:]}": way for name, way in how.items()}))
        given = ["sweep", "length-bon", "--out", str(tmp_path / "out"), "--launcher", where, *arguments]
        status = cli.main(given)
        shown = capsys.readouterr()
        return status, (tmp_path / "ran").read_text().split(), shown.out + shown.err

    return run


def found(tmp_path):
    return {point.name: point for point in read_sweep_state(tmp_path / "out")}


def wait_until(done, seconds=60):
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends, "nothing came"
        time.sleep(0.02)


def when(condition, action):
    thread = threading.Thread(target=lambda: (wait_until(condition), action()))
    thread.start()
    return thread


# --- what becomes of jobs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", LAUNCHERS)
def test_every_point_is_a_job_and_finished_ones_are_kept(fake, tmp_path, where):
    status, ran, out = fake(where, "--loss.beta", "1,2,3", b2="fail")
    assert status == 1
    assert sorted(ran) == ["beta=1", "beta=2", "beta=3"]
    points = found(tmp_path)
    assert [point.state for point in points.values()] == ["done", "failed", "done"]
    assert len({point.job for point in points.values()}) == 3
    assert points["beta=2"].error == "error: the second"
    assert "failed: beta=2: error: the second" in out
    assert "  | one\n  | error: the second\n  | third\n" in out  # the end of its log
    assert re.search(rf"failed \(job {points['beta=2'].job}\)", out)
    assert points["beta=1"].log.read_text().startswith("$ ")
    status, ran, _ = fake(where, "--loss.beta", "1,2,3,4", "--retry")
    assert (status, sorted(ran)) == (0, ["beta=1", "beta=2", "beta=2", "beta=3", "beta=4"])
    assert {point.state for point in found(tmp_path).values()} == {"done"}
    assert fake("local", "--loss.beta", "1,2,3,4")[0] == 0  # nothing is left to run, anywhere


@pytest.mark.parametrize("where", LAUNCHERS)
def test_a_signal_stops_the_jobs_which_save(fake, tmp_path, where):
    held = tmp_path / "held"
    thread = when(held.exists, lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGTERM)))
    status, ran, out = fake(where, "--loss.beta", "1,2", "--jobs", "1", b1="hold")
    thread.join()
    assert (status, ran) == (0, ["beta=1"])
    assert out.endswith("stopped; run the same command again to resume\n")
    assert [point.state for point in found(tmp_path).values()] == ["stopped", "waiting"]
    assert fake(where, "--loss.beta", "1,2")[0] == 0
    assert {point.state for point in found(tmp_path).values()} == {"done"}


def test_a_signal_cancels_jobs_in_the_queue(fake, tmp_path, cluster):
    (cluster / "hold").write_text("")

    def queued():
        path = tmp_path / "out" / SWEEP_FILE
        return path.exists() and path.read_text().count('"queued"') == 2

    thread = when(queued, lambda: os.kill(os.getpid(), signal.SIGTERM))
    status, ran, _ = fake("slurm", "--loss.beta", "1,2")
    thread.join()
    assert (status, ran) == (0, [])
    assert sorted((cluster / "scancel.log").read_text().split()) == ["101", "102"]
    assert [(cluster / name / "state").read_text() for name in ("101", "102")] == ["CANCELLED"] * 2
    (cluster / "hold").unlink()
    assert sorted(fake("slurm", "--loss.beta", "1,2")[1]) == ["beta=1", "beta=2"]


@pytest.mark.parametrize("name", ["TERM", "USR2"])  # preemption; the time limit, by submitit's --signal
def test_a_job_that_is_stopped_from_outside_is_submitted_again(fake, tmp_path, cluster, name):
    def preempt():
        (tmp_path / "how").write_text("{}")
        subprocess.run(["scancel", f"--signal={name}", "101"], check=True)

    thread = when((tmp_path / "held").exists, preempt)
    status, ran, out = fake("slurm", "--loss.beta", "1,2", "--jobs", "1", b1="hold")
    thread.join()
    assert (status, ran) == (0, ["beta=1", "beta=1", "beta=2"])
    assert "beta=1: job 101 was stopped from outside; submitted again" in out
    assert [point.job for point in found(tmp_path).values()] == ["102", "103"]
    assert (cluster / "scancel.log").read_text().splitlines()[-1] == "101"  # it may not be requeued beside 102


def test_a_job_that_is_killed_has_failed(fake, tmp_path, cluster):
    thread = when((tmp_path / "held").exists, lambda: subprocess.run(["scancel", "101"], check=True))
    status, _, out = fake("slurm", "--loss.beta", "1,2", "--jobs", "1", b1="hold")
    thread.join()
    assert status == 1
    point = found(tmp_path)["beta=1"]
    assert (point.state, point.status) == ("failed", 1)
    assert point.error.startswith("job 101 ended in state CANCELLED")
    assert "failed: beta=1: job 101 ended in state CANCELLED" in out
    pids = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit()]  # the run ends with its job, on a real node
    for pid in pids:
        if str(tmp_path / "out").encode() in _command_line(pid):
            os.kill(int(pid.name), signal.SIGKILL)


def _command_line(pid):
    try:
        return (pid / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_killed_sweep_attaches_to_its_jobs(fake, tmp_path, cluster):
    (cluster / "hold").write_text("")
    (tmp_path / "how").write_text("{}")
    code = (
        "import sys; from nlgrpo import cli; from nlgrpo.apps.sweep import launchers\n"
        f"launchers.command = lambda arguments, *_: [sys.executable, '-c', {CODE!r}, *arguments]\n"
        f"given = ['--out', {str(tmp_path / 'out')!r}, '--launcher', 'slurm', '--loss.beta', '1,2']\n"
        "cli.main(['sweep', 'length-bon', *given])"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as sweeping:
        path = tmp_path / "out" / SWEEP_FILE
        wait_until(lambda: path.exists() and path.read_text().count('"queued"') == 2)
        sweeping.kill()
    assert {point.state for point in found(tmp_path).values()} == {"queued"}
    status, _, out = fake("local", "--loss.beta", "1,2")
    assert status == 2
    assert "job 101, 102 of this sweep may still run" in out.replace("102, 101", "101, 102")
    (cluster / "hold").unlink()
    status, ran, _ = fake("slurm", "--loss.beta", "1,2")
    assert (status, sorted(ran)) == (0, ["beta=1", "beta=2"])
    assert len([path for path in cluster.iterdir() if path.name.isdigit()]) == 2


def test_the_states_of_jobs_are_in_the_table(fake, tmp_path, cluster):
    assert fake("slurm", "--loss.beta", "1,2", b1="fail")[0] == 1
    data = json.loads((tmp_path / "out" / SWEEP_FILE).read_text())
    data["points"][1] |= {"state": "running", "job": "987", "folder": "other"}
    (tmp_path / "out" / SWEEP_FILE).write_text(json.dumps(data))
    _, _, out = fake("slurm", "--loss.beta", "1,2", "--dry-run")
    assert re.search(r"failed \(job 10[12]\)", out)
    assert "running (job 987)" in out


# --- resources and refusals -------------------------------------------------------------------------------------------


def test_options_are_those_of_the_submitted_script(fake, cluster):
    resources = {"partition": "gpu", "timeout-min": 90, "nodes": 1, "gpus-per-node": 4, "cpus-per-task": 8}
    resources |= {"mem-gb": 32, "account": "me", "setup": "module load cuda", "extra": "qos=high"}
    given = [part for name, value in resources.items() for part in (f"--slurm.{name}", str(value))]
    assert fake("slurm", *given, "--loss.beta", "1,2", "--nproc-per-node", "2", "--rollout.prompts", "6")[0] == 0
    script = (cluster / "101" / "script").read_text()
    found = fake_slurm.options(script)
    expected = {
        "partition": "gpu", "time": "90", "nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "4",
        "cpus-per-task": "8", "mem": "32GB", "account": "me", "qos": "high", "signal": "USR2@90", "job-name": "nlgrpo",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert "\nmodule load cuda\n" in script


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout_min": 2}, "--slurm.timeout-min = 2: allowed is >= 3"),
        ({"nodes": 0}, "--slurm.nodes = 0: allowed is >= 1"),
        ({"gpus_per_node": 1}, "--slurm.gpus-per-node = 1: allowed is none or >= --nproc-per-node = 2"),
        ({"cpus_per_task": 0}, "--slurm.cpus-per-task = 0"),
        ({"mem_gb": 0.0}, "--slurm.mem-gb = 0.0: allowed is none or > 0"),
        ({"extra": ("qos",)}, "--slurm.extra = ('qos',): allowed is NAME=VALUE"),
    ],
)
def test_resources_out_of_range(given, said):
    [fault] = SlurmOptions(**given).faults(2)
    assert fault.startswith(said)


def test_the_least_resources_are_allowed():
    least = SlurmOptions(timeout_min=3, nodes=1, gpus_per_node=2, cpus_per_task=1, mem_gb=0.1, extra=("qos=high",))
    assert least.faults(2) == []
    assert len(least.faults(3)) == 1


def test_batches_are_checked_over_the_ranks_of_all_nodes(fake):
    axis = ("--loss.beta", "1,2", "--slurm.nodes", "2", "--nproc-per-node", "2", "--rollout.prompts", "6")
    status, _, out = fake("slurm", *axis)
    assert status == 2
    assert "rollout.prompts = 6: it must be a multiple of the number of ranks, 4" in out


def test_without_submitit_or_slurm_the_message_says_so(tmp_path, monkeypatch, capsys):
    given = ["length-bon", "--out", str(tmp_path / "out"), "--launcher", "slurm", "--loss.beta", "1,2"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["sweep", *given]) == 2
    assert 'Could not detect "srun"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(["sweep", *given]) == 2
    assert "--launcher slurm needs submitit, which is not installed; install it with" in capsys.readouterr().err


def test_torchrun_of_several_nodes_meets_where_the_job_says():
    line = launchers.command(["train"], 4, 2)
    assert line[1:] == [
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "-m", "nlgrpo.cli",
        "train",
    ]  # fmt: skip


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_of_two_nodes_train(tmp_path, cluster, monkeypatch, capsys):
    """Two "nodes" of one rank each, on this machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ["length-bon", "--out", str(tmp_path / "out"), "--launcher", "slurm", "--slurm.nodes", "2", "--jobs", "1"]
    given += ["--loss.beta", "0.01,0.1", "--train.steps", "2", "--rollout.max-new-tokens", "8"]
    given += ["--evaluation.prompts", "2", "--evaluation.samples", "2", "--evaluation.ns", "[1,2]"]
    assert sweep.main(given) == 0, capsys.readouterr().out
    for point in found(tmp_path).values():
        log = point.log.read_text()
        assert point.state == "done", log
        other = point.log.with_name(f"{point.name}.node-1.log").read_text()
        assert "2 on cpu" in log + other  # ranks, in the plan of rank 0, which torchrun may give to either node
        assert [line["step"] for line in read_jsonl(point.folder / "metrics.jsonl")] == [0, 1]
