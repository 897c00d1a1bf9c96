"""Reward and cost of value-guided decoding over budgets on one recipe (IRO, Figs. 3, 5, 6 and 11).

    python -m experiments.guided_stories.guided_budgets experiments/configs/guided.toml [--out runs/guided] [--chunk 8]
        [--budgets 4 8 16 32 64] [--methods bon iro:1 iro:2 iro:3 compressed cd args args:64]
        [--choose reward value] [--seeds 0 1 2] [--jobs 2] [--learn="--prompts 320 --value.lr 1e-3"]
        [--decode="--tuned runs/dpo ..."] [--gold NAME] [-- --evaluation.prompts 32 ...]

For each seed, `nlgrpo iro` learns values with the options of ``--learn``, and `nlgrpo decode` compares the methods on
the held-out prompts, once for each rule that chooses the answer (``--choose``). Then latency is measured by answering a
few prompts one at a time. ``--gold`` names a reward of weight 0 that evaluates the answers too. The script draws all
this and prints which method leads and by how much. Arguments after ``--`` are passed to every command. Finished work is
reused, and stopped work resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import quick
from nlgrpo.apps.guided import decode
from nlgrpo.apps.report import figures
from nlgrpo.apps.sweep import launchers
from nlgrpo.estimators import bootstrap
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

METHODS = ["bon", "iro:1", "iro:2", "iro:3", "compressed", "cd", "args"]
LABELS = {"bon": "best-of-N", "compressed": "IRO, compressed", "cd": "one beam, first value", "args": "ARGS",
          "implicit": "search, implicit reward", "weak_to_strong": "weak-to-strong search",
          "bon-i": "best-of-N, implicit reward"}  # fmt: skip
OTHERS = ("args", "cards", "implicit", "weak_to_strong", "bon-i")
LATENCY_BUDGET = 16
Key = tuple[str, int]  # method, budget


def label(method: str) -> str:
    named = method.replace("iro:", "IRO, iteration ").replace("args:", "ARGS, weight ").replace("cards:", "CARDS, ")
    return LABELS.get(method, named)


# --- commands ---------------------------------------------------------------------------------------------------------


def nlgrpo(arguments: Sequence[str], log: Path, threads: int) -> None:
    """Run a command and append its output to ``log``. Raises RuntimeError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"nlgrpo {arguments[0]}: {log}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with log.open("a") as file:
        done = subprocess.run(launchers.command(arguments, 1), stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise RuntimeError(f"nlgrpo {arguments[0]} ended with status {done.returncode}; see {log}")


def learn_and_decode(given: argparse.Namespace, more: Sequence[str], seed: int) -> list[dict[Key, dict[str, Any]]]:
    """Learn values and decode with one seed; the results for each of ``given.choose``."""
    folder, threads = given.out / f"seed-{seed}", max(1, torch.get_num_threads() // given.jobs)
    same = [given.recipe, f"--train.seed={seed}", f"--chunk={given.chunk}", *more]
    nlgrpo(["iro", *same, f"--out={folder / 'iro'}", *shlex.split(given.learn)], folder / "iro.log", threads)
    compared = ["--methods", *given.methods, "--budgets", *map(str, given.budgets), f"--guide={folder / 'iro'}"]
    for choose in given.choose:
        own = [f"--choose={choose}", f"--out={folder / choose}", *([f"--gold={given.gold}"] if given.gold else [])]
        own += shlex.split(given.decode)
        nlgrpo(["decode", *same, *compared, *own], folder / f"{choose}.log", threads)
    return [results(folder / choose) for choose in given.choose]


def measure_latency(given: argparse.Namespace, more: Sequence[str]) -> list[dict[Key, dict[str, Any]]]:
    """Decode prompt by prompt with best-of-N and the methods that learned values; the results of each round."""
    folder, methods = given.out / "latency", [m for m in given.methods if not m.startswith(("cd", *OTHERS))]
    alone = ["--rollout.max_rows=1", f"--evaluation.prompts={given.latency_prompts}"]
    compared = ["--methods", *methods, "--budgets", str(LATENCY_BUDGET), f"--chunk={given.chunk}", *alone]
    guide = f"--guide={given.out / f'seed-{given.seeds[0]}' / 'iro'}"
    rounds = [folder / f"round-{i}" for i in range(given.latency_rounds)]
    for own in rounds:
        out = [guide, f"--out={own}"]
        nlgrpo(["decode", given.recipe, *more, *out, *compared], folder / "decode.log", torch.get_num_threads())
    return [results(own) for own in rounds]


def results(folder: Path) -> dict[Key, dict[str, Any]]:
    return {(row["method"], row["budget"]): row for row in json.loads((folder / decode.RESULTS).read_text("utf-8"))}


# --- results ----------------------------------------------------------------------------------------------------------


class Found:
    """Rewards of every method and budget, (S seeds, P prompts). Raises RuntimeError if prompts differ between seeds."""

    def __init__(self, seeds: Sequence[Mapping[Key, Mapping[str, Any]]]) -> None:
        self.seeds = seeds
        if len({tuple(row["prompts"]) for own in seeds for row in own.values()}) > 1:
            raise RuntimeError(
                "the seeds have answered different prompts, or in another order; use another --out folder"
            )
        self.methods = list(dict.fromkeys(method for method, _ in seeds[0]))
        self.budgets = list(dict.fromkeys(budget for _, budget in seeds[0]))

    def by_gold(self) -> Found:
        """Return the same with the gold reward in place of the rewards."""
        return Found(
            [{key: {**row, "rewards": row["gold"]["rewards"]} for key, row in own.items()} for own in self.seeds]
        )

    def rewards(self, method: str, budget: int) -> Tensor:
        return torch.tensor([own[method, budget]["rewards"] for own in self.seeds], dtype=torch.float64)

    def mean(self, method: str, budget: int) -> tuple[float, float, float]:
        """Mean over seeds and prompts, with its interval over prompts."""
        mean, low, high = bootstrap(self.rewards(method, budget).mean(0))
        return float(mean), float(low), float(high)

    def lead(self, one: str, other: str, budget: int) -> tuple[float, float, float]:
        """Mean lead of ``one`` over ``other`` at the budget, paired over prompts, with its interval."""
        mean, low, high = bootstrap((self.rewards(one, budget) - self.rewards(other, budget)).mean(0))
        return float(mean), float(low), float(high)

    def cost(self, method: str, budget: int, what: str) -> float:
        """Mean cost per prompt, over seeds."""
        rows = [own[method, budget] for own in self.seeds]
        return sum(row[what] / len(row["rewards"]) for row in rows) / len(rows)


def table(found: Found) -> list[str]:
    """Markdown table with a row per method and a column per budget."""
    lines = [f"| method | {' | '.join(f'N = {n}' for n in found.budgets)} |", "|---" * (1 + len(found.budgets)) + "|"]
    for method in found.methods:
        cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*found.mean(method, n)) for n in found.budgets]
        lines.append(f"| {label(method)} | {' | '.join(cells)} |")
    return lines


