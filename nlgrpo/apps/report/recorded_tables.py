"""Results of the other commands that train or search: the tables that they print at their end, from their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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


def is_search(folder: Path) -> bool:
    """Whether ``folder`` was written by `nlgrpo iro` or `nlgrpo decode`, which may not have finished."""
    return has_tables(folder) or (folder / "iteration-1").is_dir() or (folder / "ways").is_dir()


def has_tables(folder: Path) -> bool:
    return any((folder / name).is_file() for name in READERS)


def command_of(config: Mapping[str, Any]) -> str:
    """Return the command that trained with ``config``: "train", or one whose results are not in evaluation.json."""
    data = configurations.section(config, "data")
    if "chosen_column" in data:
        return "reward-model train"
    if "rollouts" not in data:
        return "train"
    return "value compress" if configurations.section(config, "compress").get("values") else "value train"


def is_finished(folder: Path) -> bool:
    """Whether a run of another command than `nlgrpo train` was evaluated after training."""
    for name in (REWARD_MODEL, VALUE):
        try:
            if "after" in json.loads((folder / name).read_text("utf-8")):
                return True
        except (OSError, ValueError, TypeError):
            continue
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
        except Exception as error:  # whatever a foreign or damaged file makes of it
            notes.append(f"{path} cannot be read ({type(error).__name__}: {error}).")
            continue
        finished = isinstance(content, dict) and "after" in content  # empty without held-out examples
        if not found and not finished:
            notes.append(f"{path} has no final results yet.")
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
        columns.append([_cell(str(cell), numeric=numeric) for cell in column.cells])
    heads = [str(column.header) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    below = [str(text) for text in (table.title, table.caption) if text]
    about = ". ".join(text[:1].upper() + text[1:] for text in below)
    return Section(heading, "table.html", page.Table(heads, rows, kind="wraps"), f"{about}.")


def _cell(text: str, *, numeric: bool) -> Cell:
    first, *rest = text.split("\n")
    return Cell(first, ", ".join(rest), number=numeric)
