"""Main program of the kernel benchmarks: runs all sides in turns, prints a table with floors, saves JSON and figure.

A `Case` is one op at one shape. Each side runs in its own processes, sides in turns, so that other load on the machine
affects all of them alike and one side's memory does not raise another's peak. `kernels_side.py` is such a process. The
ops' tests run before anything is timed, and results and gradients of the sides must agree: timing two different
computations would be meaningless.

The floor is the minimum work divided by the best rate: that of the data sheet for a GPU in `nlgrpo.runtime.device`,
otherwise the rate of a large copy or product measured in the same run. Shares above 100% are possible if the arguments
fit in a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import MIB, RESULTS, installed, machine, one_line, save
from kernels_side import PLAIN, Case, child, measure_floor

from nlgrpo.runtime.device import gpu_of_device

TESTS = Path(__file__).parents[1] / "tests" / "kernels"
FLOOR = "floor"  # name of the process that measures the floor
UNITS = {"B": (1e9, "GB/s"), "FLOP": (1e12, "TFLOP/s")}


def check(files: set[str]) -> None:
    """Exit if the ops' tests fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(str(TESTS / name) for name in sorted(files))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(sorted(files))}: tests fail, so nothing is timed:\n{(done.stdout + done.stderr)[-3000:]}")


def required(side: str) -> bool:
    """Whether a failure of this side ends the benchmark; for others the table shows the error."""
    return side.startswith("ours") or side in (PLAIN, FLOOR)


