"""Time training steps on a machine whose cores others use, with PyTorch's number of threads and with nlgrpo's.

    python bench/bench_contention.py [--quick] [--rounds 5] [--busy 0 1 2] [--save]

Each process trains the same random Llama (1.05 million parameters, float32) on 6 prompts x 8 completions of up to 128
tokens, by ``nlgrpo train``. "fixed" sets OMP_NUM_THREADS to the number of cores, which is PyTorch's own choice;
"chosen" leaves it to the load at the start. Beside them run 0, 1 or 2 processes that each use a core. The sides take
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_step
from bench_step import PROMPTS, SHAPES
from common import machine, one_line, save
from random_models import LIMIT

SIDES = ("fixed", "chosen")
BUSY = "while True: pass"
SETTLE = 1.0  # seconds until the other processes run
WARMUP = 2  # steps that are not measured


@contextmanager
def others(count: int) -> Iterator[None]:
    """Context in which ``count`` processes use a core each."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(SETTLE)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(side: str, folder: Path, steps: int, cores: int) -> dict[str, Any]:
    """Train in a new process; return its seconds per step, and its number of threads."""
    out = folder / "run"
    options = {
        "model.path": folder / "model",
        "data.source": folder / "prompts.jsonl",
        "rollout.prompts": PROMPTS,
        "rollout.samples": 8,
        "rollout.max-new-tokens": LIMIT,
        "rewards.length.function": "length(target=50, scale=10)",
        "rewards.length.objective": "mean",
        "optim.lr": bench_step.LEARNING_RATE,
        "evaluation.prompts": 0,
        "train.steps": WARMUP + steps,
        "train.checkpoint-every": 0,
        "train.samples-every": 0,
        "train.out": out,
        "train.restart": True,
    }
    command = [sys.executable, "-m", "nlgrpo", "train", "blank"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if side == "fixed":
        environment["OMP_NUM_THREADS"] = str(cores)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side}: the process ended with status {done.returncode}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    said = re.search(r"^(\d+) threads?:", done.stdout, re.MULTILINE)
    threads = int(said[1]) if said and side == "chosen" else cores
    return {"seconds": [row["step_time"] for row in rows[WARMUP:]], "threads": threads}


def compare(folder: Path, busy: int, args: argparse.Namespace, cores: int) -> dict[str, Any]:
    """Run all rounds with ``busy`` processes beside them."""
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            with others(busy):
                rounds[side].append(measure(side, folder, args.steps, cores))
    row: dict[str, Any] = {"busy": busy}
    for side in SIDES:
        medians = [statistics.median(found["seconds"]) for found in rounds[side]]
        row[side] = {
            "seconds": round(statistics.median(medians), 4),
            "rounds": [round(seconds, 4) for seconds in medians],
            "threads": [found["threads"] for found in rounds[side]],
        }
    return row


def main() -> None:
    args = arguments()
    cores = len(os.sched_getaffinity(0))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = bench_step.write_inputs(folder, 12, SHAPES["1M"])
        for busy in args.busy:
            rows.append(compare(folder, busy, args, cores))
            fixed, chosen = rows[-1]["fixed"], rows[-1]["chosen"]
            print(
                f"{busy} busy: {cores} threads {fixed['seconds']:.3f} s/step, chosen {chosen['threads']} "
                f"{chosen['seconds']:.3f} s/step, x{fixed['seconds'] / chosen['seconds']:.2f}",
                flush=True,
            )
    facts = machine("transformers")
    print(f"{parameters / 1e6:.2f}M Llama, {cores} cores; {one_line(facts, cores)}, medians of {args.rounds} processes")
    result = {"bench": "contention", "parameters": parameters, "cores": cores, "rows": rows, "machine": facts}
    if args.save:
        print(f"saved {save('bench_contention', result)}")
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=bench_step.at_least(1), default=5, help="processes per side (default: 5)")
    parser.add_argument("--steps", type=bench_step.at_least(1), default=8, help="measured steps (default: 8)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of other processes (0 1 2)")
    parser.add_argument("--quick", action="store_true", help="1 round of 2 steps, to check that it works")
    parser.add_argument("--save", action="store_true", help="write bench/results/cpu/bench_contention.json")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
        args.steps = 2
    return args


if __name__ == "__main__":
    main()
