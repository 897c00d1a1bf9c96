"""Pictures of a run: ``report.html`` with length histogram and curves, and several runs laid over each other.

Everything is made from the files that a run leaves in its folder, so a report can be made again at any time, also of a
run that was killed: what is missing is said in the report and the rest is shown.
"""

from __future__ import annotations

import base64
import html
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo import figures, metrics
from nlgrpo.evaluation import bootstrap
from nlgrpo.sampled import FILE, Sampled, read_evaluation
from nlgrpo.summary import Row, format_change, format_interval, summarize, weighted_best_of_n

CONFIGS = ("config.json", "config.toml")
TARGET = re.compile(r"\blength\([^)]*?\btarget\s*=\s*([0-9.]+)")
NS = (1, 2, 4, 8, 16)


# --- one run ------------------------------------------------------------------------------------------------------


def write_report(run: Path) -> Path:
    """Make ``report.html`` (self-contained), ``lengths.png`` and ``curves.png`` in a run folder; returns the page.

    Reads ``config.json`` or ``config.toml``, ``metrics.jsonl`` and ``evaluation.json``; a part whose file is missing or
    damaged is left out and named in the page. Raises ValueError for a folder that has none of them.
    """
    run = Path(run)
    _check_run(run)
    missing: list[str] = []
    config = _read_config(run, missing)
    logged = metrics.read_jsonl(run / metrics.FILE)
    if not logged:
        missing.append(f"{metrics.FILE} has no steps yet, so there are no curves.")
    sampled = _read_sampled(run, missing)
    pictures = []
    if sampled:
        targets = length_targets(config)
        pictures.append(_picture(run / "lengths.png", "Completion lengths", partial(figures.lengths, sampled, targets)))
    if logged:
        pictures.append(_picture(run / "curves.png", "Training curves", partial(figures.curves, logged)))
    parts = [_missing(missing), _results(sampled), *pictures, _samples(sampled), _settings(config)]
    metrics.atomic_write(run / "report.html", _page(run.resolve().name, len(logged), sampled, parts))
    return run / "report.html"


def _check_run(run: Path) -> None:
    files = (*CONFIGS, metrics.FILE, FILE)
    if not any((run / name).is_file() for name in files):
        what = "has none of " + ", ".join(files) if run.is_dir() else "is not a folder"
        raise ValueError(f"{run} {what}; give the folder that `nlgrpo train` wrote, such as runs/default")


def _read_config(run: Path, missing: list[str]) -> dict[str, Any]:
    for name, load in zip(CONFIGS, (json.loads, tomllib.loads), strict=True):
        if (run / name).is_file():
            try:
                return load((run / name).read_text("utf-8"))
            except ValueError as error:
                missing.append(f"{name} cannot be read ({error}).")
                return {}
    missing.append(f"{' or '.join(CONFIGS)} is missing, so the settings are not shown.")
    return {}


def _read_sampled(run: Path, missing: list[str]) -> dict[str, Sampled]:
    try:
        sampled = read_evaluation(run)
    except ValueError as error:
        missing.append(f"{error}.")
        return {}
    missing += [
        f"The model {when} training is not evaluated yet." for when in ("before", "after") if when not in sampled
    ]
    return sampled


def length_targets(config: Any) -> list[float]:
    """Targets of every ``length(target=..)`` reward that is named anywhere in a config, ascending."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list):
        return sorted({target for item in config for target in length_targets(item)})
    return [float(t) for t in TARGET.findall(config)] if isinstance(config, str) else []


# --- the page -----------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #fff; --line: #d8dee4; --card: #f6f8fa;
  --note: #9a6700 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #161b22; --line: #30363d; --card: #1f252d; --note: #d29922 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
.soft { color: var(--soft); margin: .2rem 0 }
.note { border-left: 4px solid var(--note); padding: .2rem .8rem; margin: 1rem 0 }
.note p { margin: .3rem 0 } .scroll { overflow-x: auto } img { max-width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 } td.n, th.n { text-align: right }
.sample { background: var(--card); border-radius: 8px; padding: .6rem .8rem; margin: .6rem 0; overflow-wrap: anywhere }
.sample p { margin: .2rem 0; white-space: pre-wrap } summary { cursor: pointer; padding: .2rem 0 }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1rem }
.under { color: var(--soft) }
@media (max-width: 600px) { .under { display: block }
  th, td { padding: .3rem .2rem; font-size: .78rem; white-space: normal } }
pre { background: var(--card); border-radius: 8px; padding: .8rem; overflow-x: auto; font-size: .85rem }
"""


