"""Hook of mkdocs: links from pages to ``experiments/``, which is not part of the site, and the order of search results.

A link to a record becomes one to its row of the page "Results", and a picture the copy that
``scripts/reference_pages.py`` makes. In the repository both are ordinary relative links.
"""

from __future__ import annotations

import re
from typing import Any

TABLE = re.compile(r"\]\((?:\.\./)+experiments/README\.md(#[\w-]+)?\)")
RECORD = re.compile(r"\]\((?:\.\./)+experiments/(\w+)/README\.md(?:#[\w-]+)?\)")
PICTURE = re.compile(r"\]\((?:\.\./)+experiments/(\w+/[\w.-]+\.png)\)")

# Guides come before internals. Names are those of folders, or of pages at the top.
BOOST = {
    "get-started.md": 4.0,
    "guides": 3.0,
    "concepts": 2.0,
    "reference": 0.5,
    "architecture": 0.3,
    "architecture.md": 0.3,
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with links that hold on the site, and set its weight in search."""
    place = page.file.src_uri
    boost = BOOST.get(place.split("/")[0], 1.0)
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    top = "../" * place.count("/")
    markdown = TABLE.sub(rf"]({top}results.md\1)", markdown)
    markdown = RECORD.sub(rf"]({top}results.md#\1)", markdown)
    return PICTURE.sub(rf"]({top}pictures/\1)", markdown)
