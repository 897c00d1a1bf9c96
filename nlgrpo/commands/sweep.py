"""The command ``nlgrpo sweep``: a grid of runs, one or a few at a time, that goes on where it was stopped.

Every point is a run of `nlgrpo train` in a process of its own. The sweep's folder holds a folder and a log of each, and
``sweep.json``: the configuration that all share, and what has become of every point.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nlgrpo.config import grid, validate
from nlgrpo.config.grid import Setting
from nlgrpo.config.recipes import from_arguments
from nlgrpo.engine.rollouts.evaluation_samples import read_evaluation
from nlgrpo.evaluation.results import Row, format_interval, summarize
from nlgrpo.training import metrics
from nlgrpo.training.sweeps import state as sweep_state
from nlgrpo.training.sweeps.runner import (
    SweepRunner,
    check_usable,
    clock_time,
    locked,
    merge,
    say,
    to_run,
    visible_gpus,
)
from nlgrpo.training.sweeps.state import Point, SweepState

ABOUT = """Train a grid: nlgrpo sweep [recipe] [file.toml] --loss.beta 1e-2,1e-1 --objective mean,bon:4 --seed 0,1,2

Keys are those of `nlgrpo train`, --objective is that of all rewards, --seed is --train.seed. An option with several
values, parted by commas, is an axis of the grid. Commas inside of brackets and quotes part nothing:
'length(target=25, scale=128)' is one value, and quotes around a value, as in "'distortion:0,1,2',mean", are taken off.
A key that is a list has each of several values in brackets: --evaluation.ns [1,4],[1,8].

The same command goes on: finished points are passed over and stopped ones resume. More values add points."""


@dataclass
class Options:
    """What a sweep takes besides the keys of a configuration."""

    out: Path | None = None
    """Folder of the sweep; none: runs/<recipe>-sweep."""
    retry: bool = False
    """Run failed points again, from their checkpoints."""
    dry_run: bool = False
    """Check all points and list them; run nothing."""
    nproc_per_node: int = 1
    """Ranks of each run, which torchrun starts if they are several."""
    jobs: int = 1
    """Points that run at a time, each on cores and GPUs of its own."""


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 when all points are done, or when stopped by a signal; 1 if one failed, or with a message."""
    options, rest = tyro.cli(
        Options, args=list(arguments), prog="nlgrpo sweep", description=ABOUT, return_unknown_args=True
    )
    command = grid.read(rest)
    folder = options.out or Path(f"runs/{from_arguments(command.start)[0].recipe}-sweep")
    known = sweep_state.read(folder).points[0].overrides if (folder / sweep_state.FILE).exists() else ()
    axes = command.axes(known)
    if not axes:
        raise ValueError("no option has several values; write them with commas, such as --loss.beta 1e-2,1e-1")
    return run(
        command.start,
        command.rows(),
        folder,
        axes=axes,
        retry=options.retry,
        dry_run=options.dry_run,
        ranks=options.nproc_per_node,
        jobs=options.jobs,
    )


def run(
    start: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    axes: Sequence[str] | None = None,
    retry: bool = False,
    dry_run: bool = False,
    ranks: int = 1,
    jobs: int = 1,
) -> int:
    """Run the points that are not done, ``jobs`` at a time, and print the table of all; the exit status as in `main`.

    ``start`` are arguments of `nlgrpo train` for every point, and each of ``rows`` the options of one, by their names
    without dashes; ``axes`` are those by which points differ and are named, by default all. Raises ValueError for a
    configuration that cannot be run, before any point begins, and for a folder that is not this sweep's.
    """
    settings = grid.settings(start, rows, list(rows[0]) if axes is None else axes)
    _check(settings, ranks, jobs)
    check_usable(folder)
    if dry_run:
        manifest, points = merge(folder, settings)
        _show(manifest)
        say(f"{folder}: {len(points)} points, {len(to_run(points, retry))} to run; this dry run began none")
        return 0
    try:
        with locked(folder) as lock:
            manifest, points = merge(folder, settings)
            (folder / "logs").mkdir(exist_ok=True)
            manifest.write()
            work = SweepRunner(manifest, ranks, jobs, lock)
            stopped = work.run_all(list(zip(settings, points, strict=True)), retry)
    except BrokenPipeError:  # of what reads its output
        raise
    except OSError as error:
        raise ValueError(f"the sweep cannot use {folder}: {error}; the same command goes on once it can") from error
    _show(manifest)
    failed = [point for point in points if point.state == "failed"]
    for point in failed:
        print(f"failed: {point.name}: {point.error}\n  its log is {point.log}; --retry runs it again")
    if stopped:
        print("stopped; the same command goes on from there")
    return 1 if failed and not stopped else 0


