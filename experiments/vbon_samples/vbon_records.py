"""How many samples of the reference vBoN needs: log F, Kolmogorov-Smirnov tests, trained models (vBoN, Figs. 3 and 4).

    python -m experiments.vbon_samples.vbon_records experiments/configs/alignment.toml [--out runs/vbon-records]
                                   [--of 10] [--train-samples 8 32 128 256] [--seeds 1 2] [-- --train.steps 50 ...]

Draws 600 samples of the reference per prompt. Prints how far log F from M of them is from log F of all 600 (Fig. 3),
and the share of prompts whose M samples fail a Kolmogorov-Smirnov test against the 600 that contain them (Table 1).
Then trains vbon:N on M samples per prompt, drawn anew for every run, and prints reward, win rate and KL on the held-out
prompts (Fig. 4). Several rewards are tested; the first one is trained for. Finished work is reused. Arguments after
``--`` are keys of the configuration.
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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from experiments.alignment_tradeoff.tradeoff import distance, made, nlgrpo
from nlgrpo.apps.report import figures
from nlgrpo.apps.sweep import sweep
from nlgrpo.calibration.kolmogorov_smirnov import ks_table
from nlgrpo.calibration.variational import log_strict_cdf, strict_order, string_keys
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation
from nlgrpo.engine.rollouts.reference_rollouts import ReferenceRollouts
from nlgrpo.estimators import win_rate
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

ALL = 600  # samples per prompt, as in the paper
SIZES = (10, 20, 50, 100, 200, 300)
TESTED = (5, 20, 100, 200, 250)  # Table 1
RANKS = (0.1, 0.5, 0.9)
SUBSETS = 20

# --- log F and the tests ----------------------------------------------------------------------------------------------


def subset_spread(rewards: Tensor, keys: Tensor, size: int) -> dict[float, float]:
    """Return the standard deviation of log F over random subsets of ``size`` samples, at the rewards of given ranks.

    ``rewards`` and ``keys`` (P, K). Root mean square over the prompts, {rank of the reward: deviation}.
    """
    order = log_strict_cdf(rewards, keys, rewards, keys, None).argsort(1)
    at = order[:, [round(rank * rewards.shape[1]) for rank in RANKS]]
    found = []
    for seed in range(SUBSETS):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(rewards.shape, generator=generator).argsort(1)[:, :size]
        of_subset = (rewards.gather(1, chosen), keys.gather(1, chosen))
        found.append(log_strict_cdf(rewards.gather(1, at), keys.gather(1, at), *of_subset))
    deviation = torch.stack(found).var(0).mean(0).sqrt()
    return dict(zip(RANKS, deviation.tolist(), strict=True))


def predicted_spread(rank: float, size: int, of: int) -> float:
    """The same by the delta method, for subsets of ``of`` samples: sqrt((1 - F) / (F M) (1 - M / K))."""
    return float(np.sqrt((1 - rank) / (rank * size) * (1 - size / of)))


def spreads(name: str, rewards: Tensor, keys: Tensor) -> list[str]:
    lines = []
    for size in (size for size in SIZES if size < rewards.shape[1]):
        cells = [
            f"F = {rank}: {deviation:.3f} (delta method {predicted_spread(rank, size, rewards.shape[1]):.3f})"
            for rank, deviation in subset_spread(rewards, keys, size).items()
        ]
        lines.append(f"{name}: deviation of log F from {size} samples, {', '.join(cells)}")
    return lines


def rejections(name: str, rewards: Tensor, repeats: int) -> list[str]:
    """Table 1: M samples against all, which contain them; several choices of the M per prompt."""
    K, lines = rewards.shape[1], []
    for size in (size for size in TESTED if size < K):
        rows = [ks_table(rewards, [size, K], seed=seed, nested=True)[0] for seed in range(repeats)]
        rejected = sum(row.rejected for row in rows)
        few = [row for row in rows if row.rejected]
        statistic, p = (
            sum(getattr(row, part) * row.rejected for row in few) / max(rejected, 1)
            for part in ("statistic", "p_value")
        )
        text = f"{name}: M = {size}, rejected {rejected} of {repeats * len(rewards)} = "
        text += f"{rejected / (repeats * len(rewards)):.2%}"
        lines.append(text + (f", statistic {statistic:.2f}, p-value {p:.2f}" if rejected else ""))
    return lines


# --- training ---------------------------------------------------------------------------------------------------------


def points(name: str, of: int, sizes: Sequence[int], seeds: Sequence[int]) -> dict[tuple[int, int], dict[str, str]]:
    """Options of every run: vbon:``of`` with M samples of the reference, drawn with the seed of the run."""
    given = {f"rewards.{name}.transform": f"vbon:{of}", "calibration.missing": "draw", "loss.beta": "1"}
    return {
        (size, seed): given | {"calibration.samples": str(size), "train.seed": str(seed)}
        for size in sizes
        for seed in seeds
    }


def outcome(name: str, model: EvaluationSamples, reference: EvaluationSamples) -> dict[str, float]:
    rewards = model.rewards[name]
    won = win_rate(rewards, reference.rewards[name], 1)
    return {"reward": float(rewards.mean()), "win": float(won.mean()), "kl": float(model.kl["k1"].mean())}


def summary(of: int, runs: Mapping[tuple[int, int], Mapping[str, float]]) -> list[str]:
    lines = []
    for size in dict.fromkeys(size for size, _ in runs):
        own = [each for (m, _), each in runs.items() if m == size]
        cells = []
        for part, scale, digits in (("reward", 1, 3), ("win", 100, 1), ("kl", 1, 2)):
            values = [scale * each[part] for each in own]
            text = ", ".join(f"{value:.{digits}f}" for value in values)
            cells.append(f"{part} {np.mean(values):.{digits}f} (seeds {text})")
        lines.append(f"vbon:{of} on {size} samples: {'; '.join(cells)}")
    return lines


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_log_f(rewards: Tensor, keys: Tensor) -> Figure:
    """log F over the reward for the prompts of lowest, middle and highest mean reward, from M samples (Fig. 3)."""
    rows = rewards.mean(1).argsort()[[0, len(rewards) // 2, -1]]
    figure = figures.figure_of((12.0, 4.2))
    every = list(figure.subplots(1, 3))
    for axes, row, title in zip(every, rows.tolist(), ("lowest", "middle", "highest"), strict=True):
        r, k = rewards[row : row + 1], keys[row : row + 1]
        order = strict_order(r, k)[0].argsort()
        for i, size in enumerate(m for m in (10, 50, 100, 200, 300, ALL) if m <= r.shape[1]):
            log_f = log_strict_cdf(r, k, r[:, :size], k[:, :size])[0]
            axes.step(r[0, order], log_f[order], where="post", **figures.series_style(i).line, label=f"M = {size}")
        axes.set_title(f"Prompt of the {title} mean reward, {float(r.mean()):.2f}")
        axes.set_xlabel("reward")
    every[0].set_ylabel("log F")
    figures.legend(figure, every)
    return figure


def draw_trained(of: int, runs: Mapping[tuple[int, int], Mapping[str, float]]) -> Figure:
    """Reward, win rate and KL of the trained models over M: every seed, and their mean (Fig. 4)."""
    figure = figures.figure_of((11.0, 4.0))
    every = list(figure.subplots(1, 3))
    titles = {"reward": "Mean reward", "win": "Win rate (%)", "kl": "KL to the reference (nats)"}
    for axes, (part, title) in zip(every, titles.items(), strict=True):
        _trained_panel(axes, runs, part, 100 if part == "win" else 1)
        axes.set_title(f"{title}, vbon:{of}")
        axes.set_xlabel("M, samples of the reference per prompt")
    if part == "kl":
        every[-1].axhline(distance(of), color=figures.GREY, linestyle="--", label=f"best of {of} without ties")
    figures.legend(figure, every)
    return figure


def _trained_panel(axes: Axes, runs: Mapping[tuple[int, int], Mapping[str, float]], part: str, scale: int) -> None:
    sizes = list(dict.fromkeys(size for size, _ in runs))
    look = figures.series_style(0)
    for (size, _), each in runs.items():
        axes.plot(size, scale * each[part], look.marker, color=look.colour, alpha=0.5)
    means = [scale * np.mean([each[part] for (m, _), each in runs.items() if m == size]) for size in sizes]
    axes.plot(sizes, means, **look.line, label="mean over seeds")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])


# --- the command ------------------------------------------------------------------------------------------------------


def keys_of(rollouts: ReferenceRollouts) -> Tensor:
    """Keys (P, K) that order equal rewards."""
    return torch.stack([string_keys(rows) for _, rows in rollouts.tokens()])


QUICK = [
    "one.toml", "--samples", "40", "--of", "2", "--train-samples", "4", "--seeds", "0", "--repeats", "2",
    "--completions", "4",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file")
    parser.add_argument("--out", type=Path, default=Path("runs/vbon-records"), help="output folder")
    parser.add_argument("--samples", type=int, default=ALL, help="samples of the reference per prompt")
    parser.add_argument("--of", type=int, default=10, help="N of vBoN")
    parser.add_argument("--train-samples", nargs="*", type=int, default=[8, 32, 128, 256], help="M of the trained runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5, help="choices of the M samples per test")
    parser.add_argument("--completions", type=int, default=32, help="completions per prompt in the evaluation")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    start, pictures = [given.recipe, *more], {}
    try:
        config, _ = from_arguments(start)
        name = next(iter(config.rewards))
        given.out.mkdir(parents=True, exist_ok=True)
        drawn = [f"--samples={given.samples}", f"--out={given.out / 'rollouts'}"]
        nlgrpo(["rollout", *start, *drawn], 1, given.out / "rollout.log")
        rollouts = reference_rollouts.load_rollouts(given.out / "rollouts")
        keys, lines = keys_of(rollouts), list[str]()
        for reward in config.rewards:
            values = rollouts.reward(reward)
            lines += [*spreads(reward, values, keys), *rejections(reward, values, given.repeats)]
        pictures["log_f.png"] = partial(draw_log_f, rollouts.reward(name), keys)
        rows = points(name, given.of, given.train_samples, given.seeds)
        status = (
            sweep.run(start, list(rows.values()), given.out / "runs", jobs=given.jobs, retry=given.retry) if rows else 0
        )
        where = made(start, rows, given.out / "runs") if rows else {}
    except ValueError as error:
        parser.error(str(error))
    if any(point.state != "done" for point in where.values()):
        print("some runs are not done; run the same command again, with --retry for failed runs")
        return status or 1
    if rows:
        named = [f"M {size} seed {seed}={point.folder}" for (size, seed), point in where.items()]
        sampled = [f"--samples={given.completions}", "--ns=1", f"--out={given.out / 'evaluation'}"]
        nlgrpo(["evaluate", *named, *sampled], 1, given.out / "evaluate.log")
        first, *models = read_evaluation(given.out / "evaluation").values()
        runs = {run: outcome(name, model, first) for run, model in zip(rows, models, strict=True)}
        lines += [f"reference: reward {float(first.rewards[name].mean()):.3f}", *summary(given.of, runs)]
        pictures["samples.png"] = partial(draw_trained, given.of, runs)
    atomic_write(given.out / "records.json", json.dumps(lines, indent=1) + "\n")
    for file, draw in pictures.items():
        atomic_write_bytes(given.out / file, figures.render(draw))
    print(*lines, *(given.out / file for file in pictures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
