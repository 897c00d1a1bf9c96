"""The rehearsal of the GPU kit: every step runs on a CPU, and its results make tables."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from gpu_kit import plan, tables

pytestmark = pytest.mark.slow


def start(folder, *arguments):
    command = [str(plan.ROOT / "scripts" / "gpu.sh"), "all", "--rehearse", "--out", str(folder), *arguments]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def record_of(folder):
    (path,) = folder.glob("rehearsal-*.json")
    return json.loads(path.read_text())


@pytest.mark.records
def test_every_step_runs(tmp_path):
    begin = os.times()
    process = start(tmp_path)
    output, _ = process.communicate()
    end = os.times()
    assert process.returncode == 0, output
    record = record_of(tmp_path)
    assert {name: step["status"] for name, step in record["steps"].items()} == dict.fromkeys(plan.NAMES, "ok")
    for name in plan.NAMES:
        assert f"  {name}: " in output  # how it differs from a run on a GPU
    spent = end.children_user + end.children_system - begin.children_user - begin.children_system
    assert spent < 240, "seconds of the processor; others may use it too, so the clock says little"

    train, engine = (record["steps"][name]["values"] for name in ("train", "engine"))
    assert train["same_seed"]["equal"]
    assert train["resumed"]["equal"]
    for row in engine["tiny"]["rows"]:
        assert row["launches_per_token"] > 0
        assert 0 < row["sampler_seconds_per_token"] < 1
        assert row["planned_bytes"] > 0
    page = tables.page([record | {"card": "a CPU", "file": "rehearsal.json"}])
    for title in ("### Sampling", "### Ops", "### Update", "### A training step against TRL"):
        assert title in page
    assert "| nlgrpo | " in page
    assert page.count("\n| tiny") >= 4


def test_a_rehearsal_that_is_killed_keeps_the_finished_steps(tmp_path):
    process = start(tmp_path, "--only", "versions,ceilings,engine")
    try:
        end = time.perf_counter() + 300
        while not any(tmp_path.glob("*.json")) or "ceilings" not in record_of(tmp_path)["steps"]:
            assert time.perf_counter() < end
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    steps = record_of(tmp_path)["steps"]
    assert steps["versions"]["status"] == steps["ceilings"]["status"] == "ok"
    assert steps["ceilings"]["values"]["product_flops"] > 0
    assert "engine" not in steps