def _check(settings: Sequence[Setting], ranks: int, jobs: int) -> None:
    """Refuse what no run can begin with, all points and all faults at once."""
    for option, number in (("nproc-per-node", ranks), ("jobs", jobs)):
        if number < 1:
            raise ValueError(f"--{option} = {number}: allowed is >= 1")
    if jobs > 1 and 0 < len(visible_gpus()) < jobs * ranks:
        raise ValueError(
            f"--jobs {jobs} of {ranks} ranks each need {jobs * ranks} GPUs, and there are {len(visible_gpus())}"
        )
    faults: dict[str, list[str]] = {}
    for setting in settings:
        for fault in _faults(setting, ranks):
            faults.setdefault(fault, []).append(grid.folder_name(setting.overrides))
    if faults:
        whose = {fault: "all" if len(names) == len(settings) else "; ".join(names) for fault, names in faults.items()}
        count = len({name for names in faults.values() for name in names})
        lines = [f"{count} of {len(settings)} points cannot be run:", *(f"  {f} ({whose[f]})" for f in faults)]
        raise ValueError("\n".join(lines))


def _faults(setting: Setting, ranks: int) -> list[str]:
    faults = []
    try:
        validate.check(setting.config, world=ranks)
    except ValueError as error:
        faults = [line.strip() for line in str(error).splitlines()[1:]]
    if setting.config.evaluation.prompts == 0:
        faults.append("evaluation.prompts = 0: points are compared, and known to be done, by their evaluation")
    if setting.config.train.restart:
        faults.append(f"train.restart = True: {grid.NOT_SWEPT['train.restart']}")
    return faults


# --- the table --------------------------------------------------------------------------------------------------------


def _show(manifest: SweepState) -> None:
    results = [_results(manifest, point) for point in manifest.points]
    procedures = {row.procedure for rows in results for row in rows[1:]}
    one = next(iter(procedures)) if len(procedures) == 1 else ""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in grid.short_names(list(manifest.points[0].overrides)):
        table.add_column(Text(heading))
    for heading in ("mean", one or "best of N", "KL", "time", "state"):
        table.add_column(heading, no_wrap=True)
    for point, rows in zip(manifest.points, results, strict=True):
        values = [
            format_interval(row, "\n") + ("" if one or not i else f"\n{row.procedure}") for i, row in enumerate(rows)
        ]
        cells = [*map(grid.shown, point.overrides.values()), *values, *["-"] * (2 - len(rows)), _kl(point)]
        table.add_row(*map(Text, cells), clock_time(point.seconds) if point.seconds else "-", point.state)
    console = Console(width=None if sys.stdout.isatty() else metrics.PLAIN_WIDTH)
    console.print(table)


def _results(manifest: SweepState, point: Point) -> list[Row]:
    """Mean and best-of-N of the trained model, of the weighted sum of several rewards; N is the largest asked for."""
    ns = point.overrides.get("evaluation.ns") or manifest.base["evaluation"]["ns"]
    try:
        rows = summarize(read_evaluation(point.folder)["after"], list(dict.fromkeys((1, max(ns)))))
    except (ValueError, KeyError):  # there is none yet
        return []
    return [row for row in rows if row.reward == rows[-1].reward]


def _kl(point: Point) -> str:
    """Per token, in the last step; a dash without a reference."""
    steps = metrics.read_jsonl(point.folder / metrics.FILE)
    value = steps[-1].get("kl") if steps else None
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "-"
