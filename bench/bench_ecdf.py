"""Time the empirical CDFs of `nlgrpo.ecdf` against PyTorch, NumPy and SciPy: rows of 1e3 to 1e8 samples, and batches.

    python bench/bench_ecdf.py [--largest 1e7] [--threads 1 2] [--limit 120] [--quick] [--save]

    ranks     rank of every sample in its row: how many samples are <= it (`ranks(x, "weak")`)
    cdf       CDF at M new values in random order, of samples that are not sorted
    queries   the same for sorted samples (`ECDF(x).cdf(q)`, built before)

All sides run in this process in turns, on the same continuous float32 data, with one thread and with two. Their counts
are compared before anything is timed. The other libraries do the minimum that gives the counts: they do not divide and
do not check for NaN, which is included in "ours". Peak memory is that of one call with its result, without the
data. A side that would need more than --limit seconds per call, judging by the last size, is left out. With --save the
script also draws time per sample against M.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from common import MIB, forget_peak, machine, one_line, peak_resident, resident, save
from torch import Tensor

from nlgrpo.calibration import ecdf

LONGEST = 10**8
SINGLE = (*(round(10 ** (k / 2)) for k in range(6, 15)), LONGEST)
BATCHES = ((5000, 600), (4096, 64), (1000, 5000), (64, 100_000))
OURS, OURS32, PLAIN, TORCH = "ours", "ours, float32 result", "ours, plain torch", "torch"
NUMPY, RANKDATA, ECDF = "numpy", "scipy rankdata", "scipy ecdf"
COLORS = {OURS: "#0072B2", TORCH: "#D55E00", NUMPY: "#009E73", RANKDATA: "#CC79A7", ECDF: "#E69F00", PLAIN: "#999999"}
# (op, shape, our threads, other side with one thread, target speed-up)
TARGETS = [
    *(("ranks", shape, 1, TORCH, 13.0) for shape in ((1, 10**5), (1, 10**6), (5000, 600))),
    ("ranks", (1, 10**7), 1, TORCH, 20.0),
    *(("ranks", shape, 1, RANKDATA, 9.0) for shape in ((1, 10**5), (1, 10**6), (1, 10**7), (5000, 600))),
    ("ranks", (1, 10**7), 2, OURS, 1.7),
]


@dataclass
class Case:
    """An op at one shape, and the function of each side."""

    op: str
    shape: tuple[int, int]
    sides: dict[str, Callable[[], Any]]


def in_rows(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """Apply a function for single rows to each row."""
    return np.stack([function(*rows) for rows in zip(*arrays, strict=True)])


def find(ordered: np.ndarray, queries: np.ndarray) -> np.ndarray:
    return in_rows(lambda s, q: np.asarray(np.searchsorted(s, q, side="right")), ordered, queries)


def scipy_ecdf(samples: np.ndarray, queries: np.ndarray) -> np.ndarray:
    return in_rows(lambda s, q: scipy.stats.ecdf(s).cdf.evaluate(q), samples, queries)


def sort_and_find(samples: Tensor, queries: Tensor) -> Tensor:
    return torch.searchsorted(samples.sort(dim=-1).values, queries, right=True)


def ranks(x: Tensor) -> dict[str, Callable[[], Any]]:
    a = x.numpy()
    return {
        OURS: lambda: ecdf.ranks(x, "weak"),
        OURS32: lambda: ecdf.ranks(x, "weak", dtype=torch.float32),
        PLAIN: lambda: ecdf.ranks(x, "weak", impl="torch"),
        TORCH: lambda: sort_and_find(x, x),
        NUMPY: lambda: find(np.sort(a, axis=-1), a),
        RANKDATA: lambda: scipy.stats.rankdata(a, method="max", axis=-1),
        ECDF: lambda: scipy_ecdf(a, a),
    }


def cdf(x: Tensor, q: Tensor) -> dict[str, Callable[[], Any]]:
    a, b = x.numpy(), q.numpy()
    return {
        OURS: lambda: ecdf.cdf(x, q, "weak"),
        TORCH: lambda: sort_and_find(x, q),
        NUMPY: lambda: find(np.sort(a, axis=-1), b),
        ECDF: lambda: scipy_ecdf(a, b),
    }


def queries(x: Tensor, q: Tensor) -> dict[str, Callable[[], Any]]:
    ready, b = ecdf.ECDF(x), q.numpy()
    ordered = x.sort(dim=-1).values
    return {
        OURS: lambda: ready.cdf(q, "weak"),
        TORCH: lambda: torch.searchsorted(ordered, q, right=True),
        NUMPY: lambda: find(ordered.numpy(), b),
    }


def cases(args: argparse.Namespace) -> Iterable[Case]:
    shapes = [(1, M) for M in SINGLE if args.largest >= M] + list(BATCHES)
    for P, M in [(1, 1000), (20, 600)] if args.quick else shapes:
        generator = torch.Generator().manual_seed(0)
        x, q = torch.randn(P, M, generator=generator), torch.randn(P, M, generator=generator)
        yield Case("ranks", (P, M), ranks(x))
        if P == 1 and M < LONGEST:  # the other sides would take minutes
            yield Case("cdf", (P, M), cdf(x, q))
            yield Case("queries", (P, M), queries(x, q))


def count(side: str, result: Any, M: int) -> np.ndarray:
    """Convert the result of a side to counts of samples <= each value."""
    whole = np.asarray(result, dtype=np.float64)
    return np.rint(whole * M) if side in (OURS, OURS32, PLAIN, ECDF) else whole


@dataclass
class Call:
    """One call of a side: seconds, peak of added bytes (with the result), and the counts of its result."""

    seconds: float
    added: int
    counts: np.ndarray


def first_call(case: Case, side: str) -> Call:
    gc.collect()
    forget_peak()
    before, begin = resident(), time.perf_counter()
    result = case.sides[side]()
    spent = time.perf_counter() - begin
    return Call(spent, peak_resident() - before, count(side, result, case.shape[1]))


def agree(case: Case, sides: list[str]) -> dict[str, Call]:
    """Call each side once; exit if counts differ. A float32 result may be off by rounding past 2^24 samples."""
    calls, truth = {}, None
    for side in sides:
        calls[side] = first_call(case, side)
        counts, calls[side].counts = calls[side].counts, np.empty(0)
        truth = counts if truth is None else truth
        off = np.abs(counts - truth).max()
        if off > (case.shape[1] * 2.0**-24 if side == OURS32 else 0):
            sys.exit(f"{case.op} {case.shape}: {side!r} and {sides[0]!r} differ by {off:g}; nothing is timed.")
    return calls


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(case: Case, sides: list[str], rounds: int, enough: float) -> dict[str, list[float]]:
    """Seconds of each call, sides in turns: at least ``rounds``, and more until ``enough`` seconds have passed."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    begin = time.perf_counter()
    while len(times[sides[0]]) < rounds or (
        time.perf_counter() - begin < enough and len(times[sides[0]]) < 20 * rounds
    ):
        for side in sides:
            times[side].append(seconds(case.sides[side]))
    return times


