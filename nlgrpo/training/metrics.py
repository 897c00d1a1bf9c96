"""Logging during training: ``metrics.jsonl``, TensorBoard, a progress line, and a table of sampled completions.

Metrics that TRL also logs have TRL's flat names and definitions (TRL 1.16.0, ``GRPOTrainer``), so its dashboards work.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nlgrpo.runtime import atomic_files
from nlgrpo.runtime.timing import as_clock

FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
PLAIN_WIDTH = 120  # columns of a log file
PLAIN_LINES = 40  # approximate number of progress lines of a run in a log file

# Metrics on the progress line of `nlgrpo train`, with formats; the most important ones fit in 80 columns.
SHOWN = (
    ("reward", "reward {:.4f}"),
    ("objective/aggregate", "obj {:.4f}"),
    ("kl", "kl {:.4f}"),
    ("completions/mean_length", "len {:.0f}"),
    ("perf/tokens_per_s", "{:,.0f} tok/s"),
)


# --- metrics of one step's rollouts -------------------------------------------------------------------------------


def rollout_metrics(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], lengths: Tensor, finished: Tensor
) -> dict[str, float]:
    """Metrics of one step: ``reward*``, ``frac_reward_zero_std`` and ``completions/*`` as TRL defines them.

    The inputs are gathered from all ranks: ``rewards[name]`` (P, M) with NaN where a reward abstained, ``lengths``
    (P, M) in tokens, ``finished`` (P, M) bool, true if a stop id ended the completion. A completion's reward is
    ``sum_i w_i r_i`` over the rewards that did not abstain, NaN if all did. Standard deviations have Bessel's
    correction. A metric is NaN if all rewards abstained.

    Raises ValueError if shapes or names do not match.
    """
    shapes = {name: tuple(t.shape) for name, t in {**rewards, "lengths": lengths, "finished": finished}.items()}
    if not rewards or lengths.dim() != 2 or not lengths.numel() or len(set(shapes.values())) > 1:
        raise ValueError(f"rewards, lengths and finished must all be (P, M) with at least one completion, got {shapes}")
    if set(rewards) != set(weights):
        raise ValueError(f"every reward needs a weight: rewards {sorted(rewards)}, weights {sorted(weights)}")
    metrics: dict[str, Tensor] = {}
    for name, values in rewards.items():
        metrics[f"rewards/{name}/mean"] = values.double().nanmean()
        metrics[f"rewards/{name}/std"] = _nanstd(values.double().flatten())
    stacked = torch.stack([weights[name] * values.double() for name, values in rewards.items()])
    total = stacked.nansum(0).masked_fill(stacked.isnan().all(0), math.nan)
    group_std = _nanstd(total) if total.shape[1] > 1 else torch.zeros_like(total[:, 0])
    metrics["reward"] = total.nanmean()
    metrics["reward_std"] = _nanstd(total.flatten())
    # An absolute tolerance, as in TRL: equal rewards must count as equal although their mean is rounded.
    metrics["frac_reward_zero_std"] = (group_std.abs() <= 1e-8).double().mean()
    metrics |= _length_metrics(lengths.double(), finished.bool())
    return {name: value.item() for name, value in metrics.items()}


def _length_metrics(lengths: Tensor, finished: Tensor) -> dict[str, Tensor]:
    ended = lengths[finished] if finished.any() else lengths.new_zeros(1)  # 0 if no completion ended, as in TRL
    return {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": (~finished).double().mean(),
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
    }


def _nanstd(values: Tensor) -> Tensor:
    """Standard deviation over the last dimension, ignoring NaN, with Bessel's correction; NaN below two values."""
    count = (~values.isnan()).sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1)).sqrt().masked_fill(count < 2, math.nan)


# --- files --------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects with an integer ``step`` from a JSON-lines file; skip lines that a kill left incomplete."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text("utf-8", errors="replace").split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def _trim(path: Path, resume_step: int) -> None:
    """Remove the entries from ``resume_step`` on. These steps run again and would be logged twice."""
    kept = [entry for entry in read_jsonl(path) if entry["step"] < resume_step]
    atomic_files.atomic_write(path, "".join(_line(entry) for entry in kept))


def _append(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Append lines. Closes the file, so that no part of a line stays in a buffer if a write fails."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(_line(entry) for entry in entries)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(_finite(entry), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- the logger ---------------------------------------------------------------------------------------------------


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


class MetricsLogger:
    """Writes a run's metrics to its folder and shows progress; does nothing if ``enabled`` is false (other ranks).

    Steps count from 0. ``resume_step`` is the first step that this process runs; logged entries from that step on are
    removed. ``tensorboard=None`` uses TensorBoard if it is installed. On a terminal, progress is one live line;
    otherwise (a file, a pipe) about 40 plain lines per run, without control codes. ``shown``: metrics on the progress
    line, with formats.

    Raises ValueError if ``tensorboard=True`` and it is not installed, or if a file cannot be written.
    """

    def __init__(
        self,
        run: Path,
        *,
        total_steps: int,
        enabled: bool,
        tensorboard: bool | None = None,
        resume_step: int = 0,
        console: Console | None = None,
        shown: Sequence[tuple[str, str]] = SHOWN,
    ) -> None:
        self.enabled, self._shown = enabled, shown
        if not enabled:
            return
        self._run = run
        with atomic_files.into(run):
            run.mkdir(parents=True, exist_ok=True)
            for name in (FILE, SAMPLES_FILE):
                _trim(run / name, resume_step)
            self._tensorboard = _tensorboard_writer(run, tensorboard, resume_step)
        self._total = total_steps
        self._console = console or _console()
        self._progress = _live_line(self._console, total_steps, resume_step)
        self._times: deque[tuple[int, float]] = deque([(resume_step, time.monotonic())], maxlen=50)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics: numbers or one-element tensors. NaN and infinities are written as null."""
        if not self.enabled:
            return
        values = {name: float(value) for name, value in metrics.items()}
        with atomic_files.into(self._run):
            _append(self._run / FILE, [{"step": step, **values}])
            if self._tensorboard is not None:
                for name, value in values.items():
                    if math.isfinite(value):
                        self._tensorboard.add_scalar(name, value, step)
        self._times.append((step + 1, time.monotonic()))
        self._show(step, values)

    def table(self, step: int, rows: Sequence[Sample]) -> None:
        """Print sampled completions, their rewards and advantages, and append them to ``samples.jsonl``."""
        if not self.enabled or not rows:
            return
        with atomic_files.into(self._run):
            _append(self._run / SAMPLES_FILE, [{"step": step, **asdict(row)} for row in rows])
        self._console.print(samples_table(step, rows, self._console.encoding))

    def close(self) -> None:
        """Stop the live line and close TensorBoard's file; a second call does nothing."""
        if not self.enabled:
            return
        if self._progress is not None:
            self._progress.stop()
        if self._tensorboard is not None:
            with atomic_files.into(self._run):
                self._tensorboard.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        parts = [f"{as_clock(self._seconds_left())} left"]
        parts += [text.format(values[name]) for name, text in self._shown if name in values]
        shown = f"{step + 1}/{self._total}  {'  '.join(parts)}"
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step + 1, shown=shown)
        elif step % max(1, self._total // PLAIN_LINES) == 0 or step == self._total - 1:
            self._console.print(Text(f"step {shown}"), soft_wrap=True)

    def _seconds_left(self) -> float:
        """Estimate from the last 49 steps: the first steps of a run are slower."""
        (first, started), (last, now) = self._times[0], self._times[-1]
        return (self._total - last) * (now - started) / max(last - first, 1)


def samples_table(step: int, rows: Sequence[Sample], encoding: str = "utf-8") -> Table:
    """Table of sampled completions with rewards, linearized rewards, the advantage, and columns that rewards logged."""
    title = f"samples at step {step} (lin.: linearized reward)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("prompt", max_width=24)
    table.add_column("completion", max_width=48)
    for heading in [*rows[0].rewards, *(f"lin. {name}" for name in rows[0].linearized), "advantage"]:
        table.add_column(Text(heading), justify="right", min_width=7)
    for heading in rows[0].extra:
        table.add_column(_printable(heading, encoding), max_width=24)
    for row in rows:
        # Show the end of a long prompt and the start of the completion, which continues it.
        prompt = row.prompt if len(row.prompt) <= 48 else "..." + row.prompt[-45:]
        completion = row.completion if len(row.completion) <= 96 else row.completion[:93] + "..."
        texts = (_printable(prompt, encoding), _printable(completion, encoding))
        numbers = [*row.rewards.values(), *row.linearized.values(), row.advantage]
        shown = [Text("-" if math.isnan(x) else f"{x:.4f}") for x in numbers]
        table.add_row(*texts, *shown, *(_printable(str(value)[:96], encoding) for value in row.extra.values()))
    return table


def _printable(text: str, encoding: str) -> Text:
    """Put ``text`` on one line without markup or control characters: a model may generate escape sequences."""
    printable = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return Text(printable.encode(encoding, "replace").decode(encoding))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _live_line(console: Console, total_steps: int, resume_step: int) -> Progress | None:
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    bar = [BarColumn(bar_width=16)] if console.width >= 110 else []
    progress = Progress(*bar, TextColumn("{task.fields[shown]}", markup=False), console=console)
    progress.add_task("", total=total_steps, completed=resume_step, shown=f"{resume_step}/{total_steps}")
    progress.start()
    return progress


def _tensorboard_writer(run: Path, wanted: bool | None, resume_step: int) -> Any:
    installed = importlib.util.find_spec("tensorboard") is not None
    if wanted and not installed:
        raise ValueError(
            "train.tensorboard = true, but TensorBoard is not installed: run pip install tensorboard, or remove the key"
        )
    if wanted is False or not installed:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / "tensorboard"), purge_step=resume_step)
