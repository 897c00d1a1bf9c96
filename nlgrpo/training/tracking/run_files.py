"""The JSON-lines files of a run, and the names of other files that logging writes.

``metrics.jsonl`` has a line per step, ``samples.jsonl`` one per completion, ``evaluations.jsonl`` one per evaluation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.distributed import Ranks

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
REPORT_FILE = "report.html"
TRACKERS_FILE = "trackers.json"
# What logging writes into the folder of a run.
LOGGED = (METRICS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, TRACKERS_FILE, "tensorboard", "wandb", "comet")
TRACKER_KEYS = ("train.track", "train.project", "train.run_name")  # they may change when a run resumes
TAIL = 2**16  # bytes; more than two lines of metrics


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects with an integer ``step`` from a JSON-lines file; skip lines that a kill left incomplete."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text("utf-8", errors="replace").split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def last_step(path: Path) -> int | None:
    """Return the step of the last complete line of a file, read from its end; None if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)["step"])
    return None


def trim(path: Path, resume_step: int) -> None:
    """Remove the entries from ``resume_step`` on. These steps run again and would be logged twice."""
    write(path, [entry for entry in read_jsonl(path) if entry["step"] < resume_step])


def write(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file by these entries, atomically."""
    atomic_files.atomic_write(path, "".join(_line(entry) for entry in entries))


def append(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Append lines. Closes the file, so that no part of a line stays in a buffer if a write fails."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(_line(entry) for entry in entries)


def sync(folder: Path, ranks: Ranks) -> None:
    """Write the files of a run to the disk, before a checkpoint that continues them; collective.

    After a power cut the steps before the checkpoint are not repeated, so their lines must exist. Raises UserError on
    all ranks if the disk fails.
    """

    def work() -> None:
        with atomic_files.into(folder):
            for path in filter(Path.exists, (folder / METRICS_FILE, folder / SAMPLES_FILE, folder / EVALUATIONS_FILE)):
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    ranks.agree(lambda: work() if ranks.first else None)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(_finite(entry), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
