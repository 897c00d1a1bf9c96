"""A long run of a tiny model: do memory, descriptors, threads, processes and files stay flat?

    python bench/bench_soak.py --save                 # 20,000 steps, about 12 minutes on two cores
    python bench/bench_soak.py --steps 2000
    python bench/bench_soak.py --steps 2000 --leak    # the bounds must notice a reward that keeps what it makes

The run is `nlgrpo train` in a process of its own, with checkpoints, samples, TensorBoard and a reward in a thread.
Every few seconds its memory (RSS), descriptors, threads, child processes and the sizes of its files are read from
outside. The slope of each is fitted by least squares over the second half of the run, per 1,000 steps, and has a bound;
what is written once per step is divided by the steps instead.

Then the report of a run of 100,000 steps is written from the metrics, and opened in Chromium if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import MIB, machine, one_line, save
from random_models import random_llama, random_prompts, save_model, save_prompts

EVERY = 2.0  # seconds between readings
# Largest slope of a quantity, per 1,000 steps of the second half.
BOUNDS = {"resident_mib": 1.0, "descriptors": 0.1, "threads": 0.1, "processes": 0.1, "checkpoints_mib": 0.05}
PER_STEP = ("metrics_bytes", "samples_bytes", "tensorboard_bytes")
REWARD = '''
def spread(completions, log_metric=None, **columns):
    """A new list of texts in each call, and a metric, as rewards have them."""
    values = [len(set(text.split())) / 8 for text in completions]
    log_metric("largest", max(values))
    return values
'''

LEAK = '''
import os, threading

kept = []


def leaks(completions, **columns):
    """8 KiB in each call, and a file and a thread in each 20th."""
    kept.append(os.urandom(8192))
    if len(kept) % 20 == 0:
        kept.append(open(__file__))
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return [0.0] * len(completions)
'''


def command(folder: Path, steps: int, leak: bool) -> list[str]:
    options = {
        "model.path": folder / "model", "data.source": folder / "prompts.jsonl", "train.out": folder / "run",
        "train.steps": steps, "train.checkpoint-every": max(1, steps // 100), "train.samples-every": 20,
        "train.track": "tensorboard", "rewards.spread.function": f"{folder / 'rewards.py'}:spread",
        "rollout.prompts": 2, "rollout.samples": 4, "rollout.max-new-tokens": 8, "optim.lr": 1e-4, "loss.beta": 0.02,
        "evaluation.prompts": 8,
    }  # fmt: skip
    if leak:
        options["rewards.leaks.function"] = f"{folder / 'rewards.py'}:leaks"
    parts = (part for name, value in options.items() for part in (f"--{name}", str(value)))
    return [sys.executable, "-m", "nlgrpo", "train", "blank", *parts]


# --- one reading ------------------------------------------------------------------------------------------------------


def size(path: Path) -> int:
    """Bytes of a file, or of the files below a folder; 0 if there is none."""
    found = 0
    for file in [path] if path.is_file() else path.rglob("*"):
        try:
            found += file.stat().st_size if file.is_file() else 0
        except OSError:  # it was removed meanwhile
            continue
    return found


def children(pid: int) -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            count += int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) == pid
        except OSError:  # it has ended
            continue
    return count


def reading(pid: int, run: Path) -> dict[str, float] | None:
    """One row: the step, and all quantities; None before the first step."""
    log = run / "metrics.jsonl"
    steps = log.read_bytes().count(b"\n") if log.is_file() else 0
    if not steps:
        return None
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text("ascii").splitlines())
    return {
        "step": steps,
        "resident_mib": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "processes": children(pid),
        "checkpoints_mib": size(run / "checkpoints") / MIB,
        "metrics_bytes": size(log),
        "samples_bytes": size(run / "samples.jsonl"),
        "tensorboard_bytes": size(run / "tensorboard"),
    }


def watch(process: subprocess.Popen[bytes], run: Path) -> list[dict[str, float]]:
    rows = []
    while process.poll() is None:
        time.sleep(EVERY)
        try:
            row = reading(process.pid, run)
        except (OSError, KeyError):  # it ended meanwhile
            break
        rows += [row] if row is not None else []
    return rows


# --- what it shows ----------------------------------------------------------------------------------------------------


def slopes(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Slope per 1,000 steps over the second half, with first and last value; bytes per step for the logs."""
    steps = np.array([row["step"] for row in rows])
    half = steps >= steps[-1] / 2
    found = {}
    for name in rows[0].keys() - {"step"}:
        values = np.array([row[name] for row in rows])
        slope = np.polyfit(steps[half] / 1000, values[half], 1)[0]
        found[name] = {"first": float(values[0]), "last": float(values[-1]), "slope": float(slope)}
        if name in PER_STEP:
            found[name]["per_step"] = float(slope / 1000)
    return found


