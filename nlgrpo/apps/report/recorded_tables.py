"""Results of the other commands that train or search: the tables that they print at their end, from their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from nlgrpo.apps.report import configurations, page, result_tables
from nlgrpo.apps.report.page import Cell, Section

# files of a run that trains a model with one output, in place of evaluation.json
REWARD_MODEL = "reward_model.json"
VALUE = "value.json"
# files of searches
LOOP = "iro.json"
COMPARISON = "decode.json"

DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def is_search(folder: Path) -> bool:
    """Whether ``folder`` was written by `nlgrpo iro` or `nlgrpo decode`."""
    return (folder / "iteration-1").is_dir() or any((folder / name).is_file() for name in (LOOP, COMPARISON))


def command_of(folder: Path) -> str:
    """Return the command that writes such a run: "train", or one whose results are not in evaluation.json."""
    if (folder / REWARD_MODEL).is_file():
        return "reward-model train"
    if not (folder / VALUE).is_file():
        return "train"
    compressed = configurations.section(configurations.read(folder, []), "compress").get("values")
    return "value compress" if compressed else "value train"


def evaluates_itself(folder: Path) -> bool:
    """Whether ``folder`` is a run of `nlgrpo reward-model train` or `nlgrpo value`, which has no evaluation.json."""
    return command_of(folder) != "train"


def is_finished(folder: Path) -> bool:
    """Whether such a run has been evaluated after training."""
    for name in (REWARD_MODEL, VALUE):
        if (folder / name).is_file():
            try:
                return "after" in json.loads((folder / name).read_text("utf-8"))
            except DAMAGED:
                return False
    return False


def sections(folder: Path, notes: list[str], label: str = "") -> Iterator[Section]:
    """Yield the tables of a folder, with ``label`` in their headings; adds what cannot be read to ``notes``."""
    for name, (headings, tables_of) in READERS.items():
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text("utf-8"))
            tables = tables_of(content)
            found = [_section(f"{label} {heading}".strip(), t) for heading, t in zip(headings, tables, strict=False)]
        except DAMAGED as error:
            notes.append(f"{path} cannot be read ({type(error).__name__}: {error}).")
            continue
        finished = isinstance(content, dict) and "after" in content  # empty without held-out examples
        if not found and not finished:
            notes.append(f"{path} has no results of the end yet.")
        yield from found


def _reward_model(content: dict[str, Any]) -> list[Table]:
    return [result_tables.held_out_table(content["before"], content["after"])] if content.get("after") else []


def _value(content: dict[str, Any]) -> list[Table]:
    return [result_tables.value_table(content["before"], content["after"])] if content.get("after") else []


def _loop(content: list[dict[str, Any]]) -> list[Table]:
    return [result_tables.iterations_table(content)] if content else []


def _comparison(content: list[dict[str, Any]]) -> list[Table]:
    return list(result_tables.methods_tables(content)) if content else []


# file: (headings of its tables, what makes them)
READERS: dict[str, tuple[tuple[str, ...], Callable[[Any], list[Table]]]] = {
    REWARD_MODEL: (("Held-out pairs",), _reward_model),
    VALUE: (("Held-out values",), _value),
    LOOP: (("Iterations",), _loop),
    COMPARISON: (("Methods", "Cost of methods"), _comparison),
}


def _section(heading: str, table: Table) -> Section:
    """Convert a table of the terminal; its title and caption are below it."""
    columns = []
    for column in table.columns:
        numeric = column.justify == "right"
        columns.append([Cell(str(cell), number=numeric) for cell in column.cells])
    heads = [str(column.header) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    below = [str(text) for text in (table.title, table.caption) if text]
    about = ". ".join(text[:1].upper() + text[1:] for text in below)
    return Section(heading, "table.html", page.Table(heads, rows, kind="wraps"), f"{about}.")
