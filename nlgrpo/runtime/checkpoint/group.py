"""The ranks that write or read a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from nlgrpo.errors import UserError
from nlgrpo.runtime import atomic_files

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """This process among the ranks of a process group.

    A single rank calls no collective, here and in DCP: gloo runs collectives in its own threads, whose OpenMP workers
    would halve the speed of everything that follows if there are as many threads as cores.
    """

    rank: int = 0
    world: int = 1
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def all(cls, *, own: bool = False) -> Group:
        """All ranks; with ``own``, in a new process group for a thread, and collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = dist.new_group(backend="gloo") if own else dist.group.WORLD
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def gather(self, value: Value) -> list[Value]:
        """List the values of all ranks, on every rank. Also a barrier."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, self.process_group)
        return values

    def on_all(self, folder: Path, work: Callable[[], Value]) -> list[Value]:
        """Run ``work`` on every rank and list the results; an error of a write on one rank is raised on all."""
        result: list[Value] = []
        fault = ""
        try:
            with atomic_files.into(folder):
                result = [work()]
        except ValueError as error:
            fault = str(error)
        outcomes = self.gather((result, fault))
        first = next((fault for _, fault in outcomes if fault), None)
        if first is not None:
            raise UserError(first)
        return [value for part, _ in outcomes for value in part]