def long_report(run: Path, steps: int = 100_000) -> dict[str, float]:
    """Repeat the metrics of the run up to ``steps``, write the report, and open it. Seconds and bytes."""
    copy = run.with_name("long")
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", ".lock*"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    with (copy / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(steps):
            file.write(json.dumps(lines[step % len(lines)] | {"step": step}) + "\n")
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "nlgrpo", "report", str(copy)], capture_output=True, text=True, check=False
    )
    found = {"write_seconds": time.perf_counter() - begun, "bytes": float(size(copy / "report.html"))}
    if done.returncode:
        sys.exit(f"the report failed\n{done.stderr[-2000:]}")
    browser = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if browser is not None:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000", "--dump-dom"]
        begun = time.perf_counter()
        page = subprocess.run([browser, *options, (copy / "report.html").as_uri()], capture_output=True, check=True)
        found |= {"open_seconds": time.perf_counter() - begun, "dom_bytes": float(len(page.stdout))}
    return found


def main() -> None:
    args = arguments()
    facts = machine("transformers")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        save_model(random_llama(vocab=64, width=16, ffn=32, layers=1, heads=2), folder / "model")
        save_prompts(random_prompts(64, 4, 64), folder / "prompts.jsonl")
        (folder / "rewards.py").write_text(REWARD + LEAK, "utf-8")
        begun = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command(folder, args.steps, args.leak), stdout=log, stderr=log, env=environment)
            rows = watch(process, folder / "run")
        seconds = time.perf_counter() - begun
        if process.wait():
            sys.exit(f"the run ended with status {process.returncode}\n{(folder / 'log').read_text()[-4000:]}")
        rows = [row for row in rows if row["step"] < args.steps]  # at the end it evaluates, and writes a report
        found, printed = slopes(rows), size(folder / "log")
        report = {} if args.leak or args.steps < 100 else long_report(folder / "run")
    broken = [name for name, bound in BOUNDS.items() if abs(found[name]["slope"]) > bound]
    for name in (*BOUNDS, *PER_STEP):
        row = found[name]
        bound = f"bound {BOUNDS[name]:g}" if name in BOUNDS else f"{row['per_step']:.0f} per step"
        values = f"{row['first']:12.1f} -> {row['last']:12.1f}   slope {row['slope']:10.3f} per 1,000 steps"
        print(f"{name:18s} {values}   {bound}")
    print(f"{args.steps} steps in {seconds:.0f} s; the terminal got {printed / args.steps:.0f} bytes per step")
    if report:
        print("report of 100,000 steps: " + ", ".join(f"{name} {value:,.1f}" for name, value in report.items()))
    print(one_line(facts, args.threads))
    result: dict[str, Any] = {"bench": "soak", "steps": args.steps, "seconds": seconds, "readings": len(rows)}
    shown = rows[:: max(1, len(rows) // 40)]
    result |= {"resident_mib": [[row["step"], round(row["resident_mib"], 1)] for row in shown], "slopes": found}
    result |= {"bounds": BOUNDS, "report": report, "machine": facts}
    if args.save:
        print(f"saved {save('bench_soak', result)}")
    print(json.dumps(result))
    if broken:
        sys.exit(f"not flat: {', '.join(broken)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the run (default: 20,000)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--quick", action="store_true", help="200 steps")
    parser.add_argument("--leak", action="store_true", help="add a reward that keeps memory, files and threads")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_soak.json")
    args = parser.parse_args()
    args.steps = 200 if args.quick else args.steps
    return args


if __name__ == "__main__":
    main()
