"""The tests marked ``gpu``, in many processes."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_kit.child import Kit, Skip
from gpu_kit.plan import ROOT

PROCESSES = 12
REPORT = 10.0  # seconds before its limit at which pytest is interrupted, and reports what it has run
MARKED = re.compile(r"mark\.gpu|def \w+\([^)]*\bdevice\b")  # the fixture `device` marks its case for a GPU
REHEARSED = "tests/kernels/test_dispatch.py"
SHOWN = 50  # failures that the JSON names


def run(kit: Kit) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    files = marked_files(ROOT / "tests")
    kit.put(files=len(files))
    files = kit.pick(files, [ROOT / REHEARSED])
    report = kit.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-m", kit.pick("gpu", "not gpu"), "--continue-on-collection-errors"]
    command += [str(path.relative_to(ROOT)) for path in files]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(kit.pick(PROCESSES, 0))]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        process.wait(kit.seconds - REPORT)
        kit.put(complete=True)
    except subprocess.TimeoutExpired:
        kit.put(complete=False)
        process.send_signal(signal.SIGINT)
        process.wait(8)
    counts, failures = summary(report)
    kit.put(**counts, failures=failures[:SHOWN])
    if failures:
        raise RuntimeError(f"{len(failures)} tests fail: {', '.join(failures[:3])}")
    if process.returncode not in (0, 2):  # 2: interrupted above
        raise RuntimeError(f"pytest ended with status {process.returncode}")
    if not sum(counts.values()):
        raise RuntimeError("pytest found no test that is marked gpu")


def marked_files(folder: Path) -> list[Path]:
    """Files of tests with cases for a GPU: collecting all others would take longer than running these."""
    files = sorted(folder.rglob("test_*.py"))
    return [path for path in files if MARKED.search(path.read_text("utf-8"))]


def summary(report: Path) -> tuple[dict[str, int], list[str]]:
    """Read numbers of passed, failed and skipped tests, and the names and messages of those that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: list[str] = []
    if not report.is_file():
        return counts, failures
    for case in ElementTree.parse(report).iter("testcase"):
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        if fault is not None:
            counts["failed"] += 1
            first = (fault.get("message") or "").splitlines()[:1]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {''.join(first)[:200]}")
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts, failures
