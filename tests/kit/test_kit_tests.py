"""The step that runs the tests marked ``gpu``: which files it takes, and what it counts."""

import json
import os
import subprocess
import sys

import pytest
from gpu_kit import check_tests, plan

CASES = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "what is wrong"
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError("no such device")
def test_error(broken): pass
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_passed_failed_and_skipped_tests_are_counted_and_failures_named(tmp_path, workers):
    (tmp_path / "test_cases.py").write_text(CASES)
    counts = tmp_path / "counts.json"
    environment = os.environ | {
        "PYTHONPATH": str(plan.ROOT / "scripts"),
        "NLGRPO_KIT_COUNTS": str(counts),
    }
    command = [sys.executable, "-m", "pytest", "-p", "gpu_kit.pytest_counts", "-n", workers, "-q", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = json.loads(counts.read_text())
    assert {name: found[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 2, "skipped": 1}
    bad, error = sorted(found["failures"])
    assert "test_cases.py::test_bad: " in bad
    assert "what is wrong" in bad
    assert "test_cases.py::test_error: ValueError: no such device" in error


def test_files_with_cases_for_a_gpu_are_found(tmp_path):
    texts = {
        "test_marked.py": "@pytest.mark.gpu\ndef test_it(): pass",
        "test_device.py": "def test_it(\n    x,\n    device,\n): pass",
        "test_other.py": "def test_it(devices): pass\n# on which device",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in check_tests.marked_files(tmp_path)] == ["test_device.py", "test_marked.py"]
    assert len(check_tests.marked_files(plan.ROOT / "tests")) >= 4
