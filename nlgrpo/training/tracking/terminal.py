"""What a training run shows: one live line in a terminal, plain lines elsewhere, and tables of sampled completions."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from nlgrpo.runtime.timing import as_clock

PLAIN_WIDTH = 120  # columns of a log file
TABLE_WIDTH = 240  # columns of a log file for a table with a column per model
SAMPLES = 4  # completions in the table of a step
PLAIN_LINES = 40  # approximate number of progress lines of a run in a log file
WIDE = 110  # columns of a terminal that has room for a bar and the phases

# Metrics on the progress line of `nlgrpo train`, with formats; the most important ones fit in 80 columns.
SHOWN = (
    ("reward", "reward {:.4f}"),
    ("objective/aggregate", "obj {:.4f}"),
    ("kl", "kl {:.4f}"),
    ("completions/mean_length", "len {:.0f}"),
    ("perf/tokens_per_s", "{:,.0f} tok/s"),
)
SHOWN_OFFLINE = (
    ("loss", "loss {:.4f}"),
    ("rewards/accuracies", "acc {:.3f}"),
    ("rewards/margins", "margin {:.4f}"),
    ("logps/chosen", "logp {:.2f}"),
    ("perf/tokens_per_s", "{:,.0f} tok/s"),
)


@dataclass(frozen=True)
class Sample:
    """A row of the table of samples; ``rewards`` and ``linearized`` by reward name, NaN if the reward abstained."""

    prompt: str
    completion: str
    rewards: Mapping[str, float]
    linearized: Mapping[str, float]
    advantage: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns that rewards logged for this completion."""
    tokens: int | None = None
    """Length of the completion."""


class ProgressLine:
    """The progress of a run: live in a terminal until the last step; elsewhere (a file, a pipe) about 40 plain lines.

    ``shown``: metrics on the line, with formats. In a terminal of at least 110 columns there is a bar, and a second
    line has the share of each phase of the last step (``time/*``).
    """

    def __init__(
        self, total_steps: int, resume_step: int, shown: Sequence[tuple[str, str]], console: Console | None = None
    ) -> None:
        self.console = console or output()
        self._total = total_steps
        self._shown = shown
        self._live = _live(self.console, total_steps, resume_step)
        self._times: deque[tuple[int, float]] = deque([(resume_step, time.monotonic())], maxlen=50)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step and its metrics."""
        self._times.append((step + 1, time.monotonic()))
        parts = [f"{as_clock(self._seconds_left())} left"]
        parts += [text.format(values[name]) for name, text in self._shown if name in values]
        shown = f"{step + 1}/{self._total}  {'  '.join(parts)}"
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=step + 1, shown=shown, phases=phase_shares(values))
            if step == self._total - 1:
                self.stop()
        elif step % max(1, self._total // PLAIN_LINES) == 0 or step == self._total - 1:
            self.console.print(Text(f"step {shown}"), soft_wrap=True)

    def stop(self) -> None:
        """Stop the live display; its last state stays. A second call does nothing."""
        if self._live is not None:
            self._live.stop()

    def _seconds_left(self) -> float:
        """Estimate from the last 49 steps: the first steps of a run are slower."""
        (first, started), (last, now) = self._times[0], self._times[-1]
        return (self._total - last) * (now - started) / max(last - first, 1)


def phase_shares(values: Mapping[str, float]) -> str:
    """Return the share of each phase of a step, the largest first: "update 48%  generate 35%  reference 16%"."""
    times = {name.removeprefix("time/"): x for name, x in values.items() if name.startswith("time/") and x > 0}
    total = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return "  ".join(f"{name} {x / total:.0%}" for name, x in ordered if x >= 0.01 * total)


def output(*, width: int = PLAIN_WIDTH, quiet: bool = False) -> Console:
    """Return a console on standard output; a file or a pipe has ``width`` columns."""
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(quiet=quiet) if in_terminal else Console(width=width, quiet=quiet)


def _live(console: Console, total_steps: int, resume_step: int) -> Progress | None:
    from nlgrpo.runtime.console import can_be_live

    if resume_step >= total_steps or not can_be_live(console):
        return None
    text = TextColumn("{task.fields[shown]}", markup=False)
    columns = [BarColumn(bar_width=16), text] if console.width >= WIDE else [text]
    progress = _WithPhases(*columns, console=console)
    progress.add_task("", total=total_steps, completed=resume_step, shown=f"{resume_step}/{total_steps}", phases="")
    progress.start()
    return progress


class _WithPhases(Progress):
    """Adds the line of phases in a wide terminal."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        phases = self.tasks[0].fields["phases"] if self.tasks else ""
        if phases and self.console.width >= WIDE:
            yield Text(f"{'':17}{phases}", style="dim", no_wrap=True, overflow="ellipsis")


def samples_table(step: int, rows: Sequence[Sample], encoding: str = "utf-8") -> Table:
    """Table of the first completions: rewards, linearized rewards, the advantage, and columns that rewards logged."""
    title = f"samples at step {step} (lin.: linearized reward)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("prompt", max_width=24)
    table.add_column("completion", max_width=48)
    linearized = [f"lin. {name}" for name in rows[0].linearized]
    for heading in [*rows[0].rewards, *linearized, "advantage"]:
        table.add_column(Text(heading), justify="right", min_width=7)
    for heading in rows[0].extra:
        table.add_column(_printable(heading, encoding), max_width=24)
    for row in rows[:SAMPLES]:
        # Show the end of a long prompt and the start of the completion, which continues it.
        prompt = row.prompt if len(row.prompt) <= 48 else "..." + row.prompt[-45:]
        completion = row.completion if len(row.completion) <= 96 else row.completion[:93] + "..."
        cells = [_printable(prompt, encoding), _printable(completion, encoding)]
        for number in (*row.rewards.values(), *row.linearized.values(), row.advantage):
            cells.append(Text("-" if math.isnan(number) else f"{number:.4f}"))
        for value in row.extra.values():
            cells.append(_printable(str(value)[:96], encoding))
        table.add_row(*cells)
    return table


def _printable(text: str, encoding: str) -> Text:
    """Put ``text`` on one line without markup or control characters: a model may generate escape sequences."""
    printable = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return Text(printable.encode(encoding, "replace").decode(encoding))
