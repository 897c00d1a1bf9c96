"""Fuzz the compiled ops briefly, from the inputs in the repository; faults planted in copies of them are found."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from fuzz import fuzz_ops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(fuzz_ops.clang() is None, reason="no clang is installed, whose libFuzzer this needs"),
]
RUNS = 100_000  # over all ops

# Op, file, what is replaced by what there, and the report.
FAULTS = [
    (
        "rms_norm_backward",
        "rms_norm.cpp",
        "by, to + row * width, sum",
        "by, to + row * width + 1, sum",
        "WRITE of size",
    ),
    ("linear", "linear.cpp", "((1 << (p.depth - whole)) - 1)", "((2 << (p.depth - whole)) - 1)", "READ of size"),
    ("logits_gradient", "epilogue.cpp", "target[row] < logits", "target[row] + 1 <= logits", "signed integer overflow"),
    ("sample_tokens", "sample_tokens.cpp", "*token = chosen;", "*token = chosen + 1;", "not in the vocabulary"),
    ("swiglu_backward", "swiglu.cpp", "float* into = to +", "float* into = const_cast<float*>(from) +", "was changed"),
]


@pytest.fixture(scope="module")
def target():
    return fuzz_ops.build(fuzz_ops.marches()[-1])


@pytest.fixture(scope="module")
def faulty(target, tmp_path_factory):
    """The target with all of FAULTS. Only their files are compiled again."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(fuzz_ops.ROOT / "csrc", folder / "csrc")
    shutil.copytree(target.parent, folder / "objects", ignore=shutil.ignore_patterns(target.name))
    for _, file, right, wrong, _ in FAULTS:
        path = folder / "csrc" / file
        text = path.read_text()
        assert text.count(right) == 1, (file, right)
        path.write_text(text.replace(right, wrong))
    return fuzz_ops.build(fuzz_ops.marches()[-1], folder / "objects", folder / "csrc")


def test_every_op_is_fuzzed():
    names = fuzz_ops.ops()
    assert len(names) == (fuzz_ops.ROOT / "csrc" / "library.cpp").read_text().count("m.def(") == len(set(names))
    assert sum(fuzz_ops.runs_of(names, RUNS).values()) == pytest.approx(RUNS, rel=0.01)


@pytest.mark.parametrize("op", fuzz_ops.ops())
def test_new_cases_of_an_op_find_no_fault(target, tmp_path, op):
    runs = fuzz_ops.runs_of(fuzz_ops.ops(), RUNS)[op]
    result = fuzz_ops.fuzz(target, op, runs, seed=0, folder=tmp_path)
    assert not result.faults, result.log
    assert result.cases >= runs
    assert result.refused < 0.5 * result.cases
    assert result.edges > 0


@pytest.mark.parametrize(("op", "report"), [(fault[0], fault[-1]) for fault in FAULTS])
def test_a_planted_fault_is_found(faulty, tmp_path, op, report):
    if op == "linear" and fuzz_ops.marches()[-1] != "x86-64-v4":
        pytest.skip("without AVX-512 the op is the library's")
    result = fuzz_ops.fuzz(faulty, op, 20_000, seed=0, folder=tmp_path)
    assert len(result.faults) == 1, result.log
    assert re.search(report, result.log), result.log
    again = fuzz_ops.start(faulty, op, *result.faults)
    assert again.returncode != 0
    assert re.search(report, again.stderr), again.stderr


def test_without_clang_it_says_what_is_missing(tmp_path):
    env = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, fuzz_ops.__file__], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == ["make fuzz needs clang, with libFuzzer: apt-get install clang (Debian, Ubuntu)"]
