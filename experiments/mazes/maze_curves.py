"""pass@k of checkpoints over training: curves, and methods compared at equal pass@1 and at equal KL.

    nlgrpo evaluate "GRPO/1/50=runs/mazes/grpo/seed=1/checkpoints/step-00000050" .. --n 64 --out runs/mazes/curves
    python -m experiments.mazes.maze_curves runs/mazes/curves --out runs/mazes/record --kl 0.2

The labels of the models are METHOD/SEED/STEP; the reference is step 0 of all of them. Writes ``curves.json`` (successes
and KL of each method, seed, step and maze), ``curves.md`` and, if there are several steps, ``curves.png``. Methods are
compared with GRPO where it has the pass@1, or the KL, that they have at their end, and where both have the values of
``--pass1`` and ``--kl`` for the first time. A curve between two checkpoints is interpolated linearly. Intervals are
over mazes and seeds (`two_way_interval`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.mazes.maze_record import BASE, GRPO, STYLES, Method, cell, table
from nlgrpo.apps.report import figures
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

KS = (1, 8, 64)
COLOURS = {"mean": "#E69F00", "MaxRL": "#009E73", "bon:8": "#56B4E9"}


@dataclass
class Curve:
    """One method: successes and KL by step, each by seed."""

    solved: dict[int, Method] = field(default_factory=dict)
    kl: dict[int, dict[int, list[float]]] = field(default_factory=dict)  # per maze, mean over samples, nats per answer

    @property
    def steps(self) -> list[int]:
        return sorted(self.solved)

    def passes(self) -> Tensor:
        """pass@k of each step, k, seed and maze, (steps, len(KS), S, P)."""
        return torch.stack([self.solved[step].passes(KS) for step in self.steps])

    def divergence(self) -> Tensor:
        """KL of each step, seed and maze, (steps, S, P); empty if it was not measured."""
        if not all(self.kl.values()):
            return torch.zeros(0)
        rows = []
        for step in self.steps:
            of_step = self.kl[step]
            rows.append([of_step[seed] for seed in sorted(of_step)])
        return torch.tensor(rows)


def read(folder: Path) -> dict[str, Curve]:
    """Read an evaluation. Raises ValueError for labels of another form, and for a method with other seeds at a step."""
    curves: dict[str, Curve] = {}
    evaluated = read_evaluation(folder)
    base = evaluated.pop("reference")
    for label, sampled in evaluated.items():
        method, *rest = label.rsplit("/", 2)
        if len(rest) != 2 or not all(part.isdigit() for part in rest):
            raise ValueError(f"the label {label!r} is not METHOD/SEED/STEP")
        seed, step = map(int, rest)
        curve = curves.setdefault(method, Curve())
        for number, of_step in ((0, base), (step, sampled)):
            _add(curve, number, seed, of_step)
    for method, curve in curves.items():
        if len({tuple(sorted(one.counts)) for one in curve.solved.values()}) > 1:
            raise ValueError(f"{method} has other seeds at some steps than at others")
    return curves


def _add(curve: Curve, step: int, seed: int, sampled: EvaluationSamples) -> None:
    (rewards,) = sampled.rewards.values()
    method = curve.solved.setdefault(step, Method(rewards.shape[1]))
    method.counts[seed] = [int(count) for count in rewards.sum(1)]
    of_step = curve.kl.setdefault(step, {})
    if "k1" in sampled.kl or step == 0:
        zero = torch.zeros(len(rewards), 1)
        of_step[seed] = sampled.kl.get("k1", zero).double().mean(1).tolist()


def over_training(curves: dict[str, Curve]) -> str:
    """Table of pass@k and KL of each method by step, means over seeds and mazes."""
    rows = []
    for method, curve in curves.items():
        passes, kl = curve.passes().mean((2, 3)), curve.divergence()
        for i, step in enumerate(curve.steps):
            measured = [f"{kl[i].mean():.3f}"] if kl.numel() else ["-"]
            rows.append([method, str(step), *(f"{value:.3f}" for value in passes[i].tolist()), *measured])
    return table(["", "step", *(f"pass@{k}" for k in KS), "KL"], rows)


def at_the_end(curves: dict[str, Curve]) -> str:
    """Table of pass@k of the untrained model and of the last step of each method, with intervals."""
    some = next(iter(curves.values())).solved[0]
    first = min(some.counts)
    base = Method(some.samples, {first: some.counts[first]})
    last = {BASE: base} | {method: curve.solved[curve.steps[-1]] for method, curve in curves.items()}
    rows = [[name, *(cell(values, ".3f") for values in method.passes(KS))] for name, method in last.items()]
    return table(["", *(f"pass@{k}" for k in KS)], rows)


def at(curve: Curve, along: Tensor, target: float) -> Tensor | None:
    """pass@k (len(KS), S, P) where the mean of ``along`` (steps, S, P) first reaches ``target``; None if never.

    Linear between the two checkpoints around it.
    """
    means = along.mean((1, 2)).tolist()
    passes = curve.passes()
    for i in range(1, len(means)):
        if means[i] >= target > means[i - 1]:
            share = (target - means[i - 1]) / (means[i] - means[i - 1])
            return (1 - share) * passes[i - 1] + share * passes[i]
    return None


def equal(curves: dict[str, Curve], what: str, targets: Sequence[float]) -> str:
    """Table of each method less GRPO, where both have the same pass@1 or KL."""
    rows = []
    of = {name: curve.passes()[:, 0] if what == "pass@1" else curve.divergence() for name, curve in curves.items()}
    for target in targets:
        base = at(curves[GRPO], of[GRPO], target)
        for name, curve in curves.items():
            if name == GRPO or base is None or not of[name].numel():
                continue
            found = at(curve, of[name], target)
            cells = ["not reached"] * len(KS) if found is None else [cell(x, "+.3f") for x in found - base]
            rows.append([f"{target:g}", f"{name} - {GRPO}", *cells])
    return table([what, "", *(f"pass@{k}" for k in KS)], rows)


def ends(curves: dict[str, Curve], what: str) -> str:
    """Table of each method at its last step less GRPO, where GRPO has the same pass@1 or KL."""
    rows = []
    of = {name: curve.passes()[:, 0] if what == "pass@1" else curve.divergence() for name, curve in curves.items()}
    for name, curve in curves.items():
        if name == GRPO or not of[name].numel():
            continue
        target = float(of[name][-1].mean())
        base = at(curves[GRPO], of[GRPO], target)
        cells = ["not reached"] * len(KS) if base is None else [cell(x, "+.3f") for x in curve.passes()[-1] - base]
        rows.append([f"{target:.3f}", f"{name} at its end - {GRPO}", *cells])
    return table([what, "", *(f"pass@{k}" for k in KS)], rows)


def draw(curves: dict[str, Curve]) -> Figure:
    """pass@64 over pass@1 (left) and over the KL (right), a point per checkpoint."""
    figure = figures.figure_of((9.0, 4.0))
    panels = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        look = STYLES.get(name) or figures.Style(COLOURS.get(name, "#CC79A7"), "^")
        passes, kl = curve.passes().mean((2, 3)), curve.divergence()
        panels[0].plot(passes[:, 0], passes[:, -1], **look.line, marker=look.marker, markersize=5, label=name)
        if kl.numel():
            panels[1].plot(kl.mean((1, 2)), passes[:, -1], **look.line, marker=look.marker, markersize=5, label=name)
    panels[0].set_xlabel("pass@1")
    panels[1].set_xlabel("KL to the untrained model (nats per answer)")
    panels[0].set_ylabel(f"pass@{KS[-1]}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(curves))
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evaluation", type=Path, help="folder of nlgrpo evaluate")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--name", default="curves", help="name of the files; default curves")
    parser.add_argument("--pass1", type=float, nargs="*", default=[], help="values of pass@1 to compare at")
    parser.add_argument("--kl", type=float, nargs="*", default=[], help="values of the KL to compare at")
    args = parser.parse_args(argv)
    try:
        curves = read(args.evaluation)
    except (ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    parts = [at_the_end(curves)]
    several = any(len(curve.steps) > 2 for curve in curves.values())
    if several:
        parts.append(over_training(curves))
    if several and GRPO in curves:
        parts.append(ends(curves, "pass@1"))
        if args.pass1:
            parts.append(equal(curves, "pass@1", args.pass1))
        if curves[GRPO].divergence().numel():
            parts.append(ends(curves, "KL"))
            if args.kl:
                parts.append(equal(curves, "KL", args.kl))
    args.out.mkdir(parents=True, exist_ok=True)
    saved = {
        name: {
            "samples": curve.solved[0].samples,
            "counts": {s: m.counts for s, m in curve.solved.items()},
            "kl": curve.kl,
        }
        for name, curve in curves.items()
    }
    atomic_write(args.out / f"{args.name}.json", json.dumps(saved) + "\n")
    text = "\n\n".join(parts) + "\n"
    atomic_write(args.out / f"{args.name}.md", text)
    if several:
        atomic_write_bytes(args.out / f"{args.name}.png", figures.render(lambda: draw(curves)))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
