"""Win rate and reward against KL, of every way to align for best-of-N (InfAlign, Fig. 4; vBoN, Fig. 2).

    python scripts/tradeoff.py examples/alignment.toml [--out runs/tradeoff] [--methods grpo identity exp:10]
                               [--ns 2 4 16] [--seeds 0 1 2] [--jobs 2] [-- --train.steps 50 ...]

Draws the reference's samples; trains a model by each method, at each strength, from each seed; evaluates all on the
held-out prompts; draws and compares. A strength is an N, for which best-of-N of the reference is log N - (N-1)/N away
from it: a method with a beta gets the one whose optimum, on the samples, is as far. What is finished is not made again,
and what was stopped goes on. What follows ``--`` goes to every run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tradeoff_curves as came_to
from scipy.optimize import brentq
from torch import Tensor
from tradeoff_curves import Run

from nlgrpo.calibration.alignment import calibrate, parse_transform
from nlgrpo.commands import sweep
from nlgrpo.config import grid
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.evaluation import figures
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes
from nlgrpo.training.sweeps import runner
from nlgrpo.training.sweeps.state import Point, read_sweep_state

METHODS = ["ppo", "grpo", "identity", "exp:10", "exp:-10", "vbon", "vbon:bound", "bon_sft", "dpo"]
SETS = 64  # winners or pairs of a step that draws nothing


# --- what is trained --------------------------------------------------------------------------------------------------


def distance(n: int) -> float:
    """KL of best-of-n of the reference to it, where no two strings have one reward (Beirami et al. 2024)."""
    return math.log(n) - (n - 1) / n


def beta_for(phi: Tensor, kl: float) -> float:
    """The beta whose optimum, samples (P, K) weighed by e^(phi/beta), is at this KL from equal weights, on average.

    Raises ValueError for a KL that no weights of the samples reach, because too many are equally good.
    """

    def excess(log_beta: float) -> float:
        logs = (phi / math.exp(log_beta)).log_softmax(1)
        return float((logs.exp() * (logs + math.log(phi.shape[1]))).sum(1).mean()) - kl

    if excess(-20.0) < 0:
        raise ValueError(f"KL {kl:.3f} is out of reach: too many of the reference's samples are equally good")
    return math.exp(brentq(excess, -20.0, 20.0, xtol=1e-6))


def options(method: str, n: int, name: str, rewards: Tensor, samples: int) -> dict[str, str]:
    """What a method is given beside what all are; ``rewards`` (P, K) of the reference are those of ``name``."""
    algorithm, transform, weight, beta, of = "grpo", "", 1.0, 1.0, 2
    if method.startswith("vbon"):
        transform = method.replace("vbon", f"vbon:{n}")
    elif method == "bon_sft":
        algorithm, of = method, n
    elif method in ("dpo", "ipo"):
        algorithm, beta = method, 2 / n  # with preferences that are certain DPO has no optimum, so no KL to ask for
    else:
        phi = rewards
        if method in ("grpo", "ppo"):
            algorithm = method
        else:
            transform = method
            phi = parse_transform(method, references=rewards.shape[1])(calibrate(rewards, rewards))
        weight = 1 / float(phi.max() - phi.min())  # PPO's critic has to learn values, not only their order
        beta = beta_for(weight * phi, distance(n))
    found = {
        "loss.algorithm": algorithm,
        f"rewards.{name}.transform": transform,
        f"rewards.{name}.weight": f"{weight:.4g}",
        "loss.beta": f"{beta:.4g}",
        "offline.n": str(of),
    }
    if algorithm in ("bon_sft", "dpo", "ipo"):  # as many sets a step for every N
        found["rollout.prompts"] = str(max(1, SETS * of // samples))
    return found


def points(
    methods: Sequence[str], ns: Sequence[int], seeds: Sequence[int], start: Sequence[str], rewards: Tensor
) -> dict[Run, dict[str, str]]:
    """The options of every run; all have the same ones."""
    config, _ = from_arguments(start)
    same = {"rollout.prompts": str(config.rollout.prompts)}
    found: dict[Run, dict[str, str]] = {}
    for method in methods:
        for n in ns:
            given = same | options(method, n, next(iter(config.rewards)), rewards, config.rollout.samples)
            found |= {(method, n, seed): given | {"train.seed": str(seed)} for seed in seeds}
    return found


def made(start: Sequence[str], rows: Mapping[Run, Mapping[str, str]], folder: Path) -> dict[Run, Point]:
    """What has become of each run, in a sweep that may hold others."""
    settings = grid.settings(start, list(rows.values()), list(next(iter(rows.values()))))
    known = {json.dumps(point.overrides, sort_keys=True): point for point in read_sweep_state(folder)}
    return {run: known[json.dumps(s.overrides, sort_keys=True)] for run, s in zip(rows, settings, strict=True)}


# --- the command ------------------------------------------------------------------------------------------------------


def nlgrpo(arguments: Sequence[str], ranks: int, log: Path) -> None:
    """Run a command whose ranks share nothing but the work; what it prints is kept. Exits as it does where it fails."""
    print(f"nlgrpo {arguments[0]}: {log}", flush=True)
    with log.open("w") as file:
        status = subprocess.run(runner.command(arguments, ranks), stdout=file, check=False).returncode
    if status:
        sys.exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="a recipe or a TOML file with one reward")
    parser.add_argument("--out", type=Path, default=Path("runs/tradeoff"), help="folder of all that is made")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="also ipo, log, bon_fp:4:0.1")
    parser.add_argument("--ns", nargs="+", type=int, default=[2, 4, 16], help="N of each strength")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--references", type=int, default=256, help="samples of the reference for each prompt")
    parser.add_argument("--completions", type=int, default=32, help="of each prompt in the evaluation")
    parser.add_argument("--retry", action="store_true", help="run failed ones again")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, and ranks of what is not training")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    rollouts, runs, results = (given.out / part for part in ("rollouts", "runs", "evaluation"))
    start = [given.recipe, *more, f"--calibration.rollouts={rollouts}"]
    try:
        config, _ = from_arguments(start)
        if len(config.rewards) != 1:
            raise ValueError(f"{given.recipe} has {len(config.rewards)} rewards, and a win rate is by one")
        name = next(iter(config.rewards))
        given.out.mkdir(parents=True, exist_ok=True)
        drawn = [f"--samples={given.references}", f"--out={rollouts}"]
        nlgrpo(["rollout", *start, *drawn], given.jobs, given.out / "rollout.log")
        kept = reference_rollouts.load(rollouts)
        kept.ecdf(name)  # refuses abstentions
        if not (kept.rewards[name].amax(1) > kept.rewards[name].amin(1)).any():
            raise ValueError(f"reward {name!r} is the same for all samples of the reference")
        reference = came_to.held_out(config, kept, name)
        rows = points(given.methods, given.ns, given.seeds, start, kept.rewards[name])
        status = sweep.run(start, list(rows.values()), runs, jobs=given.jobs, retry=given.retry)
        where = made(start, rows, runs)
    except ValueError as error:
        parser.error(str(error))
    missing = sum(point.state != "done" for point in where.values())
    if missing:
        print(f"{missing} of {len(where)} runs are not done; the same command goes on, with --retry also failed ones")
        return status or 1
    named = [f"{method} N {n} seed {seed}={point.folder}" for (method, n, seed), point in where.items()]
    asked = [f"--samples={given.completions}", f"--ns=1,{came_to.OF}", f"--out={results}"]
    nlgrpo(["evaluate", *named, *asked], given.jobs, given.out / "evaluate.log")
    _, *models = read_evaluation(results).values()
    measured = {
        run: reference.measure(model.rewards[name], model.kl["k1"]) for run, model in zip(where, models, strict=True)
    }
    found = came_to.curves(measured, reference.best_of(1.0))
    lines = [*came_to.means(measured, reference), *came_to.findings(found, reference, measured)]
    content = {"points": came_to.table(measured), "findings": lines}
    atomic_write(given.out / "tradeoff.json", json.dumps(content, indent=1) + "\n")
    pictures = {
        "win_rates.png": functools.partial(came_to.draw_curves, found, reference, ["single", "best", "worst"]),
        "fronts.png": functools.partial(came_to.draw_points, measured, reference, ["single", "reward"]),
    }
    for file, draw in pictures.items():
        atomic_write_bytes(given.out / file, figures.render(draw))
    print(*lines, *(given.out / file for file in pictures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
