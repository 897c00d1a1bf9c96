"""Compare the settings of a sweep over its seeds: the value of best-of-N, and the KL of training.

    nlgrpo sweep experiments/configs/opposed.toml --objective mean,bon:4 --train.seed 1,2,3,4,5 --out runs/opposed
    python -m experiments.trained_predictions.compare_seeds runs/opposed [--ns 1 2 4 8 16] [--out runs/opposed]

The value is that of the evaluation after training, sum_i w_i BoN_i over the rewards. Each setting is compared with the
first one: mean difference over the seeds, 95% interval by Student's t, and the difference of each seed. It also prints
the value before training, and best-of-N of each reward. The KL is that per completion over the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from experiments.alignment_tradeoff.tradeoff_curves import reach_over_seeds
from nlgrpo.apps.report import figures, run_loader
from nlgrpo.apps.report.run_loader import TRAINING_KL, Model, ReportData
from nlgrpo.apps.sweep.state import read_sweep_state
from nlgrpo.estimators import best_of_n, over_present
from nlgrpo.objectives.registry import is_pairwise
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes
from nlgrpo.training.evaluation_summary import weighted_best_of_n

SEED = "train.seed"


@dataclass(frozen=True)
class Setting:
    """Runs of one setting by seed: values (S, len(ns)) after training and before, best-of-N (S, len(ns)) of each
    reward, KL of the end of training (S,), and KL over the steps.
    """

    values: Tensor
    before: Tensor
    rewards: dict[str, Tensor]
    kl: list[float]
    curves: list[tuple[list[int], list[float]]]


def read(folder: Path, ns: Sequence[int]) -> tuple[list[int], dict[str, Setting]]:
    """Return the seeds of a sweep, and its settings by name, in the sweep's order.

    Raises ValueError for a sweep without seeds, with settings of different seeds, or with runs that are not done.
    """
    points, found = read_sweep_state(folder), run_loader.read_runs([folder], join_seeds=False)
    models = {model.name: model for model in found.models}
    runs: dict[str, dict[int, Model]] = {}
    for point in points:
        if SEED not in point.overrides:
            raise ValueError(f"{folder}: {point.name} has no {SEED}; compare a sweep over {SEED}")
        if point.state != "done":
            raise ValueError(f"{folder}: {point.name} is {point.state}; run the sweep to its end")
        others = {key: value for key, value in point.overrides.items() if key != SEED}
        name = ", ".join(f"{key} = {value}" for key, value in others.items()) or "base"
        runs.setdefault(name, {})[int(point.overrides[SEED])] = models[point.name]
    seeds = list(next(iter(runs.values())))
    different = [name for name, own in runs.items() if own.keys() != set(seeds)]
    if different:
        raise ValueError(f"{folder}: {different[0]} has other seeds than {next(iter(runs))}")
    return seeds, {name: _setting(found, [own[seed] for seed in seeds], ns) for name, own in runs.items()}


def _setting(found: ReportData, models: Sequence[Model], ns: Sequence[int]) -> Setting:
    values, before, kls, curves = [], [], [], []
    rewards: dict[str, list[Tensor]] = {}
    for model in models:
        reference = found.references.get(model.reference)
        if model.sampled is None or reference is None:
            raise ValueError(f"{model.label} has no samples of its evaluations before and after training")
        most = model.sampled.lengths.shape[1]
        if max(ns) > most:
            raise ValueError(f"--ns {max(ns)}: the evaluation of {model.label} has {most} samples per prompt")
        values.append(weighted_best_of_n(model.sampled, ns).nanmean(1))
        before.append(weighted_best_of_n(reference, ns).nanmean(1))
        for name, x in model.sampled.rewards.items():
            if not is_pairwise(model.sampled.objectives[name]):
                of_n = [over_present(lambda r, n=n: best_of_n(r, [n])[0], x, fewest=n).nanmean() for n in ns]
                rewards.setdefault(name, []).append(torch.stack(of_n))
        kls.append(next(entry.estimate.value for entry in model.entries if entry.quantity == TRAINING_KL))
        distances = model.logged.metrics["kl"] * model.logged.metrics["completions/mean_length"]
        known = ~np.isnan(distances)
        curves.append((model.logged.steps[known].tolist(), distances[known].tolist()))
    each = {name: torch.stack(rows) for name, rows in rewards.items()}
    return Setting(torch.stack(values), torch.stack(before), each, kls, curves)


def findings(settings: Mapping[str, Setting], ns: Sequence[int]) -> list[str]:
    """Values before training, KL and values of each setting, then the differences from the first one."""
    start = next(iter(settings.values())).before
    lines = [f"before training: best of {n}: {_interval(start[:, i].tolist(), '')}" for i, n in enumerate(ns)]
    for name, own in settings.items():
        each = ", ".join(f"{kl:.2f}" for kl in own.kl)
        lines.append(f"{name}: KL {np.mean(own.kl):.3f} nats per completion (seeds {each})")
        for what, values in {"value": own.values, **own.rewards}.items():
            lines += [f"{name}: {what}, best of {n}: {_interval(values[:, i].tolist(), '')}" for i, n in enumerate(ns)]
    first, *others = settings
    for name in others:
        gaps = settings[name].values - settings[first].values
        lines += [f"{name} over {first}: best of {n}: {_interval(gaps[:, i].tolist(), '+')}" for i, n in enumerate(ns)]
    return lines


def _interval(values: Sequence[float], sign: str) -> str:
    mean, reach = float(np.mean(values)), reach_over_seeds(values)
    text = f"{mean:{sign}.4f}"
    if not math.isnan(reach):
        text += f" [{mean - reach:{sign}.4f}, {mean + reach:{sign}.4f}] over seeds"
    return f"{text} (seeds {', '.join(f'{value:{sign}.4f}' for value in values)})"


def draw(settings: Mapping[str, Setting], ns: Sequence[int]) -> Figure:
    """Value of best-of-N over N with intervals over seeds, and the KL of each run over the steps."""
    figure = figures.figure_of((10.4, 4.6))
    left, right = figure.subplots(1, 2)
    for i, (name, own) in enumerate(settings.items()):
        look = figures.series_style(i)
        reach = [reach_over_seeds(own.values[:, j].tolist()) for j in range(len(ns))]
        shift = [n * 1.02 ** (i - (len(settings) - 1) / 2) for n in ns]  # intervals side by side
        left.errorbar(shift, own.values.mean(0), reach, **look.line, marker=look.marker, capsize=2, label=name)
        for steps, kl in own.curves:
            right.plot(steps, kl, color=look.colour, alpha=0.6, linewidth=0.9)
    left.set_xscale("log", base=2)
    left.set_xticks(list(ns), [str(n) for n in ns])
    left.set_xlabel("N")
    left.set_title("Value of best-of-N")
    right.set_xlabel("step")
    right.set_ylim(bottom=0)
    right.set_title("KL to the reference (nats per completion)")
    figures.legend(figure, [left])
    return figure


QUICK = [
    "runs/seeds", "--ns", "1", "2",
]  # fmt: skip
SWEEP = ("--objective", "mean,bon:4", "--train.seed", "1,2", "--jobs", "2", "--out", "runs/seeds")
BEFORE = [["-m", "nlgrpo.cli", "sweep", "two.toml", *SWEEP]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of a finished `nlgrpo sweep` over train.seed")
    parser.add_argument("--ns", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="N of best-of-N")
    parser.add_argument("--out", type=Path, help="folder of seeds.json and seeds.png; default: that of the sweep")
    given = parser.parse_args()
    if min(given.ns) < 1:
        parser.error(f"--ns {min(given.ns)}: expected numbers >= 1")
    try:
        seeds, settings = read(given.sweep, given.ns)
    except ValueError as error:
        parser.error(str(error))
    lines = [f"{len(settings)} settings, seeds {', '.join(map(str, seeds))}", *findings(settings, given.ns)]
    out = given.out or given.sweep
    out.mkdir(parents=True, exist_ok=True)
    content = {name: {"values": own.values.tolist(), "kl": own.kl} for name, own in settings.items()}
    atomic_write(
        out / "seeds.json",
        json.dumps({"ns": given.ns, "seeds": seeds, "settings": content, "findings": lines}, indent=1) + "\n",
    )
    atomic_write_bytes(out / "seeds.png", figures.render(functools.partial(draw, settings, given.ns)))
    print(*lines, out / "seeds.png", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK, BEFORE))
