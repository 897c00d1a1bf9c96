"""Ranks: collectives on tensors and small objects, and how models are sharded over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nlgrpo.errors import UserCodeError, UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process: its ``rank`` among ``world`` ranks, and its ``device``. ``world`` is 1 without a launcher."""

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

    def sums(self, *numbers: float) -> list[float]:
        """Sums over ranks of numbers that each rank knows; one rank asks no device for them."""
        if self.world == 1:
            return [float(number) for number in numbers]
        values: list[float] = self.sum(torch.tensor(numbers, dtype=torch.float64, device=self.device)).tolist()
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the values of all ranks in their order, (n, ...) -> (world * n, ...), on every rank."""
        if self.world == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    def gather_objects(self, value: Any) -> list[Any]:
        """List the ``value`` of every rank, on every rank; for small objects."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        if self.world == 1:
            return flag
        return bool(self.max(torch.tensor(float(flag), device=self.device)))

    def agree(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` and return this rank's result. Collective.

        If it raises UserError on any rank, all ranks raise, so none waits for another. A rank that failed raises its
        own error; the others raise a UserError with the same message, UserCodeError if code of the user failed. Any
        other exception leaves at once: ``work`` may have collectives, in which the other ranks wait.
        """
        fault: UserError | None = None
        result = None
        try:
            result = work()
        except UserError as raised:
            fault = raised
        if not self.any(fault is not None):
            return cast(Result, result)
        faults = self.gather_objects(None if fault is None else (str(fault), isinstance(fault, UserCodeError)))
        if fault is not None:
            raise fault
        text, of_user_code = next(described for described in faults if described is not None)
        raised_elsewhere = UserCodeError(text) if of_user_code else UserError(text)
        raised_elsewhere.elsewhere = True
        raise raised_elsewhere

    def share(self, total: int) -> slice:
        """Return this rank's slice of ``total`` items, which are split over the ranks."""
        return slice(self.rank * total // self.world, (self.rank + 1) * total // self.world)
