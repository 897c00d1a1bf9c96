"""Building blocks of a self-contained HTML page: style, a script that sorts and filters tables, sections and tables.

All text is escaped here with `html.escape`. The page's content security policy allows no requests and only this script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nlgrpo.apps.report.figures import Picture, Style

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #fff; --line: #d8dee4; --card: #f6f8fa;
  --note: #9a6700; --link: #0969da }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #161b22; --line: #30363d; --card: #1f252d; --note: #d29922;
    --link: #58a6ff } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
a { color: var(--link) } nav { margin: .6rem 0; line-height: 1.9 } nav a { margin-right: 1rem; white-space: nowrap }
.soft { color: var(--soft); margin: .2rem 0 }
.note { border-left: 4px solid var(--note); padding: .2rem .8rem; margin: 1rem 0; overflow-wrap: anywhere }
.note p { margin: .3rem 0 } img { max-width: 100%; height: auto; display: block }
.scroll { overflow: auto; max-height: 80vh; max-width: 100%; position: relative }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 } td.n, th.n { text-align: right } td svg { vertical-align: middle }
.sorts { font-size: .84rem } .sorts th, .sorts td { padding: .3rem .45rem }
thead th { position: sticky; top: 0; background: var(--paper); z-index: 1 }
th button { all: unset; cursor: pointer; color: inherit; font: inherit }
th button::after { content: " \\2195"; color: var(--line) }
th[aria-sort] button { color: var(--ink) } th[aria-sort] button::after { color: inherit }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
th button:focus-visible, summary:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.filter { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .5rem 0; font-size: .92rem; color: var(--soft) }
.filter select { font: inherit; max-width: 14rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: .15rem .3rem }
.sample { background: var(--card); border-radius: 8px; padding: .6rem .8rem; margin: .6rem 0; overflow-wrap: anywhere }
.sample p { margin: .2rem 0; white-space: pre-wrap }
summary { cursor: pointer; padding: .2rem 0; overflow-wrap: anywhere }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); gap: 0 1rem }
.under { color: var(--soft) }
@media (max-width: 600px) { .under { display: block } body { padding: 1rem .8rem 2rem }
  th, td { padding: .3rem .35rem; font-size: .78rem } .wraps th, .wraps td { white-space: normal; padding: .3rem .2rem }
  .sorts .under { display: inline } }
pre { background: var(--card); border-radius: 8px; padding: .8rem; overflow-x: auto; font-size: .85rem }
"""

# Without scripts, tables are shown in their original order.
SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  const text = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent;
  const compare = (a, b, numbers) => numbers ? a - b : a.localeCompare(b, "en", { numeric: true });
  const sort = (i) => {
    const down = heads[i].getAttribute("aria-sort") === "ascending";
    const numbers = heads[i].classList.contains("n");
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", down ? "descending" : "ascending");
    const known = rows.filter((row) => text(row, i) !== ""), rest = rows.filter((row) => text(row, i) === "");
    known.sort((a, b) => compare(text(a, i), text(b, i), numbers) * (down ? -1 : 1));
    body.append(...known, ...rest);
  };
  const chosen = new Map();
  const filter = () => {
    for (const row of rows) row.hidden = [...chosen].some(([i, value]) => value !== "" && text(row, i) !== value);
  };
  const bar = document.createElement("div");
  bar.className = "filter";
  heads.forEach((head, i) => {
    const button = document.createElement("button"), name = head.textContent;
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => sort(i));
    head.replaceChildren(button);
    if (!head.hasAttribute("data-filter")) return;
    const label = document.createElement("label"), select = document.createElement("select");
    select.append(new Option("all", ""));
    for (const value of new Set(rows.map((row) => text(row, i)))) if (value !== "") select.append(new Option(value));
    select.addEventListener("change", () => { chosen.set(i, select.value); filter(); });
    label.append(name + " ", select);
    bar.append(label);
  });
  if (bar.childElementCount) table.parentElement.before(bar);
}
"""


def allowed(script: str) -> str:
    """Return the source of a content security policy that allows this inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def page(title: str, facts: Sequence[str], parts: Sequence[str], contents: Sequence[str] = ()) -> str:
    """The complete page. ``contents``: titles of the sections that are linked at its top."""
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed(SCRIPT)}"
    links = "".join(f'<a href="#{_anchor(name)}">{html.escape(name)}</a> ' for name in contents)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)} · nlgrpo</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1><p class="soft">{html.escape("; ".join(facts))}</p>
{f"<nav>{links}</nav>" if links else ""}
{"".join(parts)}
<script>{SCRIPT}</script></body></html>
"""


def section(title: str, *parts: str) -> str:
    """A heading with its content; empty if there is no content."""
    content = "".join(parts)
    return f'<h2 id="{_anchor(title)}">{html.escape(title)}</h2>{content}' if content else ""


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in title.lower())


def notes(lines: Sequence[str]) -> str:
    return f'<div class="note">{"".join(f"<p>{html.escape(line)}</p>" for line in lines)}</div>' if lines else ""


def soft(text: str) -> str:
    return f'<p class="soft">{html.escape(text)}</p>'


def picture(drawn: Picture, title: str) -> str:
    """A picture element that chooses between wide and narrow, light and dark."""
    sources = "".join(
        f'<source media="{query}" srcset="{drawn.url(narrow=narrow, dark=dark)}">'
        for query, narrow, dark in (
            ("(max-width: 600px) and (prefers-color-scheme: dark)", True, True),
            ("(max-width: 600px)", True, False),
            ("(prefers-color-scheme: dark)", False, True),
        )
    )
    image = f'<img alt="{html.escape(title)}" src="{drawn.url(narrow=False, dark=False)}">'
    return f"<picture>{sources}{image}</picture>"


def details(summary: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{html.escape(summary)}</summary>{content}</details>"


def code(content: str) -> str:
    return f"<pre>{html.escape(content)}</pre>"


def sample(completion: str, scores: str) -> str:
    return f'<div class="sample"><p>{html.escape(completion)}</p>{soft(scores)}</div>'


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Content of a table cell as HTML, and its sort key."""

    content: str
    sort: str = ""
    number: bool = False


