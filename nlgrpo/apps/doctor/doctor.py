"""The command ``nlgrpo doctor``: checks a machine, and whether nlgrpo computes on it what it should.

Prints a table with one row per result, and what to do about the rows that failed. The checks are in `check_*`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo.apps.doctor import (
    check_attention,
    check_kernels,
    check_machine,
    check_ops,
    check_packages,
    check_ranks,
    check_training,
)
from nlgrpo.apps.doctor.findings import Check, Result, run, without_folders
from nlgrpo.apps.doctor.options import Doctor, read_options
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.runtime.console import can_be_live

CHECKS = (
    Check("packages", "versions of Python and packages against the supported ranges", check_packages.packages),
    Check("cpu", "model, cores, vector instructions and memory", check_machine.cpu),
    Check("gpu", "GPUs, driver, CUDA of the driver and of torch", check_machine.gpu),
    Check("disk", "free space of the working folder and for temporary files", check_machine.disk),
    Check("shared-memory", "size of /dev/shm", check_machine.shared_memory),
    Check("ranks", "all-reduce between processes: gloo on the CPU, NCCL between GPUs", check_ranks.ranks),
    Check("attention", "the attention that training uses, against float64", check_attention.attention),
    Check("ops", "every compiled CPU op against plain PyTorch in float64", check_ops.ops, check_ops.ADVICE),
    Check(
        "kernels",
        "every Triton kernel: its error on a GPU, else whether it compiles for three",
        check_kernels.triton_kernels,
        check_kernels.COMPILER,
    ),
    Check(
        "training",
        "training steps of a small random model, in float32 and in bfloat16 under FSDP2, against float64",
        check_training.training,
    ),
)
FORMAT = 1  # of the JSON file
# Environment variables that change what is checked. No others are written, as they may contain secrets.
SETTINGS = ("NLGRPO_TRITON", "NLGRPO_ATTENTION", "TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def main(arguments: Sequence[str]) -> int:
    """Run the checks and print the table. Returns 0 if none failed, 1 if one did, and 2 for wrong options."""
    options = read_options(arguments)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<14} {check.about}")
        return 0
    if problem := _problem(options):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    console = Console(stderr=options.json == "-")
    start = time.perf_counter()
    results: list[Result] = []
    for check in CHECKS:
        if not options.only or check.name in options.only:
            with console.status(f"{check.name}: {check.about}") if can_be_live(console) else nullcontext():
                results += run(check)
    seconds = time.perf_counter() - start
    console.print(_table(results))
    _write(options.json, _record(results, seconds))
    return _verdict(results, seconds, console)


def _problem(options: Doctor) -> str | None:
    """Say what is wrong with the options, before the checks run."""
    names = [check.name for check in CHECKS]
    unknown = [name for name in options.only if name not in names]
    if unknown:
        return f"no check is named {', '.join(map(repr, unknown))}; the checks are: {', '.join(names)}"
    if options.json not in ("", "-"):
        path = Path(options.json)
        if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            return f"--json {options.json}: expected a file in a folder that exists and can be written"
    return None


def _record(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Everything that was found, for an issue: without secrets, the name of the machine, or folders of the user."""
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    if "NLGRPO_EXT" in os.environ:  # 0, or a path
        settings["NLGRPO_EXT"] = without_folders(os.environ["NLGRPO_EXT"])
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": check_packages.versions(),
        "platform": {"system": platform.platform(), "machine": platform.machine()},
        "settings": settings,
        "passed": all(result.status != "failed" for result in results),
        "seconds": round(seconds, 1),
        "results": [result.as_json() for result in results],
    }


def _write(path: str, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if path == "-":
        print(text, end="")
    elif path:
        atomic_write(Path(path), text)


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("check")
    table.add_column("", no_wrap=True)
    table.add_column("found")
    table.add_column("s", justify="right", no_wrap=True)
    for result in results:
        status = Text(result.status, style=STYLES[result.status])
        table.add_row(Text(result.name), status, Text(result.detail), Text(f"{result.seconds:.1f}"))
    return table


def _verdict(results: Sequence[Result], seconds: float, console: Console) -> int:
    """Print what to do, and how many results have each status. Returns the exit status."""
    for result in results:
        if result.status in ("failed", "warning"):
            advice = f"\n    {result.advice}" if result.advice else ""
            line = Text(f"{result.status}: {result.name}: {result.detail}{advice}", style=STYLES[result.status])
            console.print(line, soft_wrap=True)
    counts = {status: sum(result.status == status for result in results) for status in STYLES}
    found = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(f"{len(results)} result{'s' * (len(results) != 1)}: {found}; {seconds:.0f} s", highlight=False)
    return 1 if counts["failed"] else 0
