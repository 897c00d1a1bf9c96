"""The command ``nlgrpo curves``: win rates that training on a transformed reward reaches, without a model.

    nlgrpo curves --n 4 --transforms identity,log,exp:10,bon_fp
    nlgrpo curves --suggest 4 --kl 1

Win rates against the reference at given KLs or betas, as a table, curves.json, curves.csv and a picture. With
``--suggest``, the best t of "exp:t" for a number of samples and a KL.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo import __version__
from nlgrpo.calibration.alignment import EXPONENTS, Curve, Transform, alignment_curve, at_kl, parse_transform, suggest
from nlgrpo.calibration.transforms import FixedPoint, Log
from nlgrpo.evaluation import calibration_figures, figures
from nlgrpo.runtime import user_code
from nlgrpo.runtime.atomic_files import atomic_write, atomic_write_bytes

COLUMNS = ("beta", "kl", "win_rate", "bon_win_rate", "won_win_rate")
POINTS = 48  # points per curve
NEAR = 1e-3  # smallest KL of a curve
REFERENCE = (2, 4, 8)  # m of best-of-m of the reference, drawn next to the curves


@dataclass
class Curves:
    """Win rate against KL of transforms of a calibrated reward (InfAlign, Theorem 3), for any model and reward."""

    n: int = 4
    """N of best-of-N and worst-of-N, for both the model and the reference."""
    transforms: str = "identity,log,exp:10,exp:-10,bon_fp,won_fp"
    """Separated by commas: identity, log, exp:T, bon_fp (optimal for each beta), bon_fp:N:BETA, won_fp, file.py:f."""
    kls: str = "0.5,1,2,3"
    """KLs of the table, in nats. The curves end at the largest."""
    betas: str = ""
    """Betas of the table and the curves, instead of KLs."""
    suggest: int | None = None
    """Print the best t of exp:t for best-of-N with this N, and write nothing."""
    kl: float = 1.0
    """KL for --suggest."""
    worst: bool = False
    """Suggest for worst-of-N instead of best-of-N."""
    out: Path = Path("runs/curves")
    """Folder of curves.json, curves.csv and curves.png."""


def main(arguments: Sequence[str]) -> int:
    """Print the table and write the files, or print a suggestion. Raises ValueError for invalid options."""
    options, start = tyro.cli(Curves, args=list(arguments), prog="nlgrpo curves"), time.perf_counter()
    console = Console()
    if options.suggest is not None:
        _suggest(options.suggest, options.kl, options.worst, console)
        return 0
    transforms = _transforms(options.transforms, options.n)
    kls, betas = _numbers("--kls", options.kls), _numbers("--betas", options.betas)
    if not (kls or betas):
        raise ValueError("--kls is empty; use for example --kls 0.5,1,2, or --betas")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write into {options.out}: {error.strerror}; choose another folder with --out"
        ) from None
    table = {name: _rows(transform, kls, betas, options.n) for name, transform in transforms.items()}
    console.print(_table(table, options.n, "beta" if betas else "kl"))
    lines = table if betas else {name: _line(transforms[name], max(kls), options.n) for name in transforms}
    _write(options.out, table, lines, transforms)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    residuals = [r for name, curve in table.items() for r in _residuals(transforms[name], curve) if r is not None]
    if residuals:
        say(f"fixed points: residual of Corollary 2 at most {max(residuals):.0e}")
    say(f"curves.json, curves.csv and curves.png in {options.out}, {time.perf_counter() - start:.0f} s")
    return 0


def _transforms(text: str, n: int) -> dict[str, Transform]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ValueError("--transforms is empty; use for example --transforms identity,log,exp:10,bon_fp")
    return {name: parse_transform(name, n=n, function=user_code.function) for name in names}


def _numbers(option: str, text: str) -> list[float]:
    try:
        return sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected numbers separated by commas, such as {option} 0.5,1,2") from None


def _rows(transform: Transform, kls: Sequence[float], betas: Sequence[float], n: int) -> Curve:
    return alignment_curve(transform, betas, n) if betas else at_kl(transform, kls, n)


def _line(transform: Transform, furthest: float, n: int) -> Curve:
    """Compute the curve from the reference (win rate 1/2) to the KL ``furthest``, at geometrically spaced betas."""
    begin, end = at_kl(transform, [min(NEAR, furthest / 2), furthest], n).beta.tolist()
    return alignment_curve(transform, np.geomspace(begin, end, POINTS).tolist(), n)


def _residuals(transform: Transform, curve: Curve) -> list[float | None]:
    """Return the residual of each point of a fixed point, None for other transforms."""
    each = (transform.at(beta) for beta in curve.beta.tolist())
    return [phi.residual if isinstance(phi, FixedPoint) else None for phi in each]


def _table(found: Mapping[str, Curve], n: int, by: str) -> Table:
    """Build a table with a section per KL (or beta) and a row per transform; the largest win rates are bold."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in (by.upper() if by == "kl" else by, "transform", "beta" if by == "kl" else "KL"):
        table.add_column(title, justify="left" if title == "transform" else "right", overflow="fold")
    for title in ("one sample", f"best of {n}", f"worst of {n}"):
        table.add_column(title, justify="right", no_wrap=True)
    other = "beta" if by == "kl" else "kl"
    for i in range(len(next(iter(found.values())).beta)):
        best = {column: max(float(getattr(curve, column)[i]) for curve in found.values()) for column in COLUMNS[2:]}
        for k, (name, curve) in enumerate(found.items()):
            point = {column: float(getattr(curve, column)[i]) for column in COLUMNS}
            won = [Text(f"{point[c]:.4f}", style="bold" if point[c] >= best[c] - 1e-9 else "") for c in COLUMNS[2:]]
            table.add_row("" if k else f"{point[by]:.4g}", Text(name), f"{point[other]:.4g}", *won)
        table.add_section()
    return table


