"""The tests marked ``gpu``, in many processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from gpu_kit.child import Kit, Skip
from gpu_kit.plan import ROOT

PROCESSES = 12
REPORT = 10.0  # seconds before its limit at which pytest is interrupted
MARKED = re.compile(r"mark\.gpu|def \w+\([^)]*\bdevice\b")  # the fixture `device` marks its case for a GPU
REHEARSED = "tests/kernels/test_dispatch.py"


def run(kit: Kit) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    files = marked_files(ROOT / "tests")
    kit.put(files=len(files))
    files = kit.pick(files, [ROOT / REHEARSED])
    counts_file = kit.folder / "counts.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gpu_kit.pytest_counts"]
    command += ["-m", kit.pick("gpu", "not gpu"), "--continue-on-collection-errors"]
    command += [str(path.relative_to(ROOT)) for path in files]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(kit.pick(PROCESSES, 0))]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"NLGRPO_KIT_COUNTS": str(counts_file)})
    try:
        process.wait(kit.seconds - REPORT)
        kit.put(complete=True)
    except subprocess.TimeoutExpired:
        kit.put(complete=False)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REPORT - 2)
    process.kill()  # if it does not end by itself: its counts are written
    if not counts_file.is_file():
        raise RuntimeError(f"pytest ended with status {process.returncode}")
    counts = json.loads(counts_file.read_text("utf-8"))
    kit.put(**counts)
    if counts["failures"]:
        raise RuntimeError(f"{counts['failed']} tests fail: {'; '.join(counts['failures'][:3])}")
    if not counts["passed"]:
        raise RuntimeError(f"no test has passed, {counts['skipped']} were skipped")


def marked_files(folder: Path) -> list[Path]:
    """Files of tests with cases for a GPU: collecting all others would take longer than running these."""
    files = sorted(folder.rglob("test_*.py"))
    return [path for path in files if MARKED.search(path.read_text("utf-8"))]
