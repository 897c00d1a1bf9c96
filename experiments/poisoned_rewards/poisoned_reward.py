"""Does calibration protect against a poisoned reward? Exact optima, and trained models, at equal KL (InfAlign, App. D).

    python -m experiments.poisoned_rewards.poisoned_reward experiments/configs/poisoned.toml [--out runs/poisoned]
        [--ns 2 4] [--seeds 1 2] [--jobs 1] [--no-training] [-- --train.steps 50 ...]

The recipe has a reward "poisoned" to train for, and "true" and "word" of weight 0, which only measure. Samples the
reference, then maximises the poisoned reward raw, and calibrated by prompt, pooled and by the median
(calibration.by). beta of each is the one whose optimum, computed on the samples, has the KL of best-of-N of the
reference. Prints the share of completions with the word and the true reward: of these optima, in which every sample has
a probability of its own, and of trained models on the held-out prompts. Finished work is reused. Arguments after
``--`` are passed to every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from experiments.alignment_tradeoff.tradeoff import beta_for, distance, made, nlgrpo
from nlgrpo.apps.report import figures
from nlgrpo.apps.sweep import sweep
from nlgrpo.calibration import calibrate, calibrate_by_median, calibrate_pooled
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation
from nlgrpo.estimators import bootstrap
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

POISONED, TRUE, WORD = "poisoned", "true", "word"
METHODS = {"raw": "raw reward", "prompt": "by prompt", "pooled": "pooled", "median": "by the median"}
QUANTITIES = {"word": "completions with the word (%)", "true": "true reward", "poisoned": "poisoned reward"}
Run = tuple[str, int, int]  # method, N, seed
Measured = Mapping[str, Tensor]  # each (P,)


def trained_for(method: str, rewards: Tensor) -> Tensor:
    """What a method maximises the mean of, for samples (P, K) of the reference."""
    if method == "raw":
        return rewards
    if method == "pooled":
        return calibrate_pooled(rewards, rewards)
    return calibrate(rewards, rewards) if method == "prompt" else calibrate_by_median(rewards, rewards)


def optimum(values: Tensor, beta: float, rewards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the means (P,) of ``rewards`` and the KL under the optimum, samples weighted by e^(values / beta)."""
    logs = (values / beta).log_softmax(1)
    kl = (logs.exp() * (logs + np.log(values.shape[1]))).sum(1)
    return {"kl": kl} | {name: (logs.exp() * r).sum(1) for name, r in rewards.items()}


def points(ns: Sequence[int], seeds: Sequence[int], rewards: Tensor) -> dict[Run, dict[str, str]]:
    """Options of every run: the transform, what it is calibrated on, and beta."""
    found: dict[Run, dict[str, str]] = {}
    for method in METHODS:
        values = trained_for(method, rewards)
        weight = 1 / float(values.max() - values.min())
        for n in ns:
            given = {
                f"rewards.{POISONED}.transform": "" if method == "raw" else "identity",
                f"rewards.{POISONED}.weight": f"{weight:.6g}",
                "calibration.by": "prompt" if method == "raw" else method,
                "loss.beta": f"{beta_for(weight * values, distance(n)):.6g}",
            }
            found |= {(method, n, seed): given | {"train.seed": str(seed)} for seed in seeds}
    return found


def measured(sampled: EvaluationSamples) -> dict[str, Tensor]:
    own = {name: sampled.rewards[name].mean(1) for name in (WORD, TRUE, POISONED)}
    return {"kl": sampled.kl["k1"].mean(1) if sampled.kl else torch.zeros_like(own[WORD]), **own}


# --- results ----------------------------------------------------------------------------------------------------------


