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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import brentq
from torch import Tensor

from nlgrpo import figures, grid, reference_rollouts, sweep
from nlgrpo.calibration import at_kl, calibrate, parse_transform
from nlgrpo.evaluation import best_of_n, bootstrap, win_rate
from nlgrpo.manifest import read_manifest
from nlgrpo.objectives import parse
from nlgrpo.recipes import from_arguments
from nlgrpo.sampled import Sampled, read_evaluation
from nlgrpo.writing import atomic_write, atomic_write_bytes

METHODS = ["ppo", "grpo", "bon:4", "identity", "exp:10", "exp:-10", "vbon", "vbon:bound", "bon_sft", "dpo"]
LABELS = {"bon:4": "GRPO for bon:4", "vbon": "vBoN, Eq. 5", "vbon:bound": "vBoN, Eq. 8", "bon_sft": "BoN-SFT"}
BON = "best-of-N of the reference"
OF = 4  # N of best-of-N and worst-of-N
SETS = 64  # winners or pairs of a step that draws nothing
TITLES = {
    "single": "One completion: win rate (%)",
    "best": f"Best of {OF} each: win rate (%)",
    "worst": f"Worst of {OF} each: win rate (%)",
    "reward": "Mean reward",
}
Run = tuple[str, int, int]  # method, N, seed


def label(method: str) -> str:
    return LABELS.get(method, method if ":" in method or method == "identity" else method.upper())


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
    algorithm, objective, transform, weight, beta, of = "grpo", "mean", "", 1.0, 1.0, 2
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
        elif method.startswith(("bon:", "wor:")):
            objective = method
            phi = parse(method).linearize(rewards)  # at the reference
        else:
            transform = method
            phi = parse_transform(method, references=rewards.shape[1])(calibrate(rewards, rewards))
        weight = 1 / float(phi.max() - phi.min())  # PPO's critic has to learn values, not only their order
        beta = beta_for(weight * phi, distance(n))
    found = {
        "loss.algorithm": algorithm,
        f"rewards.{name}.objective": objective,
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
    found = {}
    for method in methods:
        for n in ns:
            given = same | options(method, n, next(iter(config.rewards)), rewards, config.rollout.samples)
            found |= {(method, n, seed): given | {"train.seed": str(seed)} for seed in seeds}
    return found


def folders(start: Sequence[str], rows: Mapping[Run, Mapping[str, str]], folder: Path) -> dict[Run, Path]:
    """Where the sweep has put each run."""
    settings = grid.settings(start, list(rows.values()), list(next(iter(rows.values()))))
    known = {json.dumps(point.overrides, sort_keys=True): point.folder for point in read_manifest(folder)}
    return {run: known[json.dumps(s.overrides, sort_keys=True)] for run, s in zip(rows, settings, strict=True)}


# --- what it came to --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A method at its strengths S, its seeds averaged: ``kl`` (S,) rising, and ``values[quantity]`` (S, P)."""

    kl: Tensor
    values: dict[str, Tensor]

    @classmethod
    def of(cls, kl: Tensor, values: Mapping[str, Tensor]) -> Curve:
        order = kl.argsort()
        return cls(kl[order], {quantity: each[order] for quantity, each in values.items()})

    def at(self, quantity: str, kls: Tensor) -> Tensor:
        """(G, P) at each KL, by straight lines between the strengths."""
        weights = np.stack([np.interp(kls, self.kl, unit) for unit in np.eye(len(self.kl))], 1)
        return torch.from_numpy(weights) @ self.values[quantity]


def measure(name: str, model: Sampled, reference: Sampled) -> dict[str, Tensor]:
    """(P,) of each quantity, and the KL."""
    ours, theirs = model.rewards[name], reference.rewards[name]
    return {
        "kl": model.kl["k1"].mean(1) if model is not reference else torch.zeros(len(ours), dtype=torch.float64),
        "single": win_rate(ours, theirs, 1),
        "best": win_rate(ours, theirs, OF),
        "worst": win_rate(ours, theirs, OF, worst=True),
        "reward": ours.mean(1),
    }


def of_the_reference(name: str, reference: Sampled) -> Curve:
    """Best-of-N of the reference itself: it wins N/(N+1), as the best of its bests does; rewards without bias."""
    rewards = reference.rewards[name]
    ns = [2**i for i in range(rewards.shape[1].bit_length())]
    won = torch.tensor([n / (n + 1) for n in ns], dtype=torch.float64)[:, None].expand(-1, len(rewards))
    kl = torch.tensor([distance(n) for n in ns], dtype=torch.float64)
    return Curve.of(kl, {"single": won, "best": won, "reward": best_of_n(rewards, ns)})


def curves(measured: Mapping[Run, Mapping[str, Tensor]], start: Mapping[str, Tensor]) -> dict[str, Curve]:
    """Of every method, from the reference on, whose values are ``start``."""
    found = {}
    for method in dict.fromkeys(method for method, _, _ in measured):
        strengths = dict.fromkeys(n for m, n, _ in measured if m == method)
        seeds = {n: [each for (m, k, _), each in measured.items() if (m, k) == (method, n)] for n in strengths}
        rows = [start, *({q: torch.stack([s[q] for s in each]).mean(0) for q in start} for each in seeds.values())]
        values = {quantity: torch.stack([row[quantity] for row in rows]) for quantity in start}
        found[method] = Curve.of(values.pop("kl").mean(1), values)
    return found


def ahead(quantity: str, one: Curve, other: Curve, scale: float) -> str:
    """How much higher the curve of ``one`` is, on average over the KLs that both reach."""
    furthest = float(min(one.kl.max(), other.kl.max()))
    kls = torch.linspace(0, furthest, 101, dtype=torch.float64)
    mean, low, high = bootstrap((scale * (one.at(quantity, kls) - other.at(quantity, kls))).mean(0))
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] over KL 0 to {furthest:.2f}"


