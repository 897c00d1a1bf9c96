"""Vary one setting of `nlgrpo iro` at a time and compare the rewards that its values reach (IRO, H.5).

    python -m experiments.guided_ablations.guided_ablations experiments/configs/guided.toml [--out runs/ablations]
        [--vary kept beta chunk data ...] [--seeds 0 1 2] [--budgets 4 16] [--jobs 2]
        [--learn="--prompts 160 --value.lr 1e-3"] [--value-models ../shared/models/stories260K ...]
        [-- --evaluation.prompts 32 ...]

For each variant and seed, `nlgrpo iro` learns values with the options of ``--learn`` and of the variant, and `nlgrpo
decode` searches with the values of iteration 1, of 1 and 2, .., on the held-out prompts. The tables have the reward,
and the lead over the variant with no option of its own, paired over prompts. A variant of several groups is run once.
Arguments after ``--`` are passed to every command. Finished work is reused, and stopped work resumes.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments import quick
from experiments.guided_stories.guided_budgets import Found, Key, nlgrpo, results
from nlgrpo.apps.guided import value_loop
from nlgrpo.apps.report import figures
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

# Options of the variants of each group; "" are the options of --learn alone.
GROUPS: dict[str, list[str]] = {
    "kept": ["", "--keep best", "--keep best --value.epochs 32", "--keep best --searches 4"],
    "beta": ["", "--betas 1 2 2.5", "--betas 1 0.5 0.5"],
    "chunk": ["", "--chunk 4", "--chunk 16", "--chunk 32"],
    "data": [f"--prompts {count}{chunk}" for chunk in ("", " --chunk 16") for count in (48, 96, 192)],
    "search": ["", "--no-diverse", "--search-temperature 0.1", "--search-temperature 1", "--softmax"],
    "lambda": ["", "--value.lam 0.95", "--value.lam 0", "--value.gamma 0.99"],
    "head": ["", "--value.head-only"],
    "equal": ["", "--value.drop-equal"],
}
VALUE_SIZE = "value-size"  # a group whose variants are --value-models
Rows = Mapping[Key, Mapping[str, Any]]


def variants(given: argparse.Namespace) -> dict[str, list[str]]:
    """Return the variants of each group of ``given.vary``."""
    sizes = ["", *(f"--value.path {path}" for path in given.value_models)]
    return {group: sizes if group == VALUE_SIZE else GROUPS[group] for group in given.vary}


def folder_of(out: Path, options: str) -> Path:
    return out / (re.sub(r"[^A-Za-z0-9.]+", "-", options).strip("-") or "base")


def run(given: argparse.Namespace, more: Sequence[str], options: str, seed: int) -> tuple[Rows, list[dict[str, Any]]]:
    """Learn and decode with a variant and a seed. Returns the results of `nlgrpo decode` and of `nlgrpo iro`."""
    folder, threads = folder_of(given.out, options) / f"seed-{seed}", max(1, torch.get_num_threads() // given.jobs)
    same, loop = [given.recipe, f"--train.seed={seed}", *more], folder / "iro"
    learned = [*shlex.split(given.learn), *shlex.split(options)]  # a later option replaces an earlier one
    nlgrpo(["iro", *same, f"--out={loop}", "--no-compress", *learned], folder / "iro.log", threads)
    found = json.loads((loop / value_loop.RESULTS).read_text("utf-8"))
    methods = [f"iro:{row['iteration']}" for row in found]
    compared = ["--methods", "bon", *methods, "--budgets", *map(str, given.budgets), f"--guide={loop}"]
    nlgrpo(["decode", *same, *compared, f"--out={folder / 'decode'}"], folder / "decode.log", threads)
    return results(folder / "decode"), found


def _cell(number: tuple[float, float, float], form: str = "{:.3f} [{:.3f}, {:.3f}]") -> str:
    return form.format(*number)


def table(given: argparse.Namespace, group: Mapping[str, Found], base: Found | None) -> list[str]:
    """Markdown tables of a group, one per budget: reward with every number of values, and the last one's lead."""
    lines = []
    for budget in given.budgets:
        lines += [f"N = {budget}", "", ""]
        for options, found in group.items():
            methods = found.methods
            if not lines[-1]:
                titles = ["variant", *(m.replace("iro:", "values: ") for m in methods), "last over the base"]
                lines[-1:] = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
            cells = [_cell(found.mean(method, budget)) for method in methods]
            lead = "-" if base is None or found is base else lead_over(found, base, budget)
            lines.append(f"| {options or 'base'} | {' | '.join(cells)} | {lead} |")
        lines.append("")
    return lines


