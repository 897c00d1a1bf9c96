"""Compile every Triton kernel for three GPUs on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SHARED = 16 * 1024  # bytes; an SM has 100 KiB and more, so that several programs fit on one


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    pytest.importorskip("triton")
    fresh = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    script = Path(__file__).with_name("build_triton.py")
    done = subprocess.run([sys.executable, script], env=os.environ | fresh, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_kernels_build_for_all_targets(builds):
    names = {build["kernel"] for build in builds}
    assert {name.split()[0] for name in names} == {"statistics", "gradient", "policy_loss", "linearize", "sample"}
    assert {name.split()[1] for name in names if name.startswith("policy_loss")} == {"ppo", "cispo", "reinforce"}
    assert sum(name.startswith("linearize") and name.endswith("float64") for name in names) == 7
    assert len(builds) == 3 * len(names)
    assert {build["sm"] for build in builds} == {80, 90, 100}


def test_nothing_spills_and_shared_memory_is_small(builds):
    assert not [build for build in builds if build["STACK"] or build["LOCAL"]]
    assert not [build for build in builds if build["shared"] > SHARED]


def test_logits_are_read_16_bytes_at_a_time(builds):
    rows = [build for build in builds if build["kernel"].split()[0] in ("statistics", "gradient", "sample")]
    assert rows
    assert {build["load"] for build in rows} == {16}