def undominated(where: Sequence[tuple[float, float]]) -> list[bool]:
    """Of points (KL, value): whether none is nearer to the reference and better."""
    return [not any(k < kl and v > value for k, v in where) for kl, value in where]


def optimum(quantity: str, furthest: float) -> tuple[Tensor, Tensor] | None:
    """KLs, and the best win rate of all policies there, for rewards without ties (InfAlign, Theorem 3 and Cor. 2)."""
    transform = {"best": f"bon_fp:{OF}", "worst": f"won_fp:{OF}"}.get(quantity)
    if transform is None:
        return None
    curve = at_kl(parse_transform(transform, beta=1.0), np.linspace(0.05, furthest, 12).tolist(), OF)
    return curve.kl, curve.bon_win_rate if quantity == "best" else curve.won_win_rate


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_curves(found: Mapping[str, Curve], bon: Curve, quantities: Sequence[str]) -> Figure:
    """Curves through the means over seeds, with intervals over prompts (InfAlign, Fig. 4)."""
    figure = figures.figure_of((5.0 * len(quantities), 5.2))
    every = figure.subplots(1, len(quantities), squeeze=False)[0]
    furthest = max(float(curve.kl.max()) for curve in found.values())
    for axes, quantity in zip(every, quantities, strict=True):
        scale = 1 if quantity == "reward" else 100
        _draw_bounds(axes, bon, quantity, furthest, scale)
        for i, (method, curve) in enumerate(found.items()):
            mean, low, high = (scale * x.numpy() for x in bootstrap(curve.values[quantity]))
            look = figures.look(i)
            reach = np.stack([mean - low, high - mean]).clip(min=0)
            axes.errorbar(curve.kl, mean, reach, **look.line, marker=look.marker, capsize=2, label=label(method))
        axes.set_title(TITLES[quantity])
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_xlim(-0.03 * furthest, 1.05 * furthest)
    figures.legend(figure, every)
    return figure


def draw_points(measured: Mapping[Run, Mapping[str, Tensor]], bon: Curve, quantities: Sequence[str]) -> Figure:
    """A point a run; pale are those below another one of their method (vBoN, Fig. 2)."""
    figure = figures.figure_of((5.6 * len(quantities), 5.2))
    every = figure.subplots(1, len(quantities), squeeze=False)[0]
    methods = list(dict.fromkeys(method for method, _, _ in measured))
    furthest = max(float(each["kl"].mean()) for each in measured.values())
    for axes, quantity in zip(every, quantities, strict=True):
        scale = 1 if quantity == "reward" else 100
        _draw_bounds(axes, bon, quantity, furthest, scale)
        for i, method in enumerate(methods):
            own = [
                (float(x["kl"].mean()), scale * float(x[quantity].mean()))
                for r, x in measured.items()
                if r[0] == method
            ]
            look = figures.look(i)
            for (x, y), best in zip(own, undominated(own), strict=True):
                axes.plot(x, y, look.marker, color=look.colour, alpha=1.0 if best else 0.3, linewidth=0)
            axes.plot([], [], look.marker, color=look.colour, linewidth=0, label=label(method))
        axes.set_title(TITLES[quantity])
        axes.set_xlabel("KL to the reference (nats)")
        axes.set_xlim(-0.03 * furthest, 1.05 * furthest)
    figures.legend(figure, every)
    return figure


def _draw_bounds(axes: Axes, bon: Curve, quantity: str, furthest: float, scale: float) -> None:
    if quantity in bon.values:
        near = bon.kl <= 1.1 * furthest
        axes.plot(
            bon.kl[near], scale * bon.values[quantity].mean(1)[near], color=figures.GREY, linestyle="--", label=BON
        )
    best = optimum(quantity, furthest)
    if best is not None:
        axes.plot(best[0], scale * best[1], color=figures.GREY, linestyle=":", label="best policy at this KL (theory)")