def text(value: str) -> Cell:
    return Cell(html.escape(value), value)


def number(value: float, shown: str, under: str = "") -> Cell:
    """Cell that sorts by ``value``, NaN last."""
    return Cell(stacked(shown, under) if under else html.escape(shown), "" if math.isnan(value) else repr(value), True)


def stacked(first: str, second: str = "") -> str:
    """Two texts side by side; on a narrow screen the second one is below."""
    return f'{html.escape(first)} <span class="under">{html.escape(second)}</span>'


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, filters: Sequence[str] = (), kind: str = "") -> str:
    """A scrollable table, sortable if ``kind`` is "sorts"; ``filters`` are columns with a selection box."""
    lines = []
    numbers = set[int]()
    for row in rows:
        numbers |= {i for i, cell in enumerate(row) if cell.number}
        lines.append(f"<tr>{''.join(map(_cell, row))}</tr>")
    head = "".join(
        f"<th{' class=n' * (i in numbers)}{' data-filter' * (name in filters)}>{html.escape(name)}"
        for i, name in enumerate(heads)
    )
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="{kind}">{inside}</table></div>'


def _cell(cell: Cell) -> str:
    by = f' data-v="{html.escape(cell.sort)}"' if cell.sort != cell.content else ""
    return f"<td{' class=n' * cell.number}{by}>{cell.content}"


SHAPES = {  # SVG of matplotlib's markers, centred at (18, 7)
    "o": '<circle cx="18" cy="7" r="4"/>',
    "s": '<path d="M14 3h8v8h-8z"/>',
    "D": '<path d="M18 2l5 5-5 5-5-5z"/>',
    "^": '<path d="M18 2l5 9h-10z"/>',
    "v": '<path d="M18 12l5-9h-10z"/>',
    "P": '<path d="M16 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z"/>',
    "h": '<path d="M18 2l4 2.5v5l-4 2.5-4-2.5v-5z"/>',
    "x": '<path d="M14 3l8 8M22 3l-8 8" stroke-width="2"/>',
}


def swatch(series_style: Style) -> str:
    """SVG of the line and the marker of a model in the figures."""
    dash = f' stroke-dasharray="{" ".join(str(2 * d) for d in series_style.dash)}"' if series_style.dash else ""
    return (
        f'<svg width="36" height="14" aria-hidden="true" stroke="{series_style.colour}" fill="{series_style.colour}">'
        f'<path d="M0 7h36" stroke-width="2"{dash}/>{SHAPES[series_style.marker]}</svg> '
    )
