"""Two rewards at several weights (IAMA, Fig. 3b): both rewards of single completions and of the best of N.

    python -m experiments.helpful_harmless.pareto length-bon [--out runs/pareto] [--weights 0.25 0.5 0.75]
        [--methods mean bon:4] [--ns 1 4] [-- --train.steps 200 ...]

Trains a recipe or a TOML file with two rewards at weights w and 1 - w, for each method: an objective for both rewards,
and after a slash how the two are aggregated. Plots one reward against the other and prints which points are better than
another in both. Finished runs are reused, and stopped ones resume. Arguments after ``--`` are passed to every run.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from nlgrpo.apps.report import figures
from nlgrpo.apps.sweep import sweep
from nlgrpo.apps.sweep.state import read_sweep_state
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.estimators import best_of_n, bootstrap
from nlgrpo.training.tracking.run_files import METRICS_FILE, read_jsonl

METHODS = ["mean", "bon:4", "bon:4/smooth_min:50"]
LABELS = {
    "mean": "mean of the weighted reward (GRPO)",
    "sum": "weighted sum of {}",
    "smooth_min": "smooth minimum of {}",
}
Points = dict[str, dict[float, Path]]  # method: {weight: folder of its run}


def label(method: str) -> str:
    objective, _, aggregate = method.partition("/")
    name = objective if method == "mean" else (aggregate or "sum").partition(":")[0]
    return LABELS.get(name, f"{aggregate} of {{}}").format(objective)


def points(folder: Path, names: Sequence[str], n: int) -> Tensor:
    """Return best-of-n of both rewards at each prompt, (2, P)."""
    after = read_evaluation(folder)["after"]
    return torch.stack([best_of_n(after.rewards[name], [n])[0] for name in names])


def kl(folder: Path) -> float:
    """Return the mean KL per token over the last tenth of the steps."""
    values = [logged["kl"] for logged in read_jsonl(folder / METRICS_FILE) if "kl" in logged]
    last = values[-max(1, len(values) // 10) :]
    return sum(last) / len(last)


def draw(found: Points, names: Sequence[str], ns: Sequence[int]) -> Figure:
    figure = Figure(figsize=(1 + 5.4 * len(ns), 5.0), layout="constrained")
    for axes, n in zip(figure.subplots(1, len(ns), squeeze=False)[0], ns, strict=True):
        before = read_evaluation(next(iter(next(iter(found.values())).values())))["before"]
        reference = [float(best_of_n(before.rewards[name], [n]).mean()) for name in names]
        axes.plot(*reference, "+", color="0.4", markersize=11, label="before training")
        for i, (method, at) in enumerate(found.items()):
            _draw_method(axes, {weight: points(run, names, n) for weight, run in at.items()}, i, label(method))
        axes.set_title("single completions" if n == 1 else f"the best of {n} by each reward")
        axes.set_xlabel(names[0])
        axes.set_ylabel(names[1])
    axes.legend()
    figure.suptitle(f"Weight of {names[0]} at each point; 95% intervals", fontsize="medium")
    return figure


def _draw_method(axes: Axes, at: dict[float, Tensor], number: int, text: str) -> None:
    mean, low, high = (x.numpy() for x in bootstrap(torch.stack(list(at.values()))))
    reach = {"xerr": abs(mean - [low, high])[:, :, 0], "yerr": abs(mean - [low, high])[:, :, 1]}
    look: dict[str, Any] = {"color": figures.COLOURS[number], "marker": figures.MARKERS[number]}
    axes.errorbar(mean[:, 0], mean[:, 1], **reach, **look, label=text, capsize=2)
    for weight, (x, y) in zip(at, mean, strict=True):
        axes.annotate(f"{weight:g}", (x, y), textcoords="offset points", xytext=(6, 5), fontsize=8)


def beaten(found: Points, names: Sequence[str], n: int) -> list[str]:
    """One line per point: which point of another method is better in both rewards, paired over prompts."""
    values = {(method, weight): points(run, names, n) for method, at in found.items() for weight, run in at.items()}
    lines = []
    for (method, weight), here in values.items():
        better = []
        for (other, w), there in values.items():
            gain, low, _ = bootstrap(there - here)
            if other != method and (gain > 0).all():
                sure = " (intervals above 0)" * bool((low > 0).all())
                better.append((float(low.min()), f"{label(other)} at {w:g}{sure}"))
        verdict = f"beaten in both by {max(better)[1]}" if better else "not beaten by another method"
        where = ", ".join(f"{name} {value:.4f}" for name, value in zip(names, here.mean(1), strict=True))
        lines.append(
            f"best of {n}, {label(method)} at {weight:g}: {where}, KL {kl(found[method][weight]):.3f}; {verdict}"
        )
    return lines


def finished(out: Path, first: str, methods: Sequence[str]) -> Points:
    """Return the runs in the folder by method and weight of the ``first`` reward, sorted by the weight."""
    found: Points = {method: {} for method in methods}
    for run in sorted(read_sweep_state(out), key=lambda run: float(run.overrides[f"rewards.{first}.weight"])):
        objective, aggregate = run.overrides["objective"], run.overrides["loss.aggregate"]
        method = objective if aggregate == "sum" else f"{objective}/{aggregate}"
        if method in found:
            found[method][run.overrides[f"rewards.{first}.weight"]] = run.folder
    return found


def row(names: Sequence[str], method: str, weight: float) -> dict[str, str]:
    """Return the options that differ between runs."""
    objective, _, aggregate = method.partition("/")
    shares = {f"rewards.{names[0]}.weight": f"{weight:g}", f"rewards.{names[1]}.weight": f"{1 - weight:g}"}
    return {"objective": objective, "loss.aggregate": aggregate or "sum"} | shares


QUICK = [
    "two.toml", "--methods", "bon:4", "--weights", "0.25", "--ns", "1", "2",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file with two rewards")
    parser.add_argument("--out", type=Path, default=Path("runs/pareto"), help="folder of the runs and the figure")
    parser.add_argument(
        "--weights", nargs="+", type=float, default=[0.25, 0.5, 0.75], help="weights of the first reward"
    )
    parser.add_argument("--methods", nargs="+", default=METHODS, help="OBJECTIVE or OBJECTIVE/AGGREGATE")
    parser.add_argument("--ns", nargs="+", type=int, default=[1, 4], help="values of N for best-of-N in the figure")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks of each run")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    try:
        names = list(from_arguments([options.recipe, *more])[0].rewards)
        if len(names) != 2:
            raise ValueError(f"{options.recipe} has {len(names)} rewards; expected two, one per axis")
        rows = [row(names, method, weight) for method in options.methods for weight in options.weights]
        status = sweep.run([options.recipe, *more], rows, options.out, ranks=options.nproc_per_node)
    except ValueError as error:
        parser.error(str(error))
    if any(run.state != "done" for run in read_sweep_state(options.out)):
        return status or 1
    found = finished(options.out, names[0], options.methods)
    picture = figures.render(functools.partial(draw, found, names, options.ns))
    (options.out / "pareto.png").write_bytes(picture)
    print(*(line for n in options.ns for line in beaten(found, names, n)), options.out / "pareto.png", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