def line(name: str, each: Measured) -> str:
    """One row: KL, and every quantity with its interval over prompts."""
    cells = [f"KL {float(each['kl'].mean()):.2f}"]
    for quantity, title in QUANTITIES.items():
        mean, low, high = (float(x) * (100 if quantity == "word" else 1) for x in bootstrap(each[quantity]))
        digits = 1 if quantity == "word" else 3
        cells.append(f"{title} {mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
    return f"{name}: {', '.join(cells)}"


def at_equal_kl(runs: Mapping[Run, Measured], start: Measured) -> list[str]:
    """Interpolate every quantity in sqrt(KL) between the reference and the runs of a seed, at KLs that all reach."""
    reached = [float(each["kl"].mean()) for (_, n, _), each in runs.items() if n == max(n for _, n, _ in runs)]
    kl, lines = max(0.0, min(reached)), list[str]()  # an estimate of a small KL can be negative
    for method in METHODS:
        rows = []
        for seed in dict.fromkeys(seed for _, _, seed in runs):
            own = [start, *(each for (m, _, s), each in runs.items() if (m, s) == (method, seed))]
            own.sort(key=lambda each: float(each["kl"].mean()))
            x = [max(0.0, float(each["kl"].mean())) ** 0.5 for each in own]
            rows.append([np.interp(kl**0.5, x, [float(each[q].mean()) for each in own]) for q in QUANTITIES])
        word, true, poisoned = np.mean(rows, axis=0)
        spread = f"seeds {', '.join(f'{100 * row[0]:.1f}%' for row in rows)}"
        lines.append(
            f"trained, at KL {kl:.2f}, {METHODS[method]}: word {100 * word:.1f}% ({spread}), true reward {true:.3f}, "
            f"poisoned reward {poisoned:.3f}"
        )
    return lines


def draw(exact: Mapping[str, Sequence[Measured]], runs: Mapping[Run, Measured]) -> Figure:
    """Draw the share of the word and the true reward over the KL: curves are optima, points are trained models."""
    figure = figures.figure_of((10.4, 4.6))
    every = list(figure.subplots(1, 2))
    for axes, quantity in zip(every, ("word", "true"), strict=True):
        scale = 100 if quantity == "word" else 1
        for i, (method, label) in enumerate(METHODS.items()):
            look = figures.series_style(i)
            x, y = ([float(each[key].mean()) for each in exact[method]] for key in ("kl", quantity))
            axes.plot(x, [scale * v for v in y], **look.line, label=label)
            own = [each for (m, _, _), each in runs.items() if m == method]
            where = [float(each["kl"].mean()) for each in own]
            values = [scale * float(each[quantity].mean()) for each in own]
            axes.plot(where, values, look.marker, color=look.colour, linewidth=0)
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_title(QUANTITIES[quantity])
    figures.legend(figure, every)
    return figure


QUICK = [
    "poisoned.toml", "--ns", "2", "--seeds", "3", "--references", "16", "--completions", "4",
    "--jobs", "2",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="TOML file with the rewards poisoned, true and word")
    parser.add_argument("--out", type=Path, default=Path("runs/poisoned"), help="output folder")
    parser.add_argument("--ns", nargs="+", type=int, default=[2, 4], help="KLs: those of best-of-N of the reference")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--references", type=int, default=256, help="samples of the reference per prompt")
    parser.add_argument("--completions", type=int, default=32, help="completions per prompt in the evaluation")
    parser.add_argument("--no-training", action="store_true", help="only the exact optima")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    rollouts, folder, results = (given.out / part for part in ("rollouts", "runs", "evaluation"))
    start = [given.recipe, *more, f"--calibration.rollouts={rollouts}"]
    try:
        config, _ = from_arguments(start)
        if set(config.rewards) != {POISONED, TRUE, WORD}:
            raise ValueError(f"{given.recipe} has rewards {', '.join(config.rewards)}; expected poisoned, true, word")
        given.out.mkdir(parents=True, exist_ok=True)
        nlgrpo(["rollout", *start, f"--samples={given.references}", f"--out={rollouts}"], 1, given.out / "rollout.log")
        rewards = reference_rollouts.load_rollouts(rollouts).rewards
        rows = points(given.ns, given.seeds, rewards[POISONED])
    except ValueError as error:
        parser.error(str(error))
    lines, exact = [line("reference", optimum(torch.zeros_like(rewards[TRUE]), 1.0, rewards))], {}
    for method, label in METHODS.items():
        values = trained_for(method, rewards[POISONED])
        kls = [x**2 for x in np.linspace(0.1, distance(max(given.ns)) ** 0.5, 12)]
        exact[method] = [optimum(values, beta_for(values, kl), rewards) for kl in kls]
        for n in given.ns:
            each = optimum(values, beta_for(values, distance(n)), rewards)
            lines.append(line(f"exact optimum, {label}", each))
    runs: dict[Run, dict[str, Tensor]] = {}
    if not given.no_training:
        status = sweep.run(start, list(rows.values()), folder, jobs=given.jobs, retry=given.retry)
        where = made(start, rows, folder)
        if any(point.state != "done" for point in where.values()):
            print("some runs are not done; run the same command again, with --retry for failed runs")
            return status or 1
        named = [f"{method} N {n} seed {seed}={where[method, n, seed].folder}" for method, n, seed in rows]
        sampled = [f"--samples={given.completions}", "--ns=1", f"--out={results}"]
        nlgrpo(["evaluate", *named, *sampled], 1, given.out / "evaluate.log")
        first, *models = read_evaluation(results).values()
        runs = {run: measured(model) for run, model in zip(rows, models, strict=True)}
        lines.append(line("reference, held-out prompts", measured(first)))
        lines += [line(f"trained, {METHODS[m]}, N {n}, seed {s}", each) for (m, n, s), each in runs.items()]
        lines += at_equal_kl(runs, measured(first))
    atomic_write(given.out / "poisoned.json", json.dumps(lines, indent=1) + "\n")
    atomic_write_bytes(given.out / "poisoned.png", figures.render(partial(draw, exact, runs)))
    print(*lines, given.out / "poisoned.png", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
