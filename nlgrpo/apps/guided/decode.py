"""The command ``nlgrpo decode``: compare decoding methods for a frozen model at equal budgets.

    nlgrpo decode my.toml --guide runs/iro --methods bon cd args iro:1 iro --budgets 4 16 64 --out runs/decode

A budget is N = K B, the candidates per prompt at any time: at every position a method samples at most N tokens. For
every method, the rewards (or the values, or the majority of answers) choose among its final candidates. P prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from nlgrpo.apps.guided.decoding import RESULTS, Comparison, build_comparison, results, run
from nlgrpo.apps.guided.options import ComparisonOptions, read_decode
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import Config
from nlgrpo.engine import transformers_backend
from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.console import how_to_resume, named_lines
from nlgrpo.runtime.supervision import process_group
from nlgrpo.runtime.supervision.stop_signal import StopSignal
from nlgrpo.runtime.work_queue import WorkQueue

LARGEST = 1 << 20  # candidates of a prompt


# --- arguments ------------------------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str]) -> tuple[ComparisonOptions, Config]:
    """Parse the command line. Raises UserError for options that cannot be run."""
    options, rest = read_decode(arguments)
    cfg, _ = from_arguments(rest)
    validate.refuse(
        [
            "" if options.methods else "--methods: name at least one",
            "" if options.budgets else "--budgets: name at least one",
            *(f"--budgets {n}: allowed is 1 to {LARGEST:,}" for n in options.budgets if not 1 <= n <= LARGEST),
            "" if options.chunk is None or options.chunk >= 1 else f"--chunk {options.chunk}: allowed is >= 1",
        ]
    )
    validate.check_config(cfg)
    return options, cfg


# --- plan and tables --------------------------------------------------------------------------------------------------


def tables(found: Sequence[dict[str, Any]]) -> tuple[Table, Table]:
    """Build the tables of the rewards and of the costs."""
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


def plan(c: Comparison) -> Table:
    """Build the table that describes the comparison."""
    sampling = c.sampler.sampling
    longest = c.sampler.sampling.max_new_tokens
    weighted = " + ".join(f"{c.cfg.rewards[s.name].weight:g} {s.name}" for s in c.scorers)
    whole = (c.options.chunk or 0) >= longest
    rows = {
        "model": f"{c.cfg.model.path}, frozen, computes in {str(c.dtype).removeprefix('torch.')}"
        f"{transformers_backend.note(c.source)}",
        "prompts": f"{len(c.batch.ids):,} that runs {'hold out' if c.held_out else 'TRAIN ON (none are held out)'}"
        + f" ({c.left_out:,} left out: repeats, or used to learn the values)" * (c.left_out > 0)
        + "".join(f"; {count:,} {reason}" for reason, count in c.dropped.items())
        + f"; responses of up to {longest} tokens at temperature {sampling.temperature:g}",
        "methods": f"{', '.join(c.options.methods)} x N = {', '.join(map(str, c.options.budgets))}; chunks of "
        f"{c.options.chunk} tokens" + "; a chunk is a whole response, so no value guides" * whole,
        "values": ", ".join(map(c.describe_value, range(len(c.paths)))) or "none",
        "chosen by": {"value": "the values of each method", "majority": "the majority of final answers"}.get(
            c.options.choose, weighted
        ),
        "folder": str(c.folder),
    }
    extra = {"evaluated by": c.gold.name if c.gold else "", "implicit": " minus ".join(c.pair or ())}
    return named_lines("decode", rows | {name: text for name, text in extra.items() if text})


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Return exit status 0 when done, or saved after a signal. Raises UserError for user errors."""
    options, cfg = read_arguments(arguments)
    disable_progress_bar()  # of transformers, for every reward model
    with StopSignal() as stop, process_group.start(cfg.limits()) as ranks:
        comparison = build_comparison(options, cfg, WorkQueue(ranks, Console(quiet=not ranks.first), stop))
        say = comparison.queue.console.print
        say(plan(comparison))
        if options.dry_run:
            return 0
        if not run(comparison):
            say(f"stopped and saved; {how_to_resume()}", highlight=False, soft_wrap=True)
        elif ranks.first:
            found = results(comparison)
            atomic_files.atomic_write(comparison.folder / RESULTS, json.dumps(found, indent=1, allow_nan=False) + "\n")
            for shown in tables(found):
                say(shown)
            say(f"results {comparison.folder / RESULTS}", highlight=False, soft_wrap=True)
    return 0