def _page(name: str, steps: int, sampled: Mapping[str, Sampled], parts: Sequence[str]) -> str:
    facts = [f"{steps} steps logged"]
    for last in list(sampled.values())[-1:]:
        facts.append("evaluated on {} prompts x {} samples".format(*last.lengths.shape))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{html.escape(name)} · nlgrpo</title><style>{STYLE}</style></head><body>
<h1>{html.escape(name)}</h1><p class="soft">{"; ".join(facts)}</p>
{"".join(parts)}
</body></html>
"""


def _missing(missing: Sequence[str]) -> str:
    return f'<div class="note">{"".join(f"<p>{html.escape(line)}</p>" for line in missing)}</div>' if missing else ""


def _results(sampled: Mapping[str, Sampled]) -> str:
    """Table of every reward's mean and best-of-4 (fewer where there are fewer samples), with 95% intervals."""
    if not sampled:
        return ""
    n = min(s.lengths.shape[1] for s in sampled.values())
    summaries = {when: summarize(s, sorted({1, min(4, n)})) for when, s in sampled.items()}
    some = next(iter(sampled.values()))
    rows = []
    for columns in zip(*summaries.values(), strict=True):
        name = columns[0].reward
        cells = [f"<td>{_stacked(name, some.objectives.get(name, ''))}", f"<td>{columns[0].procedure}"]
        cells += [f'<td class="n">{_stacked(*format_interval(row, gap="|").split("|"))}' for row in columns]
        if len(columns) == 2:
            cells.append(f'<td class="n">{format_change(*columns)}')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = [*summaries, *(["change"] if len(summaries) == 2 else [])]
    head = "<th>reward<th>procedure" + "".join(f'<th class="n">{text}' for text in heads)
    return (
        f'<h2>Result</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        '<p class="soft">In brackets: 95% intervals, bootstrap over prompts.</p>'
    )


def _stacked(first: str, second: str = "") -> str:
    """Two texts side by side, one under the other on a narrow screen."""
    return f'{html.escape(first)} <span class="under">{html.escape(second)}</span>'


def _picture(path: Path, title: str, draw: Callable[..., Figure]) -> str:
    """Save the light, wide picture at ``path`` and embed it with its variants for dark mode and for a narrow screen."""
    light = figures.render(draw)
    path.write_bytes(light)
    sources = "".join(
        f'<source media="{query}" srcset="{_data_url(figures.render(partial(draw, narrow=narrow), dark=dark))}">'
        for query, narrow, dark in (
            ("(max-width: 600px) and (prefers-color-scheme: dark)", True, True),
            ("(max-width: 600px)", True, False),
            ("(prefers-color-scheme: dark)", False, True),
        )
    )
    return f'<h2>{title}</h2><picture>{sources}<img alt="{title}" src="{_data_url(light)}"></picture>'


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _samples(sampled: Mapping[str, Sampled]) -> str:
    """The completions that were kept, reference and trained model side by side, with lengths and rewards."""
    shown = {when: s for when, s in sampled.items() if s.prompts and s.completions}
    if not shown:
        return ""
    page = "<h2>Samples</h2>"
    for i, prompt in enumerate(next(iter(shown.values())).prompts):
        columns = "".join(_column(when, s, i) for when, s in shown.items() if i < len(s.completions))
        page += f"<details{'' if i else ' open'}><summary>{html.escape(prompt)}</summary>"
        page += f'<div class="pair">{columns}</div></details>'
    return page