# --- what holds -------------------------------------------------------------------------------------------------------


def findings(found: Mapping[str, Curve], bon: Curve, measured: Mapping[Run, Mapping[str, Tensor]]) -> list[str]:
    """The papers' claims, each as a difference between two curves, and who is on the fronts."""
    claims = [("best", "exp:10", "identity"), ("worst", "exp:-10", "identity"), ("single", "identity", "grpo")]
    claims += [("single", "vbon", other) for other in found if other not in ("vbon", "exp:-10")]
    lines = []
    for quantity, one, other in claims:
        if {one, other} <= set(found):
            gain = ahead(quantity, found[one], found[other], 100)
            lines.append(f"{TITLES[quantity]}: {label(one)} over {label(other)}: {gain}")
    for method, curve in found.items():
        lines += [
            f"{TITLES[q]}: {BON} over {label(method)}: {ahead(q, bon, curve, s)}"
            for q, s in (("single", 100), ("reward", 1))
        ]
    for quantity in ("single", "reward"):
        where = [(float(x["kl"].mean()), float(x[quantity].mean())) for x in measured.values()]
        on = [method for (method, _, _), best in zip(measured, undominated(where), strict=True) if best]
        shares = ", ".join(f"{label(m)} {100 * on.count(m) / len(on):.0f}%" for m in found if m in on)
        lines.append(f"{TITLES[quantity]}: of the {len(on)} points on the front: {shares}")
    return lines


def table(measured: Mapping[Run, Mapping[str, Tensor]]) -> list[dict[str, object]]:
    """A row a run: means over prompts, with their intervals."""
    rows = []
    for (method, n, seed), each in measured.items():
        estimates = {quantity: _numbers(bootstrap(values)) for quantity, values in each.items()}
        rows.append({"method": method, "n": n, "seed": seed} | estimates)
    return rows


def _numbers(estimate: Sequence[Tensor]) -> list[float | None]:
    """Mean, low and high; one prompt has no interval."""
    return [None if x.isnan() else x.item() for x in estimate]


# --- the command ------------------------------------------------------------------------------------------------------


def nlgrpo(arguments: Sequence[str], ranks: int, log: Path) -> None:
    """Run a command whose ranks share nothing but the work; what it prints is kept. Exits as it does where it fails."""
    print(f"nlgrpo {arguments[0]}: {log}", flush=True)
    with log.open("w") as file:
        status = subprocess.run(sweep.command(arguments, ranks), stdout=file, check=False).returncode
    if status:
        sys.exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="a recipe or a TOML file with one reward")
    parser.add_argument("--out", type=Path, default=Path("runs/tradeoff"), help="folder of all that is made")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help="also ipo, and transforms such as log or bon_fp:4:0.1"
    )
    parser.add_argument("--ns", nargs="+", type=int, default=[2, 4, 16], help="N of each strength")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--references", type=int, default=256, help="samples of the reference for each prompt")
    parser.add_argument("--completions", type=int, default=32, help="of each prompt in the evaluation")
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
        rewards = reference_rollouts.load(rollouts).rewards[name]
        rows = points(given.methods, given.ns, given.seeds, start, rewards)
        status = sweep.run(start, list(rows.values()), runs, jobs=given.jobs)
        if any(point.state != "done" for point in read_manifest(runs)):
            return status or 1
        where = folders(start, rows, runs)
    except ValueError as error:
        parser.error(str(error))
    named = [f"{method} N={n} seed={seed}".replace("=", " ") + f"={path}" for (method, n, seed), path in where.items()]
    asked = [f"--samples={given.completions}", f"--ns=1,{OF}", f"--out={results}"]
    nlgrpo(["evaluate", *named, *asked], given.jobs, given.out / "evaluate.log")
    reference, *models = read_evaluation(results).values()
    base = measure(name, reference, reference)
    measured = {run: measure(name, model, reference) for run, model in zip(where, models, strict=True)}
    found, bon = curves(measured, base), of_the_reference(name, reference)
    pictures = {
        "win_rates.png": functools.partial(draw_curves, found, bon, ["single", "best", "worst"]),
        "fronts.png": functools.partial(draw_points, measured, bon, ["single", "reward"]),
    }
    for file, draw in pictures.items():
        atomic_write_bytes(given.out / file, figures.render(draw))
    lines = findings(found, bon, measured)
    atomic_write(
        given.out / "tradeoff.json", json.dumps({"points": table(measured), "findings": lines}, indent=1) + "\n"
    )
    print(*lines, *(given.out / file for file in pictures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
