"""Tables of names and texts, in which every command prints its plan."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def named_lines(title: str, rows: Mapping[str, str]) -> Table:
    """Build a table with one row per name. Texts are printed literally: brackets are not markup."""
    table = Table(box=SIMPLE_HEAD, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table
