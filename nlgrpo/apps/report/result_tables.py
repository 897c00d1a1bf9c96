"""Tables of the results of reward models, value models and searches, for the terminal and for a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def held_out_table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Table of the results of `evaluate_pairs` before and after training."""
    table = Table(title=f"{after['pairs']} held-out pairs (95% intervals)", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("accuracy", lambda e: f"{e['accuracy']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"),
        ("log loss", lambda e: f"{e['log_loss']:.4f}"),
        ("Brier score", lambda e: f"{e['brier']:.4f}"),
        ("calibration error", lambda e: f"{e['ece']:.4f}"),
        ("margin, mean and std", lambda e: f"{e['margin']['mean']:.3f}, {e['margin']['std']:.3f}"),
        ("margin, 5% to 95%", lambda e: "{5%:.3f} to {95%:.3f}".format(**e["margin"]["quantiles"])),
        ("score, mean and std", lambda e: f"{e['reward']['mean']:.3f}, {e['reward']['std']:.3f}"),
    ]
    for name, shown in rows:
        table.add_row(name, shown(before), shown(after))
    return table


def value_table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Table of held-out error and explained variance before and after training, in total and per part."""
    table = Table(title=f"{after['states']:,} held-out prefixes", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("mean squared error", *(f"{x['mse']:.4f}" for x in (before, after)))
    table.add_row("explained variance", *(_share(x["explained_variance"]) for x in (before, after)))
    count = len(after["parts"])
    for i, parts in enumerate(zip(before["parts"], after["parts"], strict=True)):
        span = f"  {100 * i // count}% to {100 * (i + 1) // count}% of the tokens"
        table.add_row(span, *(_share(part["explained_variance"]) for part in parts))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def iterations_table(found: Sequence[dict[str, Any]]) -> Table:
    """Table of the iterations of `nlgrpo iro`: rewards of the completions, and what the values explain."""
    title = "completions of each iteration (± standard error over prompts; distinct prefixes of a prompt at 1/4 and 1)"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in (
        "iteration",
        "completions",
        "mean reward",
        "best per prompt",
        "explained variance",
        "distinct prefixes",
    ):
        shown.add_column(heading, justify="right")
    for row in found:
        numbers = [_shown(row[key], row) for key in ("mean", "best")]
        explained = row["explained_variance"]
        last = "-" if explained is None else f"{explained:.3f}"
        counts = [f"{count:.1f}" for count in row["distinct_prefixes"].values()]
        distinct = f"{counts[0]} to {counts[-1]}"
        shown.add_row(f"{row['iteration']}", f"{row['prompts']} x {row['samples']}", *numbers, last, distinct)
    return shown


def _shown(mean: dict[str, float | None], row: dict[str, Any]) -> str:
    number = "-" if mean["value"] is None else f"{mean['value']:.4f} ± {mean['error']:.4f}"
    every = row["prompts"] * row["samples"]
    if row["scored"] == every:
        return number
    return f"{number}\n{mean['prompts']} of {row['prompts']} prompts\n{row['scored']} of {every} samples"


def methods_tables(found: Sequence[dict[str, Any]]) -> tuple[Table, Table]:
    """Build the tables of `nlgrpo decode`: the rewards, and the costs."""
    prompts = len(found[0]["rewards"])
    gold = found[0].get("gold", {}).get("reward")
    rewards_table, cost = (
        Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
        for title in (f"{prompts} prompts (95% intervals)", "cost per prompt")
    )
    for shown, headings in (
        (
            rewards_table,
            ("method", "N", "reward", "over best-of-N", *((f"gold: {gold}", "over best-of-N") * bool(gold))),
        ),
        (cost, ("method", "N", "tokens", "values", "rewards", "seconds", "MiB")),
    ):
        for heading in headings:
            shown.add_column(heading, justify="left" if heading == "method" else "right")
    cost.caption = "values, rewards: queries; MiB: value models, and the caches of prompts that are searched together"
    rewards_table.caption = _scored(found, prompts)
    for row in found:
        name = (row["method"], str(row["budget"]))
        evaluations = (row, *([row["gold"]] if gold else []))
        cells = [cell for evaluation in evaluations for cell in _intervals(evaluation, prompts)]
        rewards_table.add_row(*name, *cells)
        each = [f"{row[key] / prompts:,.0f}" for key in ("tokens", "queries", "reward_queries")]
        memory = (row["value_bytes"] + row["cache_bytes"]) / 2**20
        cost.add_row(*name, *each, f"{row['seconds'] / prompts:.3f}", f"{memory:.1f}")
    return rewards_table, cost


def _intervals(evaluation: Mapping[str, Any], prompts: int) -> tuple[str, str]:
    """Mean, and difference to best-of-N, with their intervals, and the number of prompts if it is not that of all."""
    shown = []
    for name, form in (("mean", "{:.4f} [{:.4f}, {:.4f}]"), ("over_bon", "{:+.4f} [{:+.4f}, {:+.4f}]")):
        text = form.format(*evaluation[name]) if name in evaluation else "-"
        count = evaluation.get(f"{name}_prompts", prompts)
        shown.append(text + f"\n{count} of {prompts} prompts" * (count < prompts))
    return shown[0], shown[1]


def _scored(found: Sequence[Mapping[str, Any]], prompts: int) -> str | None:
    """Numbers of responses that each of several rewards scored; None if these are all."""
    counts: dict[str, list[int]] = {}
    for row in found:
        for name, places in row.get("unscored", {}).items():
            counts.setdefault(name, []).append(prompts - len(places))
    if len(counts) < 2 or min(map(min, counts.values())) == prompts:
        return None
    each = ", ".join(f"{name} {min(own)} to {max(own)}" for name, own in counts.items())
    return f"responses with a reward, of {prompts}: {each}; the sum is over the rewards that a response has"
