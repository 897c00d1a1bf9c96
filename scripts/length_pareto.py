"""Two tastes at several weights (IAMA, Fig. 3b): best-of-4 of each, after training for three objectives.

    python scripts/length_pareto.py [--out runs/pareto] [--weights 0.2 0.35 ...] [-- --train.steps 300 ...]

Trains the default recipe's two length rewards with weights w and 1 - w: for the mean of the weighted reward (plain
GRPO), for the weighted sum of best-of-4 values, and for their smooth minimum. Draws best-of-4 of the one reward against
that of the other, and says which points another one beats in both. Runs that have finished are not made again, and one
that was stopped goes on; what follows ``--`` goes to every run.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nlgrpo import figures, sweep
from nlgrpo.evaluation import best_of_n, bootstrap
from nlgrpo.manifest import read_manifest
from nlgrpo.sampled import read_evaluation

METHODS = {  # name: objective of both rewards, aggregate
    "mean of the weighted reward (GRPO)": ("mean", "sum"),
    "weighted sum of bon:4": ("bon:4", "sum"),
    "smooth minimum of bon:4": ("bon:4", "smooth_min:50"),
}
WEIGHTS = [0.2, 0.35, 0.5, 0.65, 0.8]


def points(folder: Path) -> Tensor:
    """Best-of-4 of both rewards at each prompt, (2, P)."""
    after = read_evaluation(folder)["after"]
    return torch.stack([best_of_n(after.rewards[name], [4])[0] for name in ("short", "long")])


def draw(found: dict[str, dict[float, Tensor]]) -> Figure:
    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    axes = figure.subplots()
    for i, (method, at) in enumerate(found.items()):
        mean, low, high = (x.numpy() for x in bootstrap(torch.stack(list(at.values()))))
        reach = {"xerr": abs(mean - [low, high])[:, :, 0], "yerr": abs(mean - [low, high])[:, :, 1]}
        axes.errorbar(*mean.T, **reach, color=figures.COLOURS[i], marker=figures.MARKERS[i], label=method, capsize=2)
        for weight, (x, y) in zip(at, mean, strict=True):
            axes.annotate(f"{weight:g}", (x, y), textcoords="offset points", xytext=(6, 5), fontsize=8)
    axes.set_xlabel("best-of-4 of the short taste")
    axes.set_ylabel("best-of-4 of the long taste")
    axes.set_title("Weight of the short taste at each point; 95% intervals")
    axes.legend()
    return figure


def beaten(found: dict[str, dict[float, Tensor]]) -> list[str]:
    """A line for every point: which point of another method is better in both, the prompts paired, and how surely."""
    lines = []
    for method, at in found.items():
        for weight, here in at.items():
            better = []
            for other, others in found.items():
                for w, there in others.items():
                    gain, low, _ = bootstrap(there - here)
                    if other != method and (gain > 0).all():
                        better.append(
                            (float(low.min()), f"{other} at {w:g}" + " (intervals above 0)" * bool((low > 0).all()))
                        )
            said = f"beaten in both by {max(better)[1]}" if better else "beaten by none of another method"
            lines.append(f"{method} at {weight:g}: short {here[0].mean():.4f}, long {here[1].mean():.4f}; {said}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pareto"), help="folder of the runs and the picture")
    parser.add_argument("--weights", nargs="+", type=float, default=WEIGHTS, help="of the short taste")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    rows = [
        {"objective": objective, "loss.aggregate": aggregate}
        | {"rewards.short.weight": f"{weight:g}", "rewards.long.weight": f"{1 - weight:g}"}
        for objective, aggregate in METHODS.values()
        for weight in options.weights
    ]
    try:
        status = sweep.run(["length-bon", *more], rows, options.out)
    except ValueError as error:
        parser.error(str(error))
    found: dict[str, dict[float, Tensor]] = {method: {} for method in METHODS}
    methods = {how: method for method, how in METHODS.items()}
    for run in sorted(read_manifest(options.out), key=lambda run: run.overrides["rewards.short.weight"]):
        if run.state != "done":
            return status or 1
        weight, objective, aggregate = (
            run.overrides[key] for key in ("rewards.short.weight", "objective", "loss.aggregate")
        )
        found[methods[objective, aggregate]][weight] = points(run.folder)
    (options.out / "pareto.png").write_bytes(figures.render(functools.partial(draw, found)))
    print(*beaten(found), options.out / "pareto.png", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
