"""The command ``nlgrpo decode``: compare decoding methods for a frozen model at equal budgets.

    nlgrpo decode my.toml --guide runs/iro --methods bon cd args iro:1 iro --budgets 4 16 64 --out runs/decode

A budget is N = K B, the candidates per prompt at any time: at every position a method samples at most N tokens. For
every method, the rewards (or the values, or the majority of answers) choose among its final candidates. P prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from nlgrpo.apps.guided.decoding import RESULTS, Comparison, build_comparison, results, run
from nlgrpo.apps.guided.options import ComparisonOptions, read_decode
from nlgrpo.apps.report import result_tables
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


# --- plan -------------------------------------------------------------------------------------------------------------


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
            for shown in result_tables.methods_tables(found):
                say(shown)
            say(f"results {comparison.folder / RESULTS}", highlight=False, soft_wrap=True)
    return 0
