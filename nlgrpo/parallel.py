"""Ranks: starting them, sharding a model over them (FSDP2), gathering its parameters, and reducing numbers."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nlgrpo.model import Decoder

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


def shard(model: Decoder, ranks: Ranks, compute: torch.dtype) -> Decoder:
    """Shard parameters, gradients and optimiser state over the ranks, block by block; reductions run in float32.

    The sharded parameters keep their dtype: they are the master weights of a model that computes in ``compute``.
    One rank on a CPU that computes in its parameters' dtype needs none of it.
    """
    stored = model.head_weight.dtype
    if ranks.world == 1 and compute == stored:
        return model
    reduce = torch.float64 if stored == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # in place
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within, every rank holds the whole parameters in the type they compute in, as generation needs them."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def full_parameters(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole parameters by name, on the CPU; collective."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        full[name] = value.to("cpu", dtype)
    return full


def check_finite(model: nn.Module, ranks: Ranks, why: str) -> None:
    """ValueError on all ranks for a parameter with NaN or an infinity, so that none is ever written; collective.

    ``why`` ends the message.
    """
    owned = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in model.named_parameters())
    bad = next((name for name, part in owned if not part.detach().isfinite().all()), None)
    if found := [name for name in ranks.gather_objects(bad) if name is not None]:
        raise ValueError(f"{found[0]} holds NaN or infinities{why}")


TOO_LARGE = ", and nothing was written; rewards, weight decay or the learning rate may be too large"


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient to a norm of at most ``max_norm`` (0: leave it); the norm before, over all shards.

    Raises ValueError for one that is not finite, of which a step would leave no finite weight.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else float("inf"))
    found = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(found):
        raise ValueError(
            f"the gradient has the norm {found}: rewards, weights or the learning rate are too large for the type that "
            "computes. It was not applied, and the last checkpoint is from before"
        )
    return found
