"""What commands print: tables of names and texts, sizes, and how a command is started again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

ENDS = 80  # letters of a text that are shown at each end


def named_lines(title: str, rows: Mapping[str, str]) -> Table:
    """Build a table with one row per name. Texts are printed literally: brackets are not markup."""
    table = Table(box=SIMPLE_HEAD, show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table


def first_tokens(name: str, ids: Sequence[int] | None, tokenizer: Any) -> dict[str, str]:
    """Return a row that shows a prompt as the model reads it: the ends of its text, and of its token ids."""
    if not ids:
        return {}
    text = repr(tokenizer.decode(list(ids)))
    numbers = list(map(str, ids))
    shown = text if len(text) <= 2 * ENDS else f"{text[:ENDS]} ... {text[-ENDS:]}"
    listed = numbers if len(numbers) <= 16 else [*numbers[:8], "...", *numbers[-8:]]
    return {name: f"{shown}\n{len(ids)} token{'s' * (len(ids) > 1)}: {' '.join(listed)}"}


def can_be_live(console: Console) -> bool:
    """Whether lines of the console can change: it is a terminal, and not the output of a notebook.

    A notebook gives a command a terminal, or FORCE_COLOR, for which rich takes any output for a terminal.
    """
    redirected = console.file in (sys.stdout, sys.stderr) and not console.file.isatty()
    in_notebook = "JPY_PARENT_PID" in os.environ
    return console.is_terminal and not console.is_dumb_terminal and not redirected and not in_notebook


def size(number: float) -> str:
    """Format a number of bytes, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit in ("B", "KiB") else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def how_to_resume() -> str:
    """Return what to do to continue a command that was stopped: ``"resume with: nlgrpo train my.toml"``.

    A launcher such as torchrun knows its own arguments only, so its command is not named.
    """
    program, *arguments = sys.argv
    if os.path.basename(program) != "nlgrpo" or "RANK" in os.environ:
        return "run the same command again to resume"
    try:
        found = shutil.which("nlgrpo")
        if found is not None and os.path.samefile(found, program):
            program = "nlgrpo"
        elif os.path.isabs(program):
            beside = os.path.relpath(program)
            program = program if beside.startswith("..") else beside
    except OSError:  # the program or the working directory is gone
        return "run the same command again to resume"
    return f"resume with: {shlex.join([program, *arguments])}"
