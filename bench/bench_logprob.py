"""Times `linear_logprob`, forward and backward with an entropy term, against plain torch and its compiler.

    python bench/bench_logprob.py [--device cpu|cuda] [--quick] [--save]

Sides take turns, each time in a fresh process, so that one's memory is not the other's peak. On a CPU: T = 8,192
tokens, D = 512, V = 32,000, float32. On a GPU: T = 16,384, D = 4,096, V = 151,936, bfloat16, where the floor is that of
four matrix products at 989 TFLOP/s (H100). Nothing is reported unless the op's tests pass. Liger-Kernel is no side yet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import MIB, RESULTS, machine, one_line, peak_resident, resident, save

from nlgrpo import kernels
from nlgrpo.kernels import reference

SIDES = ("ours", "plain torch", "torch.compile")
SHAPES = {"cpu": (8192, 512, 32_000, torch.float32), "cuda": (16_384, 4096, 151_936, torch.bfloat16)}
PEAK = {"cuda": 989e12}
TESTS = Path(__file__).parents[1] / "tests" / "kernels" / "test_logprob.py"


def operation(side: str) -> Any:
    if side == "ours":
        return kernels.linear_logprob
    return torch.compile(reference.linear_logprob) if side == "torch.compile" else reference.linear_logprob


def child(side: str, device: str, shape: tuple[int, int, int], repeats: int) -> None:
    """Print the seconds of each repeat and the peak of memory beyond inputs and their gradients."""
    T, D, V = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).to(device, SHAPES[device][3]).requires_grad_()
    weight = (torch.randn(V, D, generator=generator) / D**0.5).to(device, SHAPES[device][3]).requires_grad_()
    targets = torch.randint(V, (T,), generator=generator).to(device)
    upstream = torch.randn(T, generator=generator).to(device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    kernels.linear_logprob(hidden[:1].detach(), weight.detach(), targets[:1])  # a first op imports parts of torch
    op, seconds, before = operation(side), [], resident()
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        logprob, entropy = op(hidden, weight, targets)
        (logprob * upstream + 0.01 * entropy).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_resident()
    print(json.dumps({"seconds": seconds[1:], "added_mib": (peak - before) / MIB}))


def measure(side: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", side, "--device", args.device, "--repeats", str(args.repeats)]
    command += ["--shape", *map(str, args.shape)]
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def check() -> None:
    """Refuse to go on where the op's tests fail."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(TESTS)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the tests of linear_logprob fail, so nothing is timed:\n{done.stdout[-3000:]}")


def main() -> None:
    args = arguments()
    if args.child:
        return child(args.child, args.device, args.shape, args.repeats)
    check()
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side, results in rounds.items():
            results.append(measure(side, args))
    T, D, V = args.shape
    rows = []
    for side, results in rounds.items():
        seconds = statistics.median(s for r in results for s in r["seconds"])
        added = statistics.median(r["added_mib"] for r in results)
        rows.append({"side": side, "ms": 1e3 * seconds, "added_mib": added, "tflops": 6e-12 * T * D * V / seconds})
    print(f"forward and backward, T = {T:,}, D = {D:,}, V = {V:,}, {SHAPES[args.device][3]}")
    for row in rows:
        print("{side:14} {ms:9.1f} ms  {tflops:8.3f} TFLOP/s of three products  +{added_mib:8.0f} MiB".format(**row))
    if args.device in PEAK:
        print(f"floor of four products: {1e3 * 8 * T * D * V / PEAK[args.device]:.1f} ms")
    facts = machine("transformers")
    print(f"{one_line(facts, args.threads)}, {args.rounds} processes a side, in turns")
    result = {"bench": "logprob", "shape": [T, D, V], "threads": args.threads, "rows": rows, "machine": facts}
    if args.save:
        folder = "cpu" if args.device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
        print(f"saved {save('bench_logprob', result, folder)}, {draw(rows, RESULTS / folder / 'bench_logprob.png')}")
    print(json.dumps(result))


def draw(rows: list[dict[str, Any]], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.2), layout="constrained")
    for axes, (key, title) in zip(
        figure.subplots(1, 2, sharey=True),
        (("ms", "time (ms)"), ("added_mib", "memory beyond arguments (MiB)")),
        strict=True,
    ):
        axes.barh([row["side"] for row in rows][::-1], [row[key] for row in rows][::-1], color="#0072B2")
        axes.set_title(title)
    figure.savefig(path, dpi=150)
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("T", "D", "V"), help="other sizes")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes a side (default: 3)")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats in each (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="of torch on a CPU (default: 2)")
    parser.add_argument("--quick", action="store_true", help="small shapes, once: does it work")
    parser.add_argument("--save", action="store_true", help="write bench/results/DEVICE/bench_logprob.json and .png")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.repeats, args.shape = 1, 1, args.shape or [256, 64, 1000]
    args.shape = args.shape or list(SHAPES[args.device][:3])
    return args


if __name__ == "__main__":
    main()
