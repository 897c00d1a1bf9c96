"""Check that ``make test-asan`` reports faults, with faulty functions that are built and called like the ops.

This needs the environment of ``make test-asan``. The file is therefore not named ``test_*``, and pytest collects it
only if its path is given.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nlgrpo.kernels import extension

ROOT = Path(__file__).parents[1]

CALLS = """
import ctypes, sys, torch
fault, x = ctypes.CDLL(sys.argv[1])[sys.argv[2]], torch.ones(1001)
fault.restype, fault.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int64)
for n in sys.argv[3:]:
    print(fault(x.data_ptr(), int(n)), flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Library of faulty functions, built by setup.py with the flags of the ops."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "csrc").mkdir()
    for name in ("csrc/simd.h", "tests/planted_faults.cpp", "setup.py"):
        shutil.copy(ROOT / name, tree / "csrc" if name.endswith(".cpp") else tree / name)
    env = os.environ | {"NLGRPO_SANITIZE": "1", "LD_PRELOAD": ""}
    command = (sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "built")
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tree.glob("built/**/*.so")
    return path


@pytest.mark.parametrize(
    ("fault", "right", "answer", "wrong", "report"),
    [
        ("reads", 1001, 1001, 1002, "heap-buffer-overflow"),
        ("writes", 1001, 2, 1002, "heap-buffer-overflow"),
        ("reads_the_room_of_a_vector", 1001, 3, 1002, "__n < this->size()"),
        ("multiplies", 3, 3 << 61, 4, "signed integer overflow"),
        ("shifts", 61, 1 << 61, 64, "shift exponent 64 is too large"),
    ],
)
def test_a_fault_ends_the_process_with_a_report(library, fault, right, answer, wrong, report):
    command = (sys.executable, "-c", CALLS, str(library), fault, str(right), str(wrong))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(answer)], done.stderr
    assert report in done.stderr
    assert done.returncode != 0


def test_the_sanitized_ops_are_loaded():
    assert extension.available()
    maps = Path("/proc/self/maps").read_text()
    assert "/_sanitized.abi3.so" in maps
    assert "/_ext.abi3.so" not in maps
