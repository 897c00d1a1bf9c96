"""Results of an evaluation: ``results.json``, and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from nlgrpo import __version__
from nlgrpo.config.schema import Config, to_dict
from nlgrpo.engine.rollouts.evaluation_samples import Coverage, EvaluationSamples
from nlgrpo.runtime.atomic_files import atomic_write
from nlgrpo.training.evaluation_entries import Entry, entries
from nlgrpo.training.evaluation_summary import format_numbers

RESULTS_FILE = "results.json"


def write(
    found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str], cfg: Config, folder: Path
) -> None:
    """Write ``results.json``: all entries, what was evaluated, the configuration and the versions."""
    content = {
        "nlgrpo": __version__,
        "torch": torch.__version__,
        "config": to_dict(cfg),
        "evaluated": next(iter(found.values())).sizes,
        "results": [asdict(entry, dict_factory=Coverage.fields) for entry in entries(found, procedures, gold)],
    }
    atomic_write(folder / RESULTS_FILE, json.dumps(_no_nan(content), indent=1) + "\n")


def _no_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _no_nan(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def tables(found: Mapping[str, EvaluationSamples], procedures: Sequence[str], gold: Sequence[str]) -> Iterator[Table]:
    """Yield one table per quantity: a row per procedure, a column per model, with win rates against the reference."""
    by_quantity: dict[str, list[Entry]] = {}
    others = []
    for entry in entries(found, procedures, gold):
        if entry.procedure:
            by_quantity.setdefault(entry.quantity, []).append(entry)
        else:
            others.append(replace(entry, procedure=entry.quantity))
    size = next(iter(found.values())).size
    for quantity, rows in by_quantity.items():
        yield _table(f"{quantity} ({size})", rows, list(found), "procedure")
    yield _table("KL to the reference, length, diversity", others, list(found), "")


def _table(title: str, rows: Sequence[Entry], models: Sequence[str], heading: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(heading, no_wrap=True)
    for label in models:
        table.add_column(Text(label))
    for procedure in dict.fromkeys(entry.procedure for entry in rows):
        by_model = {entry.model: entry for entry in rows if entry.procedure == procedure}
        table.add_row(procedure, *(Text(_cell(by_model.get(label))) for label in models))
    return table


def _cell(entry: Entry | None) -> str:
    """Value, interval, and what they are over; the win rate with its p-value."""
    if entry is None:
        return "-"
    e = entry.estimate
    won = entry.win_rate
    lines = [format_numbers(e.value, e.low, e.high), *e.coverage.lines]
    if won is not None and not math.isnan(won.value):
        line = f"wins {100 * won.value:.1f}%"
        if entry.p_value < 0.001:
            line += ", p < 0.001"
        elif not math.isnan(entry.p_value):
            line += f", p {entry.p_value:.2g}"
        lines.append(line)
        if won.coverage != e.coverage:
            lines += won.coverage.lines
    return "\n".join(lines)
