"""What the templates of a page show, and the templates' environment.

All HTML, CSS and JavaScript is in the folder `templates`; Python fills the classes below with plain values. The page is
one file: a template puts its style sheets and its scripts inside, and its content security policy allows these scripts
alone, by their hashes. What scripts show is in the page as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from nlgrpo.apps.report.figures import Style


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    under: str = ""
    """Text beside the first one; on a narrow screen it is below."""
    sort: str | None = None
    """What the column is sorted and filtered by. None: the text."""
    number: bool = False
    """Whether the column is sorted by numbers."""
    style: Style | None = None
    """Line and marker of a model, drawn before the text."""


def number(value: float, shown: str, under: str = "") -> Cell:
    """Return a cell that sorts by ``value``, NaN last."""
    return Cell(shown, under, sort="" if math.isnan(value) else repr(value), number=True)


@dataclass(frozen=True)
class Table:
    """A scrollable table. ``kind`` "sorts": by a click on a heading; "wraps": onto the lines of a narrow screen."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kind: str
    filters: Sequence[str] = ()
    """Columns with a selection box."""

    @property
    def numeric(self) -> set[int]:
        """Indices of the columns with numbers."""
        return {i for row in self.rows for i, cell in enumerate(row) if cell.number}


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading. ``template``: the file that shows ``content``; ``about``: a line below it."""

    title: str
    template: str
    content: Any
    about: str = ""

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() and c.isascii() else "-" for c in self.title.lower())


def environment() -> Environment:
    """Return the environment of the templates. Values are escaped, and a name that is not given is an error.

    Templates have two functions: ``source(file)`` is the text of a style sheet or a script in their folder, and
    ``sha256(file)`` its hash as a content security policy has it.
    """
    created = Environment(
        loader=PackageLoader("nlgrpo.apps.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def source(file: str) -> str:
        assert created.loader is not None
        text, _, _ = created.loader.get_source(created, file)
        return text

    def sha256(file: str) -> str:
        return base64.b64encode(hashlib.sha256(source(file).encode()).digest()).decode()

    created.globals.update(source=source, sha256=sha256)
    created.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}
    return created


def render(template: str, **values: Any) -> str:
    """Return the page that a template makes of ``values``."""
    return environment().get_template(template).render(values)
