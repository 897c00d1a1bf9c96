"""Ranks: joining the process group, and collectives on tensors and small objects."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among the ``world``, which is 1 without a launcher."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """(n, ...) of every rank -> (world * n, ...), in the order of the ranks; the same on all."""
        if self.world == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, for what is small and no tensor."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        return bool(self.max(torch.tensor(float(flag), device=self.device)))

    def agree(self, work: Callable[[], Result], error: type[Exception] = ValueError) -> Result:
        """What ``work`` gives here; collective. An ``error`` on one rank is raised on all: none waits for it.

        A rank that failed raises its own, the others the first of them by its message.
        """
        fault, result = None, None
        try:
            result = work()
        except error as found:
            fault = found
        if self.any(fault is not None):
            texts = self.gather_objects(None if fault is None else str(fault))
            raise fault or error(next(text for text in texts if text is not None))
        return cast(Result, result)

    def share(self, total: int) -> slice:
        """This rank's part of ``total`` things in a row, which the ranks divide."""
        return slice(self.rank * total // self.world, (self.rank + 1) * total // self.world)


@contextmanager
def start() -> Iterator[Ranks]:
    """Join the process group that torchrun describes (NCCL on GPUs, gloo on CPUs), and leave it at the end."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    alone: dict[str, Any] = (
        {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group(backend, **alone)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        # A group that something still refers to, as the cycles of a sharded model do, outlives this call; its threads
        # then meet an interpreter that is shutting down, and the process may abort.
        gc.collect()
        dist.destroy_process_group()
