"""The recipe length-bon in bfloat16: FSDP2, NCCL, checkpoints in the background, resuming, and the same seed again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_kit.child import Kit
from gpu_kit.plan import ROOT

STEPS, RESUMED = 6, 8
SMALL = {"rollout.max-new-tokens": 8, "rollout.prompts": 2, "rollout.samples": 4}
TIMES = ("time", "perf")  # metrics that are no part of the result


def run(kit: Kit) -> None:
    """Train 6 steps, resume to 8 with torchrun; beside it, 8 steps with the same seed."""
    first, again = kit.folder / "first", kit.folder / "again"
    beside = start(kit, again, RESUMED)
    end(start(kit, first, STEPS), "the run of 6 steps")
    kit.put(checkpoints=sorted(path.name for path in (first / "checkpoints").iterdir()))
    end(start(kit, first, RESUMED, torchrun=True), "the resumed run")
    end(beside, "the run with the same seed")
    ours, theirs = metrics(first), metrics(again)
    for name, rows in (("resumed", ours), ("again", theirs)):
        if [row["step"] for row in rows] != list(range(RESUMED)):
            raise RuntimeError(f"{name}: expected the steps 0 to {RESUMED - 1}, got {[row['step'] for row in rows]}")
    before, after = differences(ours[:STEPS], theirs[:STEPS]), differences(ours[STEPS:], theirs[STEPS:])
    kit.put(
        step_seconds=[row["step_time"] for row in theirs],
        same_seed={"equal": before == 0.0, "largest_relative_difference": before},
        resumed={"equal": after == 0.0, "largest_relative_difference": after},
        loss=[row["loss"] for row in ours],
    )
    if not all(math.isfinite(row["loss"]) for row in ours):
        raise RuntimeError("a loss is not finite")


def start(kit: Kit, out: Path, steps: int, *, torchrun: bool = False) -> subprocess.Popen[str]:
    """Start a run, by this Python or by torchrun."""
    options: dict[str, Any] = {
        "train.steps": steps,
        "train.checkpoint-every": 2,
        "train.async-save": True,
        "train.samples-every": 0,
        "model.dtype": "bfloat16",
        "evaluation.prompts": 0,
        "train.out": out,
    } | kit.pick({}, SMALL)
    launcher = ["-m", "nlgrpo", "train"]
    if torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "nlgrpo/train.py"]
    command = [sys.executable, *launcher, "length-bon"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def end(process: subprocess.Popen[str], what: str) -> None:
    """Wait for a run. Raises RuntimeError, with the line of its output that names an error, if it failed."""
    output, _ = process.communicate()
    if process.returncode:
        print(output[-3000:])
        lines = output.strip().splitlines() or ["no output"]
        error = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        raise RuntimeError(f"{what} ended with status {process.returncode}: {error.strip()}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Largest |a - b| / max(|a|, |b|, 1e-3) over all metrics but the times; 0 if all are equal to the bit.

    The loss of a step is a sum that cancels, and may be 1e-7.
    """
    largest = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine.keys() & other.keys():
            a, b = mine[name], other[name]
            if name.partition("/")[0] in TIMES or name == "step_time" or a == b or not isinstance(a, float):
                continue
            largest = max(largest, abs(a - b) / max(abs(a), abs(b), 1e-3))
    return largest
