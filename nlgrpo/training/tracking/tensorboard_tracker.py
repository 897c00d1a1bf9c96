"""TensorBoard: event files in the folder ``tensorboard`` of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from nlgrpo.config.comparing import flat
from nlgrpo.training.tracking.trackers import Memory, TrackedRun, in_trl


@dataclass
class TensorBoard:
    writer: SummaryWriter

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in in_trl(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.writer.add_text("completions", markdown(columns, rows), step)

    def close(self) -> None:
        self.writer.close()


def begin(run: TrackedRun, memory: Memory) -> TensorBoard:
    """Start, or continue: events from ``resume_step`` on are hidden, because these steps run again."""
    writer = SummaryWriter(str(memory.folder / "tensorboard"), purge_step=memory.resume_step)
    if memory.resume_step == 0:
        rows = [[key, str(value)] for key, value in flat(run.config).items()]
        writer.add_text("config", markdown(["key", "value"], rows), 0)
    return TensorBoard(writer)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown, which TensorBoard shows."""
    lines = [_line(columns), "|" + "---|" * len(columns)]
    lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[Any]) -> str:
    texts = [" ".join(str(cell).replace("|", "\\|").split()) for cell in cells]
    return f"| {' | '.join(texts)} |"