class Forecast:
    """Predicts the time of a call from the time at the last size, to leave out slow sides."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.last: dict[tuple[str, str], float] = {}  # seconds per element

    def __call__(self, case: Case, side: str) -> float:
        return 1.5 * self.last.get((case.op, side), 0.0) * case.shape[0] * case.shape[1]

    def learn(self, case: Case, side: str, spent: float) -> None:
        self.last[case.op, side] = spent / (case.shape[0] * case.shape[1])


def run(case: Case, args: argparse.Namespace, forecast: Forecast) -> list[dict[str, Any]]:
    """Rows of a case: each side at each number of threads that it uses. Long calls are timed once."""
    left_out = {side: forecast(case, side) for side in case.sides if forecast(case, side) > args.limit}
    sides = [side for side in case.sides if side not in left_out]
    rows: list[dict[str, Any]] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        here = [side for side in sides if threads == args.threads[0] or side.startswith((OURS, TORCH))]
        calls = agree(case, here)
        longest = max(call.seconds for call in calls.values())
        if longest > 10:
            times = {side: [call.seconds] for side, call in calls.items()}
        else:
            rounds = min(args.rounds, 3) if longest > 1 else args.rounds
            times = measure(case, here, rounds, 0.0 if args.quick else 1.0)
        for side in here:
            forecast.learn(case, side, min(times[side]))
            rows.append(row(case, side, threads, times[side], calls[side].added))
    rows += [{"side": side, "left_out": f"would take about {spent:.0f} s"} for side, spent in left_out.items()]
    return rows


def row(case: Case, side: str, threads: int, times: list[float], added: int) -> dict[str, Any]:
    samples = case.shape[0] * case.shape[1]
    middle = statistics.median(times)
    return {
        "side": side,
        "threads": threads,
        "ms": 1e3 * middle,
        "fastest_ms": 1e3 * min(times),
        "calls": len(times),
        "ns_a_sample": 1e9 * middle / samples,
        "added_mib": added / MIB,
        "added_over_input": added / (4 * samples),
    }


def show(result: dict[str, Any]) -> None:
    first = next(row["ms"] for row in result["rows"] if row["side"] == OURS)
    print(f"\n{result['op']}, {' x '.join(f'{n:,}' for n in result['shape'])}")
    print(f"{'':24}{'threads':>8}{'ms':>12}{'ns/sample':>11}{'of ours':>9}{'peak, MiB':>11}{'x input':>9}")
    for row in result["rows"]:
        if "left_out" in row:
            print(f"{row['side']:24}  {row['left_out']}")
            continue
        print(
            f"{row['side']:24}{row['threads']:>8}{row['ms']:>12,.3f}{row['ns_a_sample']:>11.1f}"
            f"{row['ms'] / first:>9.1f}{row['added_mib']:>11,.1f}{row['added_over_input']:>9.1f}"
        )
    sys.stdout.flush()


def milliseconds(results: list[dict[str, Any]], op: str, shape: tuple[int, int], side: str, threads: int) -> float:
    """Return the time of a side; NaN if it was not measured."""
    for result in results:
        if (result["op"], tuple(result["shape"])) == (op, shape):
            for row in result["rows"]:
                if row["side"] == side and row.get("threads") == threads:
                    return row["ms"]
    return float("nan")


def against_targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return each target that was measured."""
    found: list[dict[str, Any]] = []
    for op, shape, threads, side, bound in TARGETS:
        ours, other = milliseconds(results, op, shape, OURS, threads), milliseconds(results, op, shape, side, 1)
        if ours == ours and other == other:
            found.append(
                {
                    "op": op,
                    "shape": shape,
                    "threads": threads,
                    "against": side,
                    "at_least": bound,
                    "measured": other / ours,
                }
            )
    print()
    for target in found:
        name = f"{target['op']} {' x '.join(f'{n:,}' for n in target['shape'])}, {target['threads']} threads"
        wanted = f"target {target['at_least']}x" + ("" if target["measured"] >= target["at_least"] else "   MISSED")
        print(f"{name:32} against {target['against']:16}{target['measured']:>6.1f}x, {wanted}")
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw time per sample against M, one panel per op; dashed: two threads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    changes = {
        "ranks": (1 << 14, "one piece", "in parts"),
        "cdf": (1 << 20, "searched one by one", "grouped"),
    }
    changes["queries"] = changes["cdf"]
    for axes, op in zip(panels, ("ranks", "cdf", "queries"), strict=True):
        lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for case in result["cases"]:
            if case["op"] == op and case["shape"][0] == 1:
                for row in case["rows"]:
                    if row["side"] in COLORS and "ms" in row:
                        lines.setdefault((row["side"], row["threads"]), []).append(
                            (case["shape"][1], row["ns_a_sample"])
                        )
        for (side, threads), points in lines.items():
            label = side if threads == 1 else None
            style = "-" if threads == 1 else "--"
            axes.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, color=COLORS[side], label=label)
        at, below, above = changes[op]
        axes.axvline(at, color="black", linewidth=0.8, linestyle=":")
        where = {"y": 0.96, "fontsize": "x-small", "transform": axes.get_xaxis_transform()}
        axes.text(at * 0.85, s=below, ha="right", **where)
        axes.text(at * 1.2, s=above, **where)
        axes.set(title=op, xlabel="M, samples")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ns per sample; dashed: two threads")
    panels[0].set_ylim(1, 5000)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=1e8, help="samples of the longest row (default: 1e8)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of torch (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="minimum number of calls of each side (default: 5)")
    parser.add_argument("--limit", type=float, default=120, help="longest call in seconds (default: 120)")
    parser.add_argument("--quick", action="store_true", help="small sizes, once, to check that it works")
    parser.add_argument("--save", action="store_true", help="write a JSON and a PNG to bench/results/cpu/")
    args = parser.parse_args()
    if args.quick and args.save:
        parser.error("--quick measures sizes that are too small to save; leave out --save")
    if min(*args.threads, args.rounds, 1) < 1:
        parser.error("--threads and --rounds: expected whole numbers of at least 1")
    if args.quick:
        args.rounds = 1
    return args


def main() -> None:
    args = arguments()
    forecast = Forecast(args.limit)
    results = []
    for case in cases(args):
        result = {"op": case.op, "shape": case.shape, "rows": run(case, args, forecast)}
        show(result)
        results.append(result)
    targets = against_targets(results)
    facts = machine("nlgrpo", "numpy", "scipy")
    print(f"\n{one_line(facts, max(args.threads))}")
    saved: dict[str, Any] = {
        "bench": "ecdf",
        "rounds": args.rounds,
        "quick": args.quick,
        "cases": results,
        "targets": targets,
        "machine": facts,
    }
    if args.save:
        path = save("bench_ecdf", saved)
        draw(saved, path.with_suffix(".png"))
        print(f"saved {path.name} and .png")
    print(json.dumps(saved))


if __name__ == "__main__":
    main()