def in_process(index: int, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of `child` for a side of case ``index``, or its error; exit if a required side fails."""
    command = [sys.executable, sys.argv[0], "--child", str(index), side, "--device", args.device]
    command += ["--repeats", str(args.repeats), *(["--quick"] if args.quick else [])]
    command += [f"--op={op}" for op in args.op]
    if args.sizes:
        command += ["--sizes", *(f"{name}={size}" for name, size in args.sizes.items())]
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads, check=False)
    if done.returncode == -9:
        return {"error": "killed (out of memory?)"}
    if done.returncode and required(side):
        sys.exit(f"{side} failed:\n{done.stderr[-4000:]}")
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def summary(side: str, rounds: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Medians over all repeats of all rounds in ms and MiB, and the achieved rate."""
    errors = [r["error"] for r in rounds if "error" in r]
    if errors:
        return {"side": side, "error": errors[0]}
    seconds = [tuple(s) for r in rounds for s in r["seconds"]]
    totals = [[forward + backward if case.wanted else forward for forward, backward in r["seconds"]] for r in rounds]
    both = statistics.median(total for r in totals for total in r)
    return {
        "side": side,
        "forward_ms": 1e3 * statistics.median(forward for forward, _ in seconds),
        "backward_ms": 1e3 * statistics.median(backward for _, backward in seconds) if case.wanted else None,
        "ms": 1e3 * both,
        "rounds_ms": [1e3 * statistics.median(r) for r in totals],
        "repeats": len(seconds),
        "rate": sum(case.work) / both / UNITS[case.unit][0],
        "added_mib": statistics.median(r["bytes"] for r in rounds) / MIB,
        "own_ops": rounds[0]["own_ops"],
    }


def agree(case: Case, rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Exit if our result differs from plain torch's; mark another side that differs as not measured.

    Compares norms of results and gradients, to the precision of the dtype.
    """
    norms = {side: results[0]["norms"] for side, results in rounds.items() if "norms" in results[0]}
    if not norms:
        return
    first = PLAIN if PLAIN in norms else next(iter(norms))
    tolerance = 1e-3 if case.dtype == torch.float32 else 3e-2
    for side, values in norms.items():
        pairs = list(zip(values, norms[first], strict=True))
        if all(abs(a - b) <= tolerance * abs(b) for a, b in pairs):
            continue
        difference = f"norms of results and gradients are {values}, and {norms[first]} by {first}"
        if required(side):
            sys.exit(f"{case.title}, {side}: {difference}")
        rounds[side][:] = [{"error": difference}]


def floors(case: Case, rate: float) -> dict[str, float]:
    """Milliseconds of the minimum work at ``rate``."""
    forward, backward = case.work
    named = {"forward": forward, "backward": backward, "both": forward + backward} | case.floors
    return {name: 1e3 * work / rate for name, work in named.items()}


def published(case: Case, device: str) -> tuple[float, str] | None:
    """Return the GPU's rate from its data sheet and the source, or None if it is not listed."""
    gpu = None if device == "cpu" else gpu_of_device(torch.cuda.get_device_name())
    if gpu is None or (case.unit == "FLOP" and case.dtype not in (torch.bfloat16, torch.float16)):
        return None
    return gpu.flops if case.unit == "FLOP" else gpu.bandwidth, "from the data sheet"


def measure(cases: list[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all sides of all cases in turns; one result per case."""
    measured: list[dict[str, list[dict[str, Any]]]] = [{side: [] for side in sides_of(case, args)} for case in cases]
    rates: dict[str, list[float]] = {}
    for number in range(args.rounds):
        seen: set[str] = set()
        for index, case in enumerate(cases):
            if case.rate_kind not in seen and published(case, args.device) is None:
                rates.setdefault(case.rate_kind, []).extend(in_process(index, FLOOR, args)["rates"])
                seen.add(case.rate_kind)
            for side, results in measured[index].items():
                results.append(in_process(index, side, args))
            if number == 0:
                agree(case, measured[index])
    return [report(case, rounds, rates, args) for case, rounds in zip(cases, measured, strict=True)]


def report(
    case: Case, rounds: dict[str, list[dict[str, Any]]], rates: dict[str, list[float]], args: argparse.Namespace
) -> dict[str, Any]:
    """Print the result of a case and return it for the JSON."""
    rate, source = published(case, args.device) or (statistics.median(rates[case.rate_kind]), "measured in this run")
    scale, unit = UNITS[case.unit]
    result = {
        "op": case.op,
        "label": case.label,
        "title": case.title,
        "sizes": case.sizes,
        "dtype": str(case.dtype),
        "unit": unit,
        "floor_rate": rate / scale,
        "floor_source": source,
        "floor_ms": floors(case, rate),
        "rows": [summary(side, results, case) for side, results in rounds.items()],
    }
    show(result)
    return result


def sides_of(case: Case, args: argparse.Namespace) -> list[str]:
    return [side for side in case.sides if not args.sides or side in args.sides]


def show(result: dict[str, Any]) -> None:
    """Print a case as a table with the floor as the last row."""
    unit, floor = result["unit"], result["floor_ms"]
    print(f"\n{result['title']}")
    print(f"{'':24}{'forward':>11}{'backward':>11}{'both, ms':>11}{unit:>11}{'of floor':>10}{'peak, MiB':>11}")
    for row in result["rows"]:
        if "error" in row:
            print(f"{row['side']:24}  not measured: {row['error']}")
            continue
        times = "".join(_cell(row[key]) for key in ("forward_ms", "backward_ms", "ms"))
        share = f"{floor['both'] / row['ms']:.0%}"
        print(f"{row['side']:24}{times}{_cell(row['rate'])}{share:>10}{row['added_mib']:>+11,.0f}")
    times = "".join(_cell(floor[key] or None) for key in ("forward", "backward", "both"))
    print(f"{'floor':24}{times}{_cell(result['floor_rate'])}  {result['floor_source']}")
    for name in floor.keys() - {"forward", "backward", "both"}:
        print(f"{'floor of ' + name:46}{_cell(floor[name])}")
    for row in result["rows"]:
        if row["side"].startswith("ours") and row.get("own_ops") == []:
            print(f'  "{row["side"]}" runs no operator of nlgrpo here: it is plain torch on this device.')
    sys.stdout.flush()


def _cell(number: float | None) -> str:
    """Format a number with four digits; "-" for None."""
    if number is None:
        return f"{'-':>11}"
    return f"{number:>11,.0f}" if number >= 1000 else f"{number:>11.4g}"


def draw_bars(result: dict[str, Any], path: Path) -> None:
    """Draw time and memory, with a row of two panels per case."""
    from matplotlib.figure import Figure

    cases = result["cases"]
    figure = Figure(figsize=(9, 0.4 + sum(0.9 + 0.25 * len(case["rows"]) for case in cases)), layout="constrained")
    heights = [2 + len(case["rows"]) for case in cases]
    grid = figure.subplots(len(cases), 2, sharey="row", squeeze=False, height_ratios=heights)
    for (left, right), case in zip(grid, cases, strict=True):
        rows = [row for row in case["rows"] if "error" not in row][::-1]
        names = [row["side"] for row in rows]
        left.barh(names, [row["ms"] for row in rows], color="#0072B2")
        left.axvline(case["floor_ms"]["both"], color="black", linestyle=":")
        left.set_xlabel("ms; dotted: floor")
        right.barh(names, [row["added_mib"] for row in rows], color="#999999")
        right.set_xlabel("MiB beyond the arguments")
        left.set_title(case["title"], loc="left", fontsize="medium")
    figure.savefig(path, dpi=150)


def main(
    doc: str,
    name: str,
    tests: dict[str, tuple[str, ...]],
    make: Callable[[argparse.Namespace], list[Case]],
    draw: Callable[[dict[str, Any], Path], None] = draw_bars,
) -> None:
    """Run a benchmark. ``tests``: test files of each op; ``make``: returns the cases."""
    args = arguments(doc, list(tests))
    cases = [case for case in make(args) if not args.op or case.op in args.op]
    known = {name for case in cases for name in case.sizes}
    if args.sizes.keys() - known:
        sys.exit(f"--sizes {', '.join(args.sizes)}: expected names among {', '.join(sorted(known))}")
    names = {side for case in cases for side in case.sides}
    if args.sides and not names.issuperset(args.sides):
        sys.exit(f"--sides {', '.join(args.sides)}: expected names among {', '.join(sorted(names))}")
    if args.child:
        index, side = args.child
        case = cases[int(index)]
        print(json.dumps(measure_floor(case, args) if side == FLOOR else child(case, side, args)))
        return
    if args.quick:
        print("quick: these sizes are too small to mean anything, and the ops' tests were not run")
    else:
        check({file for case in cases for file in tests[case.op]})
    results = measure(cases, args)
    facts = machine(*filter(installed, ("nlgrpo", "triton", "liger-kernel")))
    print(f"\n{one_line(facts, args.threads)}, {args.rounds} processes per side, in turns")
    counts = {"threads": args.threads, "rounds": args.rounds, "quick": args.quick}
    result = {"bench": name, "device": args.device, **counts, "cases": results, "machine": facts}
    if args.save:
        folder = "cpu" if args.device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
        path = save("_".join(("bench", name, *args.op)), result, folder)  # --op has a file of its own
        draw(result, path.with_suffix(".png"))
        print(f"saved {path.relative_to(RESULTS.parent)} and .png")
    print(json.dumps(result))


def size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=NUMBER, as T=4096")
    return name, int(number)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def arguments(doc: str, ops: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--op", choices=ops, action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--sides", nargs="+", help="only these sides, named as in the table")
    parser.add_argument("--sizes", type=size, nargs="+", default=[], metavar="T=4096", help="other sizes")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="processes per side (default: 3)")
    parser.add_argument("--repeats", type=at_least_one, default=3, help="minimum repeats per process (default: 3)")
    parser.add_argument("--threads", type=at_least_one, default=2, help="threads of torch on a CPU (default: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="check that it works: small sizes, once, without the tests"
    )
    parser.add_argument("--save", action="store_true", help="write a JSON and a PNG to bench/results/DEVICE/")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = dict(args.sizes)
    if args.quick and args.save:
        parser.error("--quick measures sizes that are too small to save; leave out --save")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.quick:
        args.rounds, args.repeats = 1, 2
    return args


def sizes_of(args: argparse.Namespace, usual: dict[str, dict[str, int]], quick: dict[str, int]) -> dict[str, int]:
    """Sizes of a case: those of the device or of --quick, overridden by --sizes."""
    sizes = quick if args.quick else usual[args.device]
    return sizes | {name: number for name, number in args.sizes.items() if name in sizes}
