"""The command ``nlgrpo sweep``: train a grid of configurations, on this machine or as jobs of a cluster.

Every point is a run of `nlgrpo train` in its own process or job. The folder of the sweep has a folder and a log
of each point, and ``sweep.json``: the shared configuration and the state of every point. The same command resumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from nlgrpo.apps.sweep import grid
from nlgrpo.apps.sweep import state as sweep_state
from nlgrpo.apps.sweep.grid import Setting
from nlgrpo.apps.sweep.launchers import launcher, submitit, visible_gpus
from nlgrpo.apps.sweep.options import LauncherName, SlurmOptions, read_options
from nlgrpo.apps.sweep.runner import (
    SweepRunner,
    check_usable,
    clock_time,
    last_lines,
    locked,
    merge,
    say,
    to_run,
)
from nlgrpo.apps.sweep.state import Point, SweepState
from nlgrpo.config import validate
from nlgrpo.config.recipes import from_arguments
from nlgrpo.config.schema import dashed
from nlgrpo.engine.rollouts.evaluation_samples import EvaluationSamples, read_evaluation, sizes_of
from nlgrpo.errors import UserError
from nlgrpo.runtime.console import how_to_resume
from nlgrpo.training.evaluation_summary import Row, format_interval, summarize
from nlgrpo.training.tracking import run_files, terminal

# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Return exit status 0 if all points are done, or after a signal; 1 if a point failed, or with a message."""
    options, rest = read_options(arguments)
    if options.launcher == "local":
        defaults = vars(SlurmOptions())
        unused = [name for name, value in vars(options.slurm).items() if value != defaults[name]]
        if unused:
            names = ", ".join(dashed(f"--slurm.{name}") for name in unused)
            raise UserError(f"{names}: only with --launcher slurm; this sweep runs on this machine")
    command = grid.read_grid(rest)
    folder = options.out or Path(f"runs/{from_arguments(command.start)[0].recipe}-sweep")
    known = list[str]()
    if (folder / sweep_state.SWEEP_FILE).exists():
        known = list(sweep_state.read_sweep(folder).points[0].overrides)
    axes = command.axes(known)
    if not axes:
        raise UserError("no option has several values; separate values by commas, such as --loss.beta 1e-2,1e-1")
    return run(
        command.start,
        command.rows(),
        folder,
        axes=axes,
        retry=options.retry,
        dry_run=options.dry_run,
        ranks=options.nproc_per_node,
        jobs=options.jobs,
        where=options.launcher,
        slurm=options.slurm,
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
    jobs: int | None = None,
    where: LauncherName = "local",
    slurm: SlurmOptions | None = None,
) -> int:
    """Run the points that are not done, ``jobs`` at a time, and print the table of all. Returns the exit status.

    ``start``: arguments of `nlgrpo train` for every point. ``rows``: the options of each point, without dashes.
    ``axes``: the options in which points differ and by which they are named; all by default. ``where``: the launcher,
    with ``slurm`` for the resources of a job. Raises UserError for a configuration that cannot be run, before any
    point starts, and for a folder of something else.
    """
    settings = grid.settings(start, rows, list(rows[0]) if axes is None else axes)
    if jobs is None:
        jobs = 1 if where == "local" else len(settings)
    _check(settings, ranks, jobs, None if where == "local" else slurm or SlurmOptions())
    check_usable(folder)
    if dry_run:
        manifest, points = merge(folder, settings)
        _show(manifest)
        say(f"{folder}: {len(points)} points, {len(to_run(points, retry))} to run; dry run, nothing was started")
        return 0
    try:
        with locked(folder) as lock:
            manifest, points = merge(folder, settings)
            if where == "local":
                _check_no_jobs(points)
            (folder / "logs").mkdir(exist_ok=True)
            manifest.write()
            work = SweepRunner(manifest, launcher(where, folder, ranks, jobs, lock, slurm), jobs)
            stopped = work.run_all(list(zip(settings, points, strict=True)), retry)
    except BrokenPipeError:  # the reader of the output is gone
        raise
    except OSError as error:
        raise UserError(
            f"the sweep cannot use {folder}: {error}; once that is fixed, the same command resumes"
        ) from error
    _show(manifest)
    failed = [point for point in points if point.state == "failed"]
    for point in failed:
        print(f"failed: {point.name}: {point.error}\n  log: {point.log}; --retry runs it again")
        print("".join(f"  | {line}\n" for line in last_lines(point)), end="")
    if stopped:
        print(f"stopped; {how_to_resume()}")
    return 1 if failed and not stopped else 0


