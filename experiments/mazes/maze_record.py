"""The record on mazes: pass@k of sweeps over seeds, with intervals over mazes and seeds, paired differences, a figure.

    python -m experiments.mazes.maze_record runs/mazes/main runs/mazes/grpo --out runs/mazes/record
    python -m experiments.mazes.maze_record experiments/mazes/results/counts.json
        --out experiments/mazes/results --figure experiments/mazes/maze.png

Reads the evaluations of the runs of `nlgrpo sweep`, or a ``counts.json`` that it has written. Writes ``counts.json``
(successes of each method, seed and maze, from which everything else follows), ``tables.md`` and ``pass_at_k.png``.
With ``--recorded FILE``, also the figures of GRPO that `nlgrpo train maze` shows beside its own. pass@k is the unbiased
estimate. An interval is that of `two_way_interval`, and for a single seed the bootstrap over mazes.
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

from nlgrpo.apps.evaluate import named_models
from nlgrpo.apps.report import figures
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.estimators import bootstrap, pass_at_k, two_way_interval
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

BASE, GRPO, OURS = "untrained", "GRPO", "bon:8:unbiased"
KS = (1, 8, 64, 256)
DRAWN = (BASE, GRPO, OURS)
LABELS = {BASE: "before training", GRPO: "trained by GRPO", OURS: "trained for best-of-8 (nlgrpo)"}
# Settings that a run must share with the recorded ones for their figures to be shown beside its own.
SAME = {"model.path": "maze-lm", "data.evaluation": "maze-test", "evaluation.prompts": 128, "rollout.temperature": 1.0}
STYLES = {BASE: figures.Style(), GRPO: figures.Style("#D55E00", "s"), OURS: figures.Style("#0072B2", "o")}


@dataclass
class Method:
    """Successes of one method by seed: ``counts[seed]`` (P,) of ``samples`` samples of each maze."""

    samples: int
    counts: dict[int, list[int]] = field(default_factory=dict)

    def correct(self) -> Tensor:
        """Right answers first, (S, P, n) of 0 and 1, with the seeds in ascending order."""
        counts = torch.tensor([self.counts[seed] for seed in sorted(self.counts)])
        return (torch.arange(self.samples) < counts[..., None]).double()

    def passes(self, ks: Sequence[int]) -> Tensor:
        """pass@k of each seed and maze, (len(ks), S, P)."""
        correct = self.correct()
        return torch.stack([pass_at_k(of_seed, list(ks)) for of_seed in correct], dim=1)


def name_of(config: dict, reward: str) -> str:
    """Name of a run's method: its objective, with GRPO for the mean divided by the group's standard deviation."""
    objective = config["rewards"][reward]["objective"]
    if objective == "mean" and config["loss"]["scale"] == "group":
        return GRPO
    return "MaxRL" if objective.endswith(":maxrl") else objective


def read(folders: Sequence[str]) -> dict[str, Method]:
    """Read the runs of sweeps. Raises ValueError for a run without an evaluation, and for one that comes twice."""
    found: dict[str, Method] = {}
    for file in (name for name in folders if name.endswith(".json")):
        for name, saved in json.loads(Path(file).read_text("utf-8")).items():
            counts = {int(seed): of_seed for seed, of_seed in saved["counts"].items()}
            found.setdefault(name, Method(saved["samples"])).counts |= counts
    for model in named_models.read_named_models([name for name in folders if not name.endswith(".json")]):
        run = model.run
        if run is None:
            raise ValueError(f"{model.path} is not a finished run")
        config = json.loads((run / "config.json").read_text("utf-8"))
        (reward,) = config["rewards"]
        seed = config["train"]["seed"]
        evaluated = read_evaluation(run)
        for label, when in ((BASE, "before"), (name_of(config, reward), "after")):
            if when not in evaluated:
                raise ValueError(f"{run} has no evaluation {when} training")
            rewards = evaluated[when].rewards[reward]
            method = found.setdefault(label, Method(rewards.shape[1]))
            if seed in method.counts and label != BASE:
                raise ValueError(f"two runs of {label} have the seed {seed}")
            method.counts[seed] = [int(count) for count in rewards.sum(1)]
    order = [BASE, "mean", GRPO, "bon:8", OURS, "MaxRL"]
    return dict(sorted(found.items(), key=lambda item: (*order, item[0]).index(item[0])))


# --- tables -----------------------------------------------------------------------------------------------------------


def interval(values: Tensor) -> tuple[float, float, float]:
    """Mean and interval of values (S, P)."""
    if len(values) == 1:
        mean, low, high = (float(x) for x in bootstrap(values[0]))
        return mean, low, high
    return two_way_interval(values)[:3]


def cell(values: Tensor, form: str) -> str:
    mean, low, high = interval(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def levels(methods: dict[str, Method], ks: Sequence[int]) -> str:
    """Table of pass@k: the mean with its interval, and in the last column the seeds."""
    rows = []
    for name, method in methods.items():
        rows.append([name, *(cell(values, ".3f") for values in method.passes(ks)), str(len(method.counts))])
    return table(["", *(f"pass@{k}" for k in ks), "seeds"], rows)


def differences(methods: dict[str, Method], ks: Sequence[int]) -> str:
    """Table of paired differences: of each method to the untrained model, and of ours to the others."""
    pairs = [(name, BASE) for name in methods if name != BASE]
    pairs += [(OURS, name) for name in methods if OURS in methods and name not in (BASE, OURS)]
    rows = []
    for one, other in pairs:
        seeds = sorted(methods[one].counts.keys() & methods[other].counts.keys())
        if not seeds:
            continue
        both = (Method(methods[name].samples, {s: methods[name].counts[s] for s in seeds}) for name in (one, other))
        a, b = (method.passes(ks) for method in both)
        rows.append([f"{one} - {other}", *(cell(values, "+.3f") for values in a - b)])
    return table(["", *(f"pass@{k}" for k in ks)], rows)


# --- the figure -------------------------------------------------------------------------------------------------------


def draw(methods: dict[str, Method]) -> Figure:
    """pass@k against k of the untrained model, GRPO and ours, with bands of the intervals over mazes and seeds."""
    figure = figures.figure_of((6.4, 4.2))
    axes = figure.subplots()
    shown = {name: methods[name] for name in DRAWN if name in methods}
    most = min(method.samples for method in shown.values())
    ks = [2**i for i in range(most.bit_length()) if 2**i <= most]
    for name, method in shown.items():
        mean, low, high = zip(*(interval(values) for values in method.passes(ks)), strict=True)
        look = STYLES[name]
        axes.fill_between(ks, low, high, color=look.colour, alpha=0.15, linewidth=0)
        axes.plot(ks, mean, **look.line, marker=look.marker, markersize=5, label=LABELS[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("k (samples per maze)")
    axes.set_ylabel("pass@k on held-out mazes")
    axes.legend(loc="lower right")
    return figure


# --- the figures of GRPO in the package -------------------------------------------------------------------------------


def recorded(method: Method, about: str) -> str:
    """Content of the file that `nlgrpo.training.evaluation_summary` reads. ``about``: how the figures were made."""
    values = [[round(x, 4) for x in interval(of_k)] for of_k in method.passes(KS)]
    content = {
        "label": "GRPO, recorded",
        "about": f"nlgrpo train maze-grpo, {len(method.counts)} seeds, intervals over prompts and seeds; {about}",
        "same": SAME,
        "reward": "maze()",
        "pass_at_k": dict(zip(map(str, KS), values, strict=True)),
    }
    return json.dumps(content, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders of sweeps or runs, and files counts.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of counts.json, tables.md and pass_at_k.png")
    parser.add_argument("--figure", type=Path, help="file of the figure; default OUT/pass_at_k.png")
    parser.add_argument("--recorded", type=Path, help="file of GRPO's figures, nlgrpo/data/assets/maze-grpo.json")
    parser.add_argument("--about", default="experiments/mazes/README.md", help="date and place of the recorded figures")
    args = parser.parse_args(argv)
    try:
        methods = read(args.runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ks = [k for k in KS if k <= min(method.samples for method in methods.values())]
    text = f"{levels(methods, ks)}\n\n{differences(methods, ks)}\n"
    args.out.mkdir(parents=True, exist_ok=True)
    counts = {name: vars(method) for name, method in methods.items()}
    atomic_write(args.out / "counts.json", json.dumps(counts) + "\n")
    atomic_write(args.out / "tables.md", text)
    atomic_write_bytes(args.figure or args.out / "pass_at_k.png", figures.render(lambda: draw(methods)))
    if args.recorded is not None:
        atomic_write(args.recorded, recorded(methods[GRPO], args.about))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