def costs(found: Found, budget: int) -> list[str]:
    lines = [f"per prompt at N = {budget}: sampled tokens, value queries, reward queries"]
    for method in found.methods:
        each = [found.cost(method, budget, what) for what in ("tokens", "queries", "reward_queries")]
        lines.append(f"  {label(method)}: {', '.join(f'{count:,.0f}' for count in each)}")
    return lines


def findings(found: Found) -> list[str]:
    """The paper's claims as differences with intervals, and the differences of each seed."""
    last = max(
        (m for m in found.methods if m.startswith("iro")), key=lambda m: int(m.partition(":")[2] or 10**9), default=None
    )
    pairs = [(last, "bon"), (last, "iro:1"), ("compressed", last), ("compressed", "bon"), (last, "cd")]
    pairs += [(last, method) for method in found.methods if method.startswith(OTHERS)]
    lines = []
    for one, other in pairs:
        if one is None or other is None or one == other or not {one, other} <= set(found.methods):
            continue
        for n in found.budgets:
            gaps = (found.rewards(one, n) - found.rewards(other, n)).mean(1).tolist()
            lead = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found.lead(one, other, n))
            each = ", ".join(f"{gap:+.4f}" for gap in gaps)
            lines.append(f"N = {n}: {label(one)} over {label(other)}: {lead} (seeds {each})")
    return lines


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_budgets(found: Found, ylabel: str) -> Figure:
    """Reward, and lead over best-of-N, against the budget (IRO, Fig. 6)."""
    figure = figures.figure_of((10.4, 5.2))
    panels = list(figure.subplots(1, 2))
    for i, method in enumerate(found.methods):
        look = figures.series_style(i)
        style = {**look.line, "marker": look.marker, "capsize": 2, "label": label(method)}
        shift = [n * 1.015 ** (i - len(found.methods) / 2) for n in found.budgets]  # intervals side by side
        for axes, points in (
            (panels[0], [found.mean(method, n) for n in found.budgets]),
            (panels[1], [found.lead(method, "bon", n) for n in found.budgets] if method != "bon" else []),
        ):
            if points:
                reach = [[max(0.0, mean - low) for mean, low, _ in points], [max(0.0, h - m) for m, _, h in points]]
                axes.errorbar(shift, [mean for mean, _, _ in points], reach, **style)
    for axes, title in zip(panels, (ylabel, "Lead over best-of-N at the same N"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(found.budgets, [str(n) for n in found.budgets])
        axes.set_xlabel("N = K B candidates")
        axes.set_title(title)
    panels[1].axhline(0, color=figures.GREY, linestyle="--")
    figures.legend(figure, panels)
    return figure


def milliseconds(rounds: Sequence[Mapping[Key, Mapping[str, Any]]], key: Key) -> tuple[float, float, float]:
    """Milliseconds per prompt: median, smallest and largest of the rounds."""
    times = [1000 * rows[key]["seconds"] / len(rows[key]["rewards"]) for rows in rounds]
    return statistics.median(times), min(times), max(times)


def draw_latency(rounds: Sequence[Mapping[Key, Mapping[str, Any]]]) -> Figure:
    """Time per prompt, one at a time; memory of value models and caches (IRO, Fig. 5)."""
    figure, rows = figures.figure_of((9.0, 3.6)), rounds[0]
    names = [label(method) for method, _ in rows]
    seconds, memory = figure.subplots(1, 2, sharey=True)
    colours = [figures.series_style(i).colour for i in range(len(names))]
    times = [milliseconds(rounds, key) for key in rows]
    reach = [[middle - least for middle, least, _ in times], [most - middle for middle, _, most in times]]
    seconds.barh(names, [middle for middle, _, _ in times], xerr=reach, capsize=2, color=colours)
    seconds.set_title("Milliseconds per prompt, one at a time")
    seconds.set_xlabel(f"median and range of {len(rounds)} rounds")
    parts = (("value_bytes", 1.0, "value models"), ("cache_bytes", 0.5, "caches, at most"))
    left = [0.0] * len(names)
    for what, alpha, name in parts:
        sizes = [row[what] / 2**20 for row in rows.values()]
        memory.barh(names, sizes, left=left, color=colours, alpha=alpha, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory.set_title("MiB: value models, caches (pale)")
    seconds.invert_yaxis()
    return figure


def latency_lines(rounds: Sequence[Mapping[Key, Mapping[str, Any]]]) -> list[str]:
    lines = [
        f"one prompt at a time, N = {LATENCY_BUDGET}: milliseconds (median of {len(rounds)} rounds, range), "
        "MiB of value models and of caches"
    ]
    for key, row in rounds[0].items():
        time = "{:.0f} ({:.0f} to {:.0f})".format(*milliseconds(rounds, key))
        held = f"{row['value_bytes'] / 2**20:.2f} + {row['cache_bytes'] / 2**20:.2f}"
        lines.append(f"  {label(key[0])}: {time}, {held}")
    return lines


# --- the command ------------------------------------------------------------------------------------------------------


QUICK = [
    "one.toml", "--methods", "bon", "iro:1", "compressed", "cd", "args:8", "--budgets", "2", "4", "--seeds", "3",
    "--chunk", "2", "--choose", "reward", "value", "--latency-prompts", "2", "--latency-rounds", "2",
    "--learn=--iterations 1 --samples 4 --beams 2 --successors 2 --value.held-out 1",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file")
    parser.add_argument("--out", type=Path, default=Path("runs/guided"), help="output folder")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods of nlgrpo decode; bon is required")
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--chunk", type=int, default=8, help="L, tokens per chunk")
    rules = ["reward", "value", "majority"]
    parser.add_argument("--choose", nargs="+", default=rules[:1], choices=rules, help="rules that choose the answer")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learn", default="", help="options of nlgrpo iro")
    parser.add_argument("--decode", default="", help="options of nlgrpo decode, such as --tuned")
    parser.add_argument("--gold", default="", help="reward of weight 0 that evaluates the answers too")
    parser.add_argument("--jobs", type=int, default=1, help="seeds to run in parallel")
    parser.add_argument("--latency-prompts", type=int, default=30)
    parser.add_argument("--latency-rounds", type=int, default=5, help="repetitions of the latency measurement")
    parser.add_argument("--reward", default="Reward", help="name of the reward in the figures")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    if "bon" not in given.methods:
        parser.error("--methods: bon is missing; the other methods are compared with it")
    if given.latency_rounds < 0:
        parser.error(f"--latency-rounds {given.latency_rounds}: expected 0 (no measurement) or more")
    try:
        with ThreadPoolExecutor(given.jobs) as pool:
            of_seeds = list(pool.map(lambda seed: learn_and_decode(given, more, seed), given.seeds))
        found = {choose: Found(seeds) for choose, seeds in zip(given.choose, zip(*of_seeds, strict=True), strict=True)}
        latency = measure_latency(given, more)
    except RuntimeError as error:
        parser.error(str(error))
    lines: list[str] = []
    pictures: dict[str, partial[Figure]] = {"latency.png": partial(draw_latency, latency)} if latency else {}
    for choose, each in found.items():
        cost = [line for budget in each.budgets for line in costs(each, budget)]
        lines += [f"chosen by {choose}", *table(each), *cost, *findings(each), ""]
        pictures[f"budgets-{choose}.png"] = partial(draw_budgets, each, f"{given.reward}, chosen by {choose}")
        if given.gold:
            gold, title = each.by_gold(), f"{given.gold} (gold), chosen by {choose}"
            lines += [f"evaluated by {given.gold}, chosen by {choose}", *table(gold), *findings(gold), ""]
            pictures[f"budgets-{choose}-gold.png"] = partial(draw_budgets, gold, title)
    lines += latency_lines(latency) if latency else []
    atomic_write(given.out / "findings.txt", "\n".join(lines) + "\n")
    for file, draw in pictures.items():
        atomic_write_bytes(given.out / file, figures.render(draw))
    print(*lines, *(given.out / file for file in pictures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