def _check(settings: Sequence[Setting], ranks: int, jobs: int, slurm: SlurmOptions | None = None) -> None:
    """Check all points. Raises UserError with the faults of all of them. ``slurm``: None on this machine."""
    for option, number in (("nproc-per-node", ranks), ("jobs", jobs)):
        if number < 1:
            raise UserError(f"--{option} = {number}: allowed is >= 1")
    if slurm is not None:
        submitit()
        if faults := slurm.faults(ranks):
            raise UserError("\n".join(faults))
        world = ranks * slurm.nodes
    else:
        world = ranks
        gpus = len(visible_gpus()) if jobs > 1 else 0
        if 0 < gpus < jobs * ranks:
            raise UserError(f"--jobs {jobs} of {ranks} ranks each need {jobs * ranks} GPUs, and there are {gpus}")
    found: dict[str, list[str]] = {}
    for setting in settings:
        for fault in _faults(setting, world):
            found.setdefault(fault, []).append(grid.folder_name(setting.overrides))
    if not found:
        return
    faulty = {name for names in found.values() for name in names}
    lines = [f"{len(faulty)} of {len(settings)} points cannot be run:"]
    for fault, names in found.items():
        whose = "all" if len(names) == len(settings) else "; ".join(names)
        lines.append(f"  {fault} ({whose})")
    raise UserError("\n".join(lines))


def _check_no_jobs(points: Sequence[Point]) -> None:
    """Raise UserError if a job may be at work on a point: two runs must not share a folder."""
    jobs = [point.job for point in points if point.job and point.state in ("queued", "running")]
    if jobs:
        raise UserError(
            f"job {', '.join(jobs)} of this sweep may still run on the cluster; use --launcher slurm, which attaches "
            "to it"
        )


def _faults(setting: Setting, ranks: int) -> list[str]:
    faults = []
    try:
        validate.check_config(setting.config, world=ranks)
    except ValueError as error:
        faults = [line.strip() for line in str(error).splitlines()[1:]]
    if setting.config.evaluation.prompts == 0:
        faults.append(
            "evaluation.prompts = 0: a sweep needs the evaluation, to compare points and to know which are done"
        )
    if setting.config.train.restart:
        faults.append(f"train.restart = True: {grid.NOT_SWEPT['train.restart']}")
    return faults


# --- the table --------------------------------------------------------------------------------------------------------


def _show(manifest: SweepState) -> None:
    evaluated = [_evaluated(point) for point in manifest.points]
    results = []
    for point, sampled in zip(manifest.points, evaluated, strict=True):
        results.append(_results(manifest, point, sampled))
    # the best-of-N of each point; the heading names N if all have the same
    procedures = {row.procedure for rows in results for row in rows[1:]}
    one = next(iter(procedures)) if len(procedures) == 1 else ""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    known = [sampled for sampled in evaluated if sampled is not None]
    if known:
        table.caption = f"evaluated on {sizes_of(known)}"
    for heading in grid.short_names(list(manifest.points[0].overrides)):
        table.add_column(Text(heading))
    for heading in ("mean", one or "best of N", "KL", "time", "state"):
        table.add_column(heading, no_wrap=True)
    for point, rows in zip(manifest.points, results, strict=True):
        values = [format_interval(row, "\n") for row in rows]
        if len(rows) == 2 and not one:
            values[1] += f"\n{rows[1].procedure}"
        values += ["-"] * (2 - len(rows))
        time = clock_time(point.seconds) if point.seconds else "-"
        cells = [*map(grid.shown, point.overrides.values()), *values, _kl(point)]
        table.add_row(*map(Text, cells), time, _state(point))
    terminal.output(width=terminal.TABLE_WIDTH).print(table)


def _state(point: Point) -> str:
    shown = point.job and point.state in ("queued", "running", "failed")
    return f"{point.state} (job {point.job})" if shown else point.state


def _evaluated(point: Point) -> EvaluationSamples | None:
    """Return the samples of the trained model; None if there is no evaluation yet."""
    try:
        return read_evaluation(point.folder)["after"]
    except (ValueError, KeyError):
        return None


def _results(manifest: SweepState, point: Point, sampled: EvaluationSamples | None) -> list[Row]:
    """Return mean and best-of-N (the largest N) of the trained model, of the weighted sum for several rewards."""
    if sampled is None:
        return []
    ns = point.overrides.get("evaluation.ns") or manifest.base["evaluation"]["ns"]
    largest = max(n for n in (1, *ns) if n <= sampled.lengths.shape[1])
    rows = summarize(sampled, list(dict.fromkeys((1, largest))))
    return [row for row in rows if row.reward == rows[-1].reward]


def _kl(point: Point) -> str:
    """Return the KL per token in the last step that has one, or a dash without a reference."""
    value = None
    for row in run_files.read_jsonl(point.folder / run_files.METRICS_FILE):
        value = row.get("kl", value)
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.4f}"
    return "-"