def lead_over(found: Found, base: Found, budget: int) -> str:
    """Lead of a variant's last iteration over the base's last one, with its interval and those of the seeds."""
    gaps = found.rewards(found.methods[-1], budget) - base.rewards(base.methods[-1], budget)
    both = Found([{("gap", budget): {"rewards": own, "prompts": []}} for own in gaps.tolist()])
    each = ", ".join(f"{gap:+.3f}" for gap in gaps.mean(1).tolist())
    return _cell(both.mean("gap", budget), "{:+.3f} [{:+.3f}, {:+.3f}]") + f" (seeds {each})"


def rollouts(loops: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Markdown table of the completions that the values were fitted to, mean over seeds."""
    titles = ["variant", "iteration", "completions", "reward", "distinct prefixes of a prompt (tokens)", "explained"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for options, seeds in loops.items():
        for rows in zip(*seeds, strict=True):
            first, count = rows[0], len(rows)
            reward = sum(row["mean"]["value"] for row in rows) / count
            distinct = ", ".join(
                f"{sum(row['distinct_prefixes'][length] for row in rows) / count:.1f} ({length})"
                for length in first["distinct_prefixes"]
            )
            explained = ", ".join("-" if (x := row["explained_variance"]) is None else f"{x:.2f}" for row in rows)
            counted = f"{first['prompts']} x {first['samples']}"
            lines.append(
                f"| {options or 'base'} | {first['iteration']} | {counted} | {reward:.3f} | {distinct} | {explained} |"
            )
    return lines


def draw(variants: Mapping[str, Found], budgets: Sequence[int]) -> Figure:
    """Reward of each variant with 1, 2, .. values and the interval of the last; the band is best-of-N of the first."""
    figure = figures.figure_of((5.6 * len(budgets), 1.6 + 0.5 * len(variants)))
    panels = list(figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0])
    first = next(iter(variants.values()))
    for axes, budget in zip(panels, budgets, strict=True):
        mean, low, high = first.mean("bon", budget)
        axes.axvspan(low, high, color=figures.GREY, alpha=0.2, linewidth=0)
        axes.axvline(mean, color=figures.GREY, linestyle="--", label="best-of-N")
        for place, found in enumerate(variants.values()):
            for i, method in enumerate(method for method in found.methods if method != "bon"):
                look, (mean, low, high) = figures.series_style(i), found.mean(method, budget)
                last = method == found.methods[-1]
                reach = [[max(0.0, mean - low)], [max(0.0, high - mean)]] if last else None
                y = place + 0.16 * i  # one above the other
                axes.errorbar([mean], [y], xerr=reach, color=look.colour, marker=look.marker, capsize=2)
                axes.plot([], [], look.marker, color=look.colour, label=f"{i + 1} value{'s' * (i > 0)}")
        axes.set_title(f"Reward at N = {budget}")
    panels[0].set_yticks(range(len(variants)), [figures.shortened(options or "base", 34) for options in variants])
    panels[0].invert_yaxis()
    figures.legend(figure, panels)
    return figure


QUICK = [
    "one.toml", "--vary", "head", "--seeds", "3", "--budgets", "4",
    "--learn=--iterations 2 --samples 4 --beams 2 --successors 2 --chunk 2 --value.held-out 1 --value.lr 1e-2",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="recipe or TOML file")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"), help="output folder")
    parser.add_argument("--vary", nargs="+", default=[*GROUPS], choices=[*GROUPS, VALUE_SIZE], help="settings to vary")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16])
    parser.add_argument("--learn", default="", help="options of nlgrpo iro, for all variants")
    parser.add_argument("--value-models", nargs="+", default=[], help=f"initial value models of {VALUE_SIZE}")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, more = parser.parse_args(own), sys.argv[2 + len(own) :]
    if VALUE_SIZE in given.vary and not given.value_models:
        parser.error(f"--vary {VALUE_SIZE}: name the initial value models with --value-models")
    groups = variants(given)
    each = list(dict.fromkeys(options for group in groups.values() for options in group))
    pairs = [(options, seed) for options in each for seed in given.seeds]
    try:
        with ThreadPoolExecutor(given.jobs) as pool:
            done = dict(zip(pairs, pool.map(lambda pair: run(given, more, *pair), pairs), strict=True))
        found = {options: Found([done[options, seed][0] for seed in given.seeds]) for options in each}
    except RuntimeError as error:
        parser.error(str(error))
    lines = []
    for name, group in groups.items():
        lines += [f"## {name}", "", *table(given, {options: found[options] for options in group}, found.get(""))]
        lines += [*rollouts({options: [done[options, seed][1] for seed in given.seeds] for options in group}), ""]
    atomic_write(given.out / "findings.md", "\n".join(lines) + "\n")
    atomic_write_bytes(given.out / "rewards.png", figures.render(functools.partial(draw, found, given.budgets)))
    print(*lines, given.out / "findings.md", given.out / "rewards.png", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(quick.run(main, QUICK))