def _write(
    folder: Path, table: Mapping[str, Curve], lines: Mapping[str, Curve], transforms: Mapping[str, Transform]
) -> None:
    n = next(iter(table.values())).n
    points = _points(lines, transforms)
    record = {"nlgrpo": __version__, "n": n, "table": _points(table, transforms), "curves": points}
    atomic_write(folder / "curves.json", json.dumps(record, indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, ("transform", *COLUMNS, "residual"), lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    atomic_write(folder / "curves.csv", text.getvalue())
    reference = alignment_curve(Log(), [1 / (m - 1) for m in REFERENCE], n)
    picture = figures.render(partial(calibration_figures.alignment, lines, reference))
    atomic_write_bytes(folder / "curves.png", picture)


def _points(curves: Mapping[str, Curve], transforms: Mapping[str, Transform]) -> list[dict[str, Any]]:
    """Return one JSON object for each point of each curve."""
    points: list[dict[str, Any]] = []
    for name, curve in curves.items():
        rows = zip(*(getattr(curve, column).tolist() for column in COLUMNS), strict=True)
        residuals = _residuals(transforms[name], curve)
        points += [
            {"transform": name, **dict(zip(COLUMNS, row, strict=True)), "residual": residual}
            for row, residual in zip(rows, residuals, strict=True)
        ]
    return points


def _suggest(n: int, kl: float, worst: bool, console: Console) -> None:
    """Print the best t and its win rate, next to the usual transforms and the fixed point, which is optimal."""
    t = float(f"{suggest(n, kl, worst=worst):.3g}")
    column, ceiling = ("won_win_rate", "won_fp") if worst else ("bon_win_rate", "bon_fp")
    names = [f"exp:{t:g}", f"exp:{-10 if worst else 10}", "identity", "log", ceiling]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("transform", "beta", f"{'worst' if worst else 'best'} of {n} wins"):
        table.add_column(title, justify="left" if title == "transform" else "right")
    for name in dict.fromkeys(names):
        curve = at_kl(name, [kl], n)
        won = float(getattr(curve, column))
        table.add_row(Text(name, style="bold" if name == names[0] else ""), f"{float(curve.beta):.4g}", f"{won:.4f}")
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    say(f"For {'worst' if worst else 'best'}-of-{n} at KL = {kl:g}: {names[0]}")
    console.print(table)
    if abs(t) > 0.99 * EXPONENTS[1]:
        say(f"Larger t are not searched; {ceiling} has no such limit.")