def _column(when: str, sampled: Sampled, prompt: int) -> str:
    page = f'<div><p class="soft">{html.escape(when)} training</p>'
    for j, completion in enumerate(sampled.completions[prompt][:4]):
        scores = [f"{sampled.lengths[prompt, j]} tokens"]
        scores += [f"{name} {values[prompt, j]:.3f}" for name, values in sampled.rewards.items()]
        page += f'<div class="sample"><p>{html.escape(completion)}</p>'
        page += f'<p class="soft">{html.escape(" · ".join(scores))}</p></div>'
    return page + "</div>"


def _settings(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    return f"<h2>Settings</h2><details><summary>config</summary><pre>{html.escape(text)}</pre></details>"


# --- several runs -------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Lay runs over each other in one picture and print their values; returns the file written (PNG, PDF or SVG).

    Left, length histograms of the reference (of the first run) and of each trained model (IAMA, Fig. 3a); right, the
    weighted sum of best-of-N rewards against N with 95% intervals. ``out`` may be a folder, for ``compare.png`` in it.

    Raises ValueError for a folder that is no run or has no finished evaluation, and where rewards or weights differ.
    """
    out = Path(out) / "compare.png" if Path(out).is_dir() or not Path(out).suffix else Path(out)
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"cannot draw into {out}: the name must end in .png, .pdf or .svg")
    if not runs:
        raise ValueError("no run to compare; give one or more folders that `nlgrpo train` wrote")
    evaluated = {Path(run): _evaluated(Path(run)) for run in runs}
    models = _comparable(evaluated)
    targets = sorted({t for run in evaluated for t in length_targets(_read_config(run, []))})
    n = min(s.lengths.shape[1] for s in models.values())
    ns = [best_of for best_of in NS if best_of <= n]
    values = {label: bootstrap(weighted_best_of_n(s, ns)) for label, s in models.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(figures.render(partial(figures.comparison, models, values, ns, targets), form=out.suffix[1:]))
    Console().print(_compare_table(values, ns))
    return out


def _evaluated(run: Path) -> dict[str, Sampled]:
    _check_run(run)
    sampled = read_evaluation(run)
    if set(sampled) < {"before", "after"}:
        raise ValueError(
            f"{run} is evaluated only {', '.join(sampled) or 'never'}; finish it with the command that began it"
        )
    return sampled


def _comparable(evaluated: Mapping[Path, Mapping[str, Sampled]]) -> dict[str, Sampled]:
    """Models by the label of the legend, the reference first; runs of the same objective are told apart by folder."""
    first_run, first = next(iter(evaluated.items()))
    models = {"reference": first["before"]}
    labels = [figures.objective_label(sampled["after"]) for sampled in evaluated.values()]
    for (run, sampled), label in zip(evaluated.items(), labels, strict=True):
        after = sampled["after"]
        if after.weights != first["after"].weights:
            raise ValueError(
                f"{run} has rewards {after.weights}, {first_run} has {first['after'].weights}; "
                "only runs with the same rewards and weights can be compared"
            )
        models[label if labels.count(label) == 1 else f"{label} · {run.resolve().name}"] = after
    return models


def _compare_table(values: Mapping[str, Sequence[Any]], ns: Sequence[int]) -> Table:
    """A column a model, or for more than three trained ones a line each, so that 80 columns are enough."""
    table = Table(title="weighted sum of best-of-N rewards, 95% intervals", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("N", justify="right")
    many = len(values) > 4
    for label in ("model", "value") if many else values:
        table.add_column(Text(label))
    for i, best_of in enumerate(ns):
        rows = [Row(label, "", *(x[i].item() for x in columns)) for label, columns in values.items()]
        if many:
            for row in rows:
                table.add_row(str(best_of), Text(row.reward), Text(format_interval(row)))
            table.add_section()
        else:
            table.add_row(str(best_of), *(Text(format_interval(row, "\n")) for row in rows))
    return table
