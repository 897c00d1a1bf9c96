"""The command ``nlgrpo curves``: win rates that training on a transformed reward reaches, without a model.

    nlgrpo curves --n 4 --transforms identity,log,exp:10,bon_fp
    nlgrpo curves --procedures bop:4,distortion:0,1,2 --transforms identity,fp:bop:4,fp:distortion:0,1,2
    nlgrpo curves --suggest 4 --kl 1

Win rates against the reference at given KLs or betas, as a table, curves.json, curves.csv and a picture. With
``--suggest``, the best t of "exp:t" for a number of samples and a KL.
"""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo import __version__
from nlgrpo.apps.curves import calibration_figures
from nlgrpo.apps.curves.options import read_options
from nlgrpo.apps.report import figures
from nlgrpo.calibration.alignment import EXPONENTS, Curve, Transform, alignment_curve, at_kl, parse_transform, suggest
from nlgrpo.calibration.transforms import Log
from nlgrpo.errors import UserError, as_user_error
from nlgrpo.objectives.registry import Objective, parse
from nlgrpo.runtime import user_code
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

COLUMNS = ("beta", "kl", "win_rate", "bon_win_rate", "won_win_rate")
POINTS = 48  # points per curve
NEAR = 1e-3  # smallest KL of a curve
NUMBER = r"\s*[-+]?\d*\.?\d+\.?(?:e[-+]?\d+)?\s*(?::|,|$)"  # an entry of a distortion's table, after its comma
REFERENCE = (2, 4, 8)  # m of best-of-m of the reference, drawn next to the curves


def main(arguments: Sequence[str]) -> int:
    """Print the table and write the files, or print a suggestion. Raises UserError for invalid options."""
    options = read_options(arguments)
    start = time.perf_counter()
    console = Console()
    if options.suggest is not None:
        _suggest(options.suggest, options.kl, options.worst, console)
        return 0
    transforms = _transforms(options.transforms, options.n)
    procedures = _procedures(options.procedures)
    kls = _numbers("--kls", options.kls)
    betas = _numbers("--betas", options.betas)
    if not (kls or betas):
        raise UserError("--kls is empty; use for example --kls 0.5,1,2, or --betas")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write into {options.out}: {error.strerror}; choose another folder with --out"
        ) from None
    table = {}
    for name, transform in transforms.items():
        with as_user_error():
            if betas:
                table[name] = alignment_curve(transform, betas, options.n, procedures)
            else:
                table[name] = at_kl(transform, kls, options.n, procedures)
    console.print(_table(table, options.n, "beta" if betas else "kl"))
    lines = table
    if not betas:
        lines = {name: _line(transforms[name], max(kls), options.n, procedures) for name in transforms}
    _write(options.out, table, lines, transforms, procedures)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    residuals = []
    for name, curve in table.items():
        residuals += [residual for residual in _residuals(transforms[name], curve) if residual is not None]
    if residuals:
        say(f"fixed points: residual of Theorem 1 at most {max(residuals):.0e}")
    say(f"curves.json, curves.csv and curves.png in {options.out}, {time.perf_counter() - start:.0f} s")
    return 0


def _transforms(text: str, n: int) -> dict[str, Transform]:
    names = _parts(text)
    if not names:
        raise UserError("--transforms is empty; use for example --transforms identity,log,exp:10,bon_fp")
    with as_user_error():
        return {name: parse_transform(name, n=n, function=user_code.function) for name in names}


def _procedures(text: str) -> list[Objective]:
    with as_user_error():
        return [parse(name, user_code.function) for name in _parts(text)]


