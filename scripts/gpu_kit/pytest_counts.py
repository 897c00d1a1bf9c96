"""A plugin of pytest that writes the numbers of passed, failed and skipped tests, and the failures, as JSON.

It also writes them if pytest was interrupted. The file is that of the environment variable NLGRPO_KIT_COUNTS.
"""

import json
import os
from pathlib import Path
from typing import Any

SHOWN = 50  # failures that the file names


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the file at the end of the session; with pytest-xdist, in the process that collects the results."""
    path = os.environ.get("NLGRPO_KIT_COUNTS")
    if path is None:
        return
    stats = terminalreporter.stats
    broken = [*stats.get("failed", []), *stats.get("error", [])]
    found = {
        "passed": len(stats.get("passed", [])),
        "failed": len(broken),
        "skipped": len(stats.get("skipped", [])),
        "failures": [f"{report.nodeid}: {last_line(report)}" for report in broken[:SHOWN]],
    }
    Path(path).write_text(json.dumps(found), encoding="utf-8")


def last_line(report: Any) -> str:
    """The line of a report that says what is wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = text.strip().splitlines() or [""]
    return (lines[-1] if crash is None else lines[0])[:200]
