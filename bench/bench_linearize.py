"""Time `nlgrpo.kernels.linearize` for 4,096 groups of M = 8 .. 4,096 rewards against plain torch and torch.compile.

    python bench/bench_linearize.py [--device cpu|cuda] [--quick] [--save] [--sizes P=1024]

The floor reads a reward and writes a value, 8 bytes per element. "plain torch" is sort, gaps, sum and scatter in
`kernels.reference`. It does not check for NaN; `linearize` does, and that is included in the time of "ours". Where
"ours" has no operator of its own (on a CPU without the compiled ops, and for M above the limit of the Triton kernel) it
runs plain torch too, and a line below the table says so. With --save the script also draws time against M.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kernels_common import main, sizes_of
from kernels_side import PLAIN, Case, compiled
from torch import Tensor

from nlgrpo import kernels
from nlgrpo.kernels import reference

GROUPS = 4096
SAMPLES = (8, 64, 512, 1024, 4096)
COLORS = {"ours": "#0072B2", PLAIN: "#D55E00", "torch.compile": "#009E73"}


def forward(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[SimpleNamespace], tuple[Tensor, ...]]:
    return lambda x: (function(x.rewards, x.weights),)


SIDES = {
    "ours": forward(kernels.linearize),
    PLAIN: forward(reference.linearize),
    "torch.compile": forward(compiled(reference.linearize)),
}


def case(args: argparse.Namespace, M: int) -> Case:
    usual = {"P": GROUPS, "M": M}
    sizes = sizes_of(args, {"cpu": usual, "cuda": usual}, {"P": 8, "M": min(M, 64)})

    def arguments(generator: torch.Generator, device: str) -> SimpleNamespace:
        rewards = torch.randn(sizes["P"], sizes["M"], generator=generator)
        weights = torch.rand(sizes["M"], generator=generator)
        return SimpleNamespace(rewards=rewards.to(device), weights=weights.to(device))

    work = (8.0 * sizes["P"] * sizes["M"], 0.0)
    return Case("linearize", sizes, torch.float32, arguments, SIDES, work)


def cases(args: argparse.Namespace) -> list[Case]:
    samples = SAMPLES[1:2] if args.quick else (args.sizes["M"],) if "M" in args.sizes else SAMPLES
    return [case(args, M) for M in samples]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw time against M, with a line for each side and one for the floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for part in result["cases"]:
        M = part["sizes"]["M"]
        lines.setdefault("floor", []).append((M, part["floor_ms"]["both"]))
        for row in part["rows"]:
            if "error" not in row:
                lines.setdefault(row["side"], []).append((M, row["ms"]))
    for side, points in lines.items():
        style = {"color": COLORS[side], "marker": "o"} if side in COLORS else {"color": "black", "linestyle": ":"}
        axes.loglog(*zip(*points, strict=True), label=side, **style)
    ticks = [part["sizes"]["M"] for part in result["cases"]]
    axes.set_xticks(ticks, [str(M) for M in ticks])
    axes.minorticks_off()
    groups = result["cases"][0]["sizes"]["P"]
    axes.set(xlabel="M, samples per group", ylabel="ms", title=f"linearize, {groups:,} groups, float32")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(__doc__, "linearize", {"linearize": ("test_linearize.py",)}, cases, draw)
