"""Models of tradeoff.py under best-of-N, worst-of-N and rewind-and-repeat (InfAlign, Figs. 5, 8 and 12).

    python -m experiments.inference_procedures.procedures experiments/configs/alignment.toml [--runs runs/tradeoff]
        [--best 2 4 32] [--worst 32] [--rewind rewind:0.85:32] [--against identity grpo]

Reads the rollouts and the evaluation in the folder of a finished ``tradeoff.py``, which needs --completions of at least
the largest N (64 for 32), and samples nothing. Give the recipe, and the keys after ``--``, of that run. Prints win
rates against the reference under each procedure, with the same procedure on both sides, and the number of draws of
rewind-and-repeat; then how far each method is ahead of others at equal KL. Draws procedures.png and rewind.png.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from experiments.alignment_tradeoff import tradeoff, tradeoff_curves
from experiments.alignment_tradeoff.tradeoff_curves import Curve, Run
from nlgrpo.apps.report import figures
from nlgrpo.calibration import rewind
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation
from nlgrpo.estimators import bootstrap, weighted_win_rate, win_rate
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

LABEL = re.compile(r"(.+) N (\d+) seed (\d+)")
DRAWS = "draws"
Quantity = Callable[[Tensor, Tensor], Tensor]  # rewards of a model (P, n) and of the reference (P, K) to (P,)


def rewound(again: rewind.RewindAndRepeat, rewards: Tensor, reference: Tensor) -> Tensor:
    """Win rate per prompt of the answers, against those of the same procedure on the reference."""
    ours, theirs = (again.chosen(x, reference)[0] for x in (rewards, reference))
    return weighted_win_rate(rewards, ours, reference, theirs)


def quantities(best: Sequence[int], worst: Sequence[int], again: rewind.RewindAndRepeat) -> dict[str, Quantity]:
    """What is measured, by title; win rates in [0, 1]."""
    found: dict[str, Quantity] = {"one completion": partial(win_rate, n=1)}
    found |= {f"best of {n}": partial(win_rate, n=n) for n in best}
    found |= {f"worst of {n}": partial(win_rate, n=n, worst=True) for n in worst}
    return found | {str(again): partial(rewound, again), DRAWS: lambda a, b: again.chosen(a, b)[1]}


def runs_of(evaluation: Mapping[str, EvaluationSamples]) -> dict[Run, EvaluationSamples]:
    """The trained models of an evaluation. Raises ValueError if its models are not those of tradeoff.py."""
    found = {}
    for label, sampled in list(evaluation.items())[1:]:
        parts = LABEL.fullmatch(label)
        if parts is None:
            raise ValueError(f"{label!r} is not a run of tradeoff.py; expected METHOD N 2 seed 1")
        found[parts[1], int(parts[2]), int(parts[3])] = sampled
    return found


def row(name: str, each: Mapping[str, Tensor]) -> str:
    cells = [f"KL {float(each['kl'].mean()):.2f}"]
    for quantity, values in each.items():
        if quantity != "kl":
            scale, digits = (1, 2) if quantity == DRAWS else (100, 1)
            mean, low, high = (scale * float(x) for x in bootstrap(values))
            cells.append(f"{quantity} {mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
    return f"{name}: {', '.join(cells)}"


def draw(found: Mapping[str, Sequence[Curve]], shown: Sequence[str]) -> Figure:
    """Each quantity over the KL: means over seeds, with intervals over prompts."""
    figure = figures.figure_of((4.6 * len(shown), 4.4))
    every = list(figure.subplots(1, len(shown), squeeze=False)[0])
    for axes, quantity in zip(every, shown, strict=True):
        scale = 1 if quantity == DRAWS else 100
        for i, (method, seeds) in enumerate(found.items()):
            kl = torch.stack([curve.kl for curve in seeds]).mean(0)
            values = torch.stack([curve.values[quantity] for curve in seeds]).mean(0)
            mean, low, high = (scale * x for x in bootstrap(values))
            look = figures.series_style(i)
            reach = torch.stack([mean - low, high - mean]).clamp(min=0)
            label = tradeoff_curves.label(method)
            axes.errorbar(kl, mean, reach, **look.line, marker=look.marker, capsize=2, label=label)
        axes.set_title("Number of draws" if quantity == DRAWS else f"{quantity}: win rate (%)")
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_xscale("function", functions=(lambda kl: np.sqrt(np.maximum(kl, 0)), np.square))  # `Curve.at`
        axes.set_xlim(0, 1.08 * max(float(curve.kl[-1]) for own in found.values() for curve in own))
    figures.legend(figure, every)
    return figure


QUICK = [
    "one.toml", "--runs", "runs/tradeoff", "--best", "2", "--worst", "8", "--rewind", "rewind:0.5:8",
    "--against", "bon_sft",
]  # fmt: skip
BEFORE = [["-m", "experiments.alignment_tradeoff.tradeoff", *tradeoff.QUICK]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file of tradeoff.py's run")
    parser.add_argument("--runs", type=Path, default=Path("runs/tradeoff"), help="output folder of tradeoff.py")
    parser.add_argument("--best", nargs="+", type=int, default=[2, 4, 32])
    parser.add_argument("--worst", nargs="+", type=int, default=[32])
    parser.add_argument("--rewind", default="rewind:0.85:32", help="quantile, and most draws")
    parser.add_argument("--against", nargs="+", default=["identity", "grpo"], help="methods to compare with")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    try:
        config, _ = from_arguments([given.recipe, *more])
        name, again = next(iter(config.rewards)), rewind.parse_rewind(given.rewind)
        if again is None:
            raise ValueError(f"--rewind {given.rewind}: expected rewind:QUANTILE:MOST")
        rollouts = reference_rollouts.load_rollouts(given.runs / "rollouts")
        held_out = tradeoff_curves.held_out(config, rollouts, name)
        reference, found = held_out.rewards, quantities(given.best, given.worst, again)
        models = runs_of(read_evaluation(given.runs / "evaluation"))
        held_out.check(next(iter(models.values())))
        measured = {
            run: {"kl": model.kl["k1"].mean(1)} | {q: f(model.rewards[name], reference) for q, f in found.items()}
            for run, model in models.items()
        }
    except ValueError as error:
        parser.error(str(error))
    start = {"kl": torch.zeros(len(reference))} | {q: f(reference, reference) for q, f in found.items()}
    lines = [row("reference", start)]
    lines += [row(f"{tradeoff_curves.label(m)}, N {n}, seed {s}", each) for (m, n, s), each in measured.items()]
    curves = tradeoff_curves.curves(measured, start)
    for quantity in found:
        for other in (other for other in given.against if other in curves):
            for method in (method for method in curves if method != other):
                scale = 1 if quantity == DRAWS else 100
                gain = tradeoff_curves.ahead(quantity, curves[method], curves[other], scale)
                names = f"{tradeoff_curves.label(method)} over {tradeoff_curves.label(other)}"
                lines.append(f"{quantity}, {names}: {gain}")
    atomic_write(given.runs / "procedures.json", json.dumps(lines, indent=1) + "\n")
    pictures = {
        "procedures.png": [f"best of {n}" for n in given.best] + [f"worst of {n}" for n in given.worst],
        "rewind.png": [str(again), DRAWS],
    }
    for file, shown in pictures.items():
        atomic_write_bytes(given.runs / file, figures.render(partial(draw, curves, shown)))
    print(*lines, *(given.runs / file for file in pictures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK, BEFORE))
