"""Compile every Triton kernel for GPUs on a machine without one: for Hopper in CI, for all three by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nlgrpo.apps.doctor.triton_builds import CAPABILITIES

pytestmark = pytest.mark.slow

SHARED = 16 * 1024  # bytes; an SM has 100 KiB and more, so that several programs fit on one
HOPPER = 90


@pytest.fixture(
    scope="module",
    params=[pytest.param(sm, marks=() if sm == HOPPER else pytest.mark.records) for sm in CAPABILITIES],
    ids="sm{}".format,
)
def builds(request, tmp_path_factory):
    pytest.importorskip("triton")
    fresh = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, Path(__file__).with_name("build_triton.py"), str(request.param)]
    done = subprocess.run(command, env=os.environ | fresh, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {build["sm"] for build in found} == {request.param}
    return found


def test_all_kernels_build(builds):
    names = {build["kernel"] for build in builds}
    assert {name.split()[0] for name in names} == {"statistics", "gradient", "policy_loss", "linearize", "sample"}
    assert {name.split()[1] for name in names if name.startswith("policy_loss")} == {"ppo", "cispo", "reinforce"}
    assert sum(name.startswith("linearize") and name.endswith("float64") for name in names) == 7
    assert len(builds) == len(names)


def test_nothing_spills_and_shared_memory_is_small(builds):
    assert not [build for build in builds if build["STACK"] or build["LOCAL"]]
    assert not [build for build in builds if build["shared"] > SHARED]


def test_logits_are_read_16_bytes_at_a_time(builds):
    rows = [build for build in builds if build["kernel"].split()[0] in ("statistics", "gradient", "sample")]
    assert rows
    assert {build["load"] for build in rows} == {16}
