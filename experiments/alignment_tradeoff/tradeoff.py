"""Win rate and reward against KL for all alignment methods (InfAlign, Fig. 4; vBoN, Fig. 2).

    python -m experiments.alignment_tradeoff.tradeoff experiments/configs/alignment.toml [--out runs/tradeoff]
        [--methods grpo identity exp:10] [--ns 2 4 8] [--of 4] [--seeds 1 2 3 4 5] [--gold "classifier(path='..')"]
        [--jobs 2] [-- --train.steps 50 ...]

Samples the reference, trains a model for each method, strength and seed, evaluates all of them on the held-out prompts,
then compares them and draws figures. A strength is an N: best-of-N of the reference has the KL log N - (N-1)/N to it. A
method with a beta gets the beta whose optimum, computed on the samples, has that KL. ``--of`` is the N of the methods
that are trained for best-of-N at inference time. ``--gold``: a reward that evaluates, and does not train or choose.
Finished work is reused, and stopped work resumes. Arguments after ``--`` are passed to every run.

    grpo, ppo                       the reward itself
    bon, rank                       IAMA: the objective bon:N on the reward, and on u^N (InfAlign, Def. 5), by GRPO
    identity, log, exp:T, bon_fp    InfAlign-CTRL: transforms of the calibrated reward u, by GRPO; ppo/log, .. by PPO
    vbon, vbon:bound                vBoN, Eq. 5 and 8, by GRPO; ppo/vbon, ppo/vbon:bound by PPO
    bond                            BOND: vbon:bound and the likelihood of the best of N, half each
    bon_sft, dpo, dpo/all, ipo, bonbon    offline: best-of-N SFT; DPO on disjoint and on all pairs; IPO; BoNBoN
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
from typing import TypeVar

from scipy.optimize import brentq
from torch import Tensor

from experiments import quick
from experiments.alignment_tradeoff import tradeoff_curves, tradeoff_figures
from experiments.alignment_tradeoff.tradeoff_curves import Run
from experiments.predicted_gains import exact_optimum
from experiments.predicted_gains.exact_optimum import Goal
from nlgrpo.apps.report import figures
from nlgrpo.apps.sweep import grid, launchers, sweep
from nlgrpo.apps.sweep.state import Point, read_sweep_state
from nlgrpo.calibration.alignment import at_kl, calibrate, parse_transform
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts import reference_rollouts
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.objectives.registry import BestOfN
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

METHODS = [
    "grpo", "ppo", "bon", "rank", "identity", "log", "exp:10", "exp:-10", "bon_fp", "ppo/identity", "ppo/log",
    "ppo/exp:10", "ppo/bon_fp", "vbon", "vbon:bound", "ppo/vbon", "ppo/vbon:bound", "bond", "bon_sft", "dpo", "dpo/all",
    "ipo", "bonbon",
]  # fmt: skip
OFFLINE = ("bon_sft", "dpo", "ipo", "bonbon")
SETS = 64  # winners or pairs per step of an offline method
GOLD = "gold"
Key = TypeVar("Key")  # what names a run


# --- runs -------------------------------------------------------------------------------------------------------------


def distance(n: int) -> float:
    """KL of best-of-n of the reference to the reference, if no two strings have equal rewards (Beirami et al. 2024)."""
    return math.log(n) - (n - 1) / n


def beta_for(phi: Tensor, kl: float) -> float:
    """Return the beta whose optimum, samples (P, K) weighted by e^(phi/beta), has this mean KL to equal weights.

    Raises ValueError for a KL that cannot be reached because too many samples are equally good.
    """

    def excess(log_beta: float) -> float:
        logs = (phi / math.exp(log_beta)).log_softmax(1)
        return float((logs.exp() * (logs + math.log(phi.shape[1]))).sum(1).mean()) - kl

    if excess(-20.0) < 0:
        raise ValueError(f"KL {kl:.3f} is out of reach: too many reference samples are equally good; use a smaller N")
    return math.exp(brentq(excess, -20.0, 20.0, xtol=1e-6))


def options(method: str, n: int, of: int, name: str, rewards: Tensor, samples: int) -> dict[str, str]:
    """Options of a method at strength ``n``, for best-of-``of`` at inference time.

    ``rewards`` (P, K): reward ``name`` of the reference's samples.
    """
    by, _, kind = method.rpartition("/")
    if kind in OFFLINE or by in OFFLINE:
        return _offline(by or kind, n, name, samples, every_pair=kind == "all")
    objective, transform, weight, beta, kl = "mean", "", 1.0, 1.0, distance(n)
    if kind.startswith("vbon") or kind == "bond":
        transform = f"vbon:{n}:bound" if kind == "bond" else kind.replace("vbon", f"vbon:{n}")
    elif kind in ("rank", "bon_fp"):  # the best policies for best-of-N, for rewards without ties
        objective, transform = (f"bon:{of}", f"power:{of}") if kind == "rank" else ("mean", f"bon_fp:{of}")
        beta = float(at_kl(f"bon_fp:{of}", [kl], of).beta)
    elif kind == "bon":
        objective, weight = f"bon:{of}", 1 / float(rewards.max() - rewards.min())
        beta = exact_optimum.at_kl(Goal.of_one(weight * rewards, BestOfN(of)), kl).beta
    else:
        transform = "" if kind in ("grpo", "ppo") else kind
        phi = rewards
        if transform:
            phi = parse_transform(transform, references=rewards.shape[1])(calibrate(rewards, rewards))
        weight = 1 / float(phi.max() - phi.min())  # PPO's critic learns values, not only their order
        beta = beta_for(weight * phi, kl)
    return _given(
        name,
        algorithm="ppo" if by == "ppo" or kind == "ppo" else "grpo",
        objective=objective,
        transform=transform,
        weight=weight,
        beta=beta,
        jeffreys=0.5 * (kind == "bond"),
        of=n if kind == "bond" else 2,
    )


def _offline(method: str, n: int, name: str, samples: int, *, every_pair: bool) -> dict[str, str]:
    """Options of an offline method, with the same number of sets per step for every N."""
    of = samples if every_pair else n if method in ("bon_sft", "bonbon") else 2
    sets = of * (of - 1) // 2 if every_pair else 1
    given = _given(
        name,
        algorithm=method,
        beta=2 / n if method in ("dpo", "ipo") else 1.0,  # no optimum for certain preferences, so no beta from a KL
        of=of,
        rejected="all" if every_pair else "worst",
    )
    return given | {"rollout.prompts": str(max(1, SETS * of // (samples * sets)))}


def _given(
    name: str, *, algorithm: str, objective: str = "mean", transform: str = "", weight: float = 1.0, beta: float = 1.0,
    of: int = 2, rejected: str = "worst", jeffreys: float = 0.0,
) -> dict[str, str]:  # fmt: skip
    return {
        "loss.algorithm": algorithm,
        f"rewards.{name}.objective": objective,
        f"rewards.{name}.transform": transform,
        f"rewards.{name}.weight": f"{weight:.4g}",
        "loss.beta": f"{beta:.4g}",
        "loss.jeffreys": f"{jeffreys:g}",
        "offline.n": str(of),
        "offline.rejected": rejected,
        "offline.alpha": "None",  # both terms of BoNBoN of the same size
    }


def points(
    methods: Sequence[str], ns: Sequence[int], of: int, seeds: Sequence[int], start: Sequence[str], name: str,
    rewards: Tensor,
) -> dict[Run, dict[str, str]]:  # fmt: skip
    """Options of every run; all runs have the same keys."""
    config, _ = from_arguments(start)
    same = {"rollout.prompts": str(config.rollout.prompts)}
    found: dict[Run, dict[str, str]] = {}
    for method in methods:
        for n in ns:
            given = same | options(method, n, of, name, rewards, config.rollout.samples)
            found |= {(method, n, seed): given | {"train.seed": str(seed)} for seed in seeds}
    return found


def made(start: Sequence[str], rows: Mapping[Key, Mapping[str, str]], folder: Path) -> dict[Key, Point]:
    """Return the point of each run in a sweep, which may have other points too."""
    settings = grid.settings(start, list(rows.values()), list(next(iter(rows.values()))))
    known = {json.dumps(point.overrides, sort_keys=True): point for point in read_sweep_state(folder)}
    return {run: known[json.dumps(s.overrides, sort_keys=True)] for run, s in zip(rows, settings, strict=True)}


# --- the command ------------------------------------------------------------------------------------------------------


def nlgrpo(arguments: Sequence[str], ranks: int, log: Path) -> None:
    """Run a command on ``ranks`` ranks and write its output to ``log``. Exits with its status if it fails."""
    print(f"nlgrpo {arguments[0]}: {log}", flush=True)
    with log.open("w") as file:
        status = subprocess.run(launchers.command(arguments, ranks), stdout=file, check=False).returncode
    if status:
        sys.exit(status)


QUICK = [
    "one.toml", "--methods", "identity", "bon_sft", "--ns", "2", "--seeds", "3", "--references", "16",
    "--completions", "8", "--gold", "length(target=3, scale=5)",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file with one reward")
    parser.add_argument("--out", type=Path, default=Path("runs/tradeoff"), help="output folder")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods to compare, such as exp:5 or ppo/exp:5")
    parser.add_argument("--ns", nargs="+", type=int, default=[2, 4, 8], help="N of each strength")
    parser.add_argument("--of", type=int, default=4, help="N of methods trained for best-of-N at inference time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="0 is for choosing settings")
    parser.add_argument("--gold", default="", help="reward that evaluates, written as in a configuration")
    parser.add_argument("--references", type=int, default=256, help="samples of the reference per prompt")
    parser.add_argument("--completions", type=int, default=32, help="completions per prompt in the evaluation")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel, and ranks of sampling and evaluation")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    rollouts, runs, results = (given.out / part for part in ("rollouts", "runs", "evaluation"))
    start = [given.recipe, *more, f"--calibration.rollouts={rollouts}"]
    gold = GOLD if given.gold else None
    if given.completions < max(tradeoff_curves.BEST_OF):
        parser.error(f"--completions {given.completions}: best of {max(tradeoff_curves.BEST_OF)} needs as many")
    try:
        config, _ = from_arguments(start)
        if len(config.rewards) != 1 or GOLD in config.rewards:
            raise ValueError(f"{given.recipe} has {len(config.rewards)} rewards; expected one, not named gold")
        name = next(iter(config.rewards))
        judge = {"function": given.gold, "objective": "mean", "weight": "0"}
        judged = [f"--rewards.{GOLD}.{key}={value}" for key, value in judge.items()] if gold else []
        from_arguments([*start, *judged])
        given.out.mkdir(parents=True, exist_ok=True)
        drawn = [f"--samples={given.references}", f"--out={rollouts}"]
        nlgrpo(["rollout", *start, *judged, *drawn], given.jobs, given.out / "rollout.log")
        kept = reference_rollouts.load_rollouts(rollouts)
        kept.ecdf(name)  # refuses abstentions
        if not (kept.rewards[name].amax(1) > kept.rewards[name].amin(1)).any():
            raise ValueError(f"reward {name!r} is the same for all samples of the reference")
        reference = tradeoff_curves.held_out(config, kept, name, gold)
        rows = points(given.methods, given.ns, given.of, given.seeds, start, name, kept.rewards[name])
        status = sweep.run(start, list(rows.values()), runs, jobs=given.jobs, retry=given.retry)
        where = made(start, rows, runs)
    except ValueError as error:
        parser.error(str(error))
    missing = sum(point.state != "done" for point in where.values())
    if missing:
        print(f"{missing} of {len(where)} runs are not done; run the same command again, with --retry for failed runs")
        return status or 1
    named = [f"{method} N {n} seed {seed}={point.folder}" for (method, n, seed), point in where.items()]
    sampled = [f"--samples={given.completions}", "--ns=1", f"--out={results}"]
    sampled.append(f"--train.seed={config.train.seed}")  # it shuffles the prompts; the first run has another seed
    nlgrpo(["evaluate", *named, *sampled, *judged], given.jobs, given.out / "evaluate.log")
    first, *models = read_evaluation(results).values()
    reference.check(first)
    measured = {
        run: reference.measure(model.rewards[name], model.kl["k1"], model.rewards[gold] if gold else None)
        for run, model in zip(where, models, strict=True)
    }
    found = tradeoff_curves.curves(measured, reference.best_of(1.0))
    equal = tradeoff_curves.at_equal_kls(found, reference, [distance(n) for n in given.ns])
    findings = tradeoff_curves.findings(found, reference, measured)
    tables = [*tradeoff_curves.means(measured, reference), *tradeoff_curves.equal_kl_tables(equal)]
    lines = [*tables, "", *(f"- {line}" for line in findings)]
    content = {"points": tradeoff_curves.table(measured), "equal_kl": equal, "findings": findings}
    atomic_write(given.out / "tradeoff.json", json.dumps(content, indent=1) + "\n")
    atomic_write(given.out / "findings.md", "\n".join(lines) + "\n")
    pictures = {
        "win_rates.png": functools.partial(
            tradeoff_figures.draw_curves, found, reference, ["single", "best4", "worst"]
        ),
        "fronts.png": functools.partial(tradeoff_figures.draw_points, measured, reference, ["single", "reward"]),
    }
    for file, draw in pictures.items():
        atomic_write_bytes(given.out / file, figures.render(draw))
    print(*lines, *(given.out / file for file in ("findings.md", *pictures)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