def _parts(text: str) -> list[str]:
    """Split at commas, except those in the table of a distortion: "distortion:0,1,2"."""
    return [part.strip() for part in re.split(f",(?!{NUMBER})", text) if part.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise UserError(f"{option} {text!r}: expected numbers separated by commas, such as {option} 0.5,1,2") from None


def _line(transform: Transform, furthest: float, n: int, procedures: Sequence[Objective]) -> Curve:
    """Compute the curve from the reference (win rate 1/2) to the KL ``furthest``, at geometrically spaced betas."""
    begin, end = at_kl(transform, [min(NEAR, furthest / 2), furthest], n).beta.tolist()
    return alignment_curve(transform, np.geomspace(begin, end, POINTS).tolist(), n, procedures)


def _columns(curve: Curve) -> dict[str, list[float]]:
    """Return the columns of a curve by name; those of further procedures follow the usual ones."""
    own = {name: getattr(curve, name).tolist() for name in COLUMNS}
    return own | {name: rates.tolist() for name, rates in curve.procedures.items()}


def _residuals(transform: Transform, curve: Curve) -> list[float | None]:
    """Return the residual of each point of a fixed point, None for other transforms."""
    return [transform.at(beta).residual for beta in curve.beta.tolist()]


def _table(found: Mapping[str, Curve], n: int, by: str) -> Table:
    """Build a table with a section per KL (or beta) and a row per transform; the largest win rates are bold."""
    other = "kl" if by == "beta" else "beta"
    shown = {"beta": "beta", "kl": "KL"}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in (shown[by], "transform", shown[other]):
        table.add_column(title, justify="left" if title == "transform" else "right", overflow="fold", min_width=6)
    columns = {name: _columns(curve) for name, curve in found.items()}
    first = next(iter(columns.values()))
    rates = [name for name in first if name not in ("beta", "kl")]
    for title in ("one sample", f"best of {n}", f"worst of {n}", *rates[3:]):
        table.add_column(Text(title), justify="right", overflow="fold", min_width=6)
    for i in range(len(first[by])):
        best = {rate: max(each[rate][i] for each in columns.values()) for rate in rates}
        for name, each in columns.items():
            row = [Text(f"{each[by][i]:.4g}" if each is first else ""), Text(name), Text(f"{each[other][i]:.4g}")]
            for rate in rates:
                largest = each[rate][i] >= best[rate] - 1e-9
                row.append(Text(f"{each[rate][i]:.4f}", style="bold" if largest else ""))
            table.add_row(*row)
        table.add_section()
    return table


def _write(
    folder: Path,
    table: Mapping[str, Curve],
    lines: Mapping[str, Curve],
    transforms: Mapping[str, Transform],
    procedures: Sequence[Objective],
) -> None:
    n = next(iter(table.values())).n
    points = _points(lines, transforms)
    record = {"nlgrpo": __version__, "n": n, "table": _points(table, transforms), "curves": points}
    atomic_write(folder / "curves.json", json.dumps(record, indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(points[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    atomic_write(folder / "curves.csv", text.getvalue())
    reference = alignment_curve(Log(), [1 / (m - 1) for m in REFERENCE], n, procedures)
    picture = figures.render(partial(calibration_figures.alignment, lines, reference))
    atomic_write_bytes(folder / "curves.png", picture)


def _points(curves: Mapping[str, Curve], transforms: Mapping[str, Transform]) -> list[dict[str, Any]]:
    """Return one JSON object for each point of each curve."""
    points: list[dict[str, Any]] = []
    for name, curve in curves.items():
        columns = _columns(curve)
        for i, residual in enumerate(_residuals(transforms[name], curve)):
            values = {column: of_curve[i] for column, of_curve in columns.items()}
            points.append({"transform": name, **values, "residual": residual})
    return points


def _suggest(n: int, kl: float, worst: bool, console: Console) -> None:
    """Print the best t and its win rate, next to the usual transforms and the fixed point, which is optimal."""
    with as_user_error():
        t = float(f"{suggest(n, kl, worst=worst):.3g}")
    kind = "worst" if worst else "best"
    ceiling = "won_fp" if worst else "bon_fp"
    names = [f"exp:{t:g}", f"exp:{-10 if worst else 10}", "identity", "log", ceiling]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("transform", "beta", f"{kind} of {n} wins"):
        table.add_column(title, justify="left" if title == "transform" else "right")
    for name in dict.fromkeys(names):
        curve = at_kl(name, [kl], n)
        won = float(curve.won_win_rate if worst else curve.bon_win_rate)
        style = "bold" if name == names[0] else ""
        table.add_row(Text(name, style=style), f"{float(curve.beta):.4g}", f"{won:.4f}")
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    say(f"For {kind}-of-{n} at KL = {kl:g}: {names[0]}")
    console.print(table)
    if abs(t) > 0.99 * EXPONENTS[1]:
        say(f"Larger t are not searched; {ceiling} has no such limit.")
