"""What a training loop calls to log: metrics and samples go to the run's files, its trackers and the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from nlgrpo.runtime import atomic_files
from nlgrpo.training.tracking import run_files
from nlgrpo.training.tracking.terminal import SHOWN, ProgressLine, Sample, samples_table

if TYPE_CHECKING:
    from nlgrpo.training.tracking.trackers import BackgroundTracker, TrackedRun


class MetricsLogger:
    """Logs a run; does nothing if ``enabled`` is false (other ranks).

    Steps count from 0. ``resume_step`` is the first step that this process runs; logged entries from that step on are
    removed from the files. ``tracked``: the run as trackers see it; None: no trackers. ``shown``: metrics on the
    progress line, with formats.

    Raises UserError if a file cannot be written. A tracker never raises: see `trackers.BackgroundTracker`.
    """

    def __init__(
        self,
        run: Path,
        *,
        total_steps: int,
        enabled: bool,
        tracked: TrackedRun | None = None,
        resume_step: int = 0,
        console: Console | None = None,
        shown: Sequence[tuple[str, str]] = SHOWN,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        self._run = run
        with atomic_files.into(run):
            run.mkdir(parents=True, exist_ok=True)
            for name in (run_files.METRICS_FILE, run_files.SAMPLES_FILE):
                run_files.trim(run / name, resume_step)
            if (run / run_files.EVALUATIONS_FILE).is_file():  # an evaluation is before the step of its number
                run_files.trim(run / run_files.EVALUATIONS_FILE, resume_step + 1)
        self._trackers: list[BackgroundTracker] = []
        if tracked is not None:
            from nlgrpo.training.tracking import trackers

            self._trackers = trackers.start(tracked, run, resume_step)
        self._progress = ProgressLine(total_steps, resume_step, shown, console)
        self.console = self._progress.console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics: numbers or one-element tensors. NaN and infinities are written as null."""
        if not self.enabled:
            return
        values = {name: float(value) for name, value in metrics.items()}
        with atomic_files.into(self._run):
            run_files.append(self._run / run_files.METRICS_FILE, [{"step": step, **values}])
        for tracker in self._trackers:
            tracker.log(step, values)
        self._progress.update(step, values)

    def evaluation(self, step: int, values: Mapping[str, Sequence[float]], metrics: Mapping[str, float]) -> None:
        """Log an evaluation after ``step`` trained steps: ``values`` to ``evaluations.jsonl``, ``metrics`` to trackers.

        ``values``: each number with the ends of its interval. Names in ``metrics`` begin with "eval_", as in TRL; their
        step is the last one before the evaluation, and 0 for the initial policy too.
        """
        if not self.enabled:
            return
        with atomic_files.into(self._run):
            row = {"step": step, "values": {name: list(numbers) for name, numbers in values.items()}}
            run_files.append(self._run / run_files.EVALUATIONS_FILE, [row])
        for tracker in self._trackers:
            tracker.log(max(0, step - 1), metrics)

    def table(self, step: int, rows: Sequence[Sample]) -> None:
        """Append completions of a prompt with rewards and advantages to ``samples.jsonl``, and print the first ones."""
        if not self.enabled or not rows:
            return
        with atomic_files.into(self._run):
            run_files.append(self._run / run_files.SAMPLES_FILE, [{"step": step, **asdict(row)} for row in rows])
        for tracker in self._trackers:
            tracker.table(step, rows)
        self._progress.console.print(samples_table(step, rows, self._progress.console.encoding))

    def catch_up(self) -> None:
        """Wait for the trackers before a checkpoint, for a limited time: `trackers.catch_up`."""
        if self.enabled and self._trackers:
            from nlgrpo.training.tracking import trackers

            trackers.catch_up(self._trackers)

    def close(self) -> None:
        """Stop the live line and close the trackers; a second call does nothing."""
        if not self.enabled:
            return
        self._progress.stop()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
