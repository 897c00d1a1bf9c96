"""A plugin of pytest that writes the numbers of passed, failed and skipped tests, and the failures, as JSON.

It writes them while the tests run, so that a run that is killed leaves them. The file is that of the environment
variable NLGRPO_KIT_COUNTS.
"""

import json
import os
from pathlib import Path
from typing import Any

from nlgrpo.runtime.atomic_files import atomic_write

SHOWN = 50  # failures that the file names
LONGEST = 10  # tests whose seconds it names
WRITTEN_EVERY = 50  # reports; a test has three


class Counts:
    """Counts the results of a session, and writes them after each failure and each `WRITTEN_EVERY` tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "longest": []}
        self.seen = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a report; with pytest-xdist this runs in the process that collects the reports of all."""
        if report.failed:
            self.found["failed"] += 1
            if len(self.found["failures"]) < SHOWN:
                self.found["failures"].append(f"{report.nodeid}: {last_line(report)}")
        elif report.skipped:
            self.found["skipped"] += 1
        elif report.when == "call":
            self.found["passed"] += 1
        if report.when == "call":
            times = [*self.found["longest"], [round(report.duration, 2), report.nodeid]]
            self.found["longest"] = sorted(times, reverse=True)[:LONGEST]
        self.seen += 1
        if report.failed or self.seen % WRITTEN_EVERY == 0:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        atomic_write(self.path, json.dumps(self.found))


def pytest_configure(config: Any) -> None:
    path = os.environ.get("NLGRPO_KIT_COUNTS")
    if path is not None and not hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to its controller
        config.pluginmanager.register(Counts(Path(path)))


def last_line(report: Any) -> str:
    """The line of a report that says what is wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = text.strip().splitlines() or [""]
    return (lines[-1] if crash is None else lines[0])[:200]
