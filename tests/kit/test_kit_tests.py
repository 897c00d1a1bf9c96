"""The steps `tests` and `train`: which files they take, what they count, and how they compare and report runs."""

import json
import os
import subprocess
import sys

import pytest
from gpu_kit import check_tests, check_train, plan

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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("Traceback\\n  line\\nKeyError: <class 'type'>\\n  more\\n", "KeyError: <class 'type'>"),
        ("first\\nlast\\n", "last"),
        ("", "no output"),
    ],
)
def test_a_run_that_fails_is_reported_by_its_error(output, error, capsys):
    code = f"print('''{output}''', end=''); raise SystemExit(3)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with pytest.raises(RuntimeError, match="the run ended with status 3: ") as raised:
        check_train.end(process, "the run")
    assert str(raised.value).endswith(f": {error}")
    assert "first" not in str(raised.value)


def test_metrics_are_compared_to_the_bit_without_times():
    ours = [{"step": 0, "loss": 1e-7, "grad_norm": 2.0, "time/update": 1.0, "step_time": 2.0}]
    theirs = [{"step": 0, "loss": 1e-7, "grad_norm": 2.0, "time/update": 3.0, "step_time": 9.0}]
    assert check_train.differences(ours, theirs) == 0.0
    theirs[0]["loss"] = 2e-7
    assert check_train.differences(ours, theirs) == pytest.approx(1e-4)
    theirs[0]["grad_norm"] = 2.2
    assert check_train.differences(ours, theirs) == pytest.approx(0.2 / 2.2)
