"""Collectives for groups of completions that another trainer splits between ranks."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_part(count: int, samples: int) -> slice:
    """Return the slice of this rank's ``count`` completions in the groups that `gather` returns for them.

    TRL fills the ranks one after another with equal numbers of completions, which can split a group between ranks.
    Raises ValueError if the completions of all ranks together are not complete groups.
    """
    if count % samples == 0:
        return slice(0, count)
    world = world_size()
    if count * world % samples:
        raise ValueError(
            f"{count} completions on each of {world} rank{'s' * (world > 1)} cannot be split into groups of {samples}; "
            "expected samples to be the trainer's number of completions per prompt."
        )
    start = dist.get_rank() * count
    return slice(start, start + count)


def means(values: Tensor) -> Tensor:
    """Mean of each objective over the groups of all ranks, (m, P) -> (m,). NaN is ignored; NaN if there is no value.

    If groups are split between ranks, ``values`` has all groups on every rank, which does not change the mean.
    """
    present = ~values.isnan()
    totals = torch.stack((torch.where(present, values, 0.0).sum(-1), present.sum(-1).to(values)))
    if world_size() > 1:
        totals = totals.to(_communication_device())
        dist.all_reduce(totals)
    total, count = totals.cpu()
    return total / count


def gather(rewards: Tensor) -> Tensor:
    """Gather the rewards (n,) of all ranks in rank order: (world * n,), on the CPU."""
    local = rewards.to(_communication_device())
    parts = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(parts, local)
    return torch.cat(parts).cpu()


def world_size() -> int:
    """Number of ranks; 1 without a launcher."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is rank 0, the only one that logs."""
    return world_size() == 1 or dist.get_rank() == 0


def _communication_device() -> torch.device:
    """Return the CPU if the process group has a CPU backend, else this rank's accelerator."""
    accelerator = _accelerator()
    return torch.device("cpu") if accelerator is None or "cpu:" in dist.get_backend_config() else accelerator


def _accelerator() -> torch.device | None:
    """Return this rank's accelerator, from the launcher's LOCAL_RANK.

    The current accelerator would be wrong: TRL awaits async functions in a thread where it is the first one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index())))


def on_own_accelerator() -> AbstractContextManager[Any]:
    """Return a context manager that makes this rank's accelerator the current one."""
    accelerator = _accelerator()
    return nullcontext() if accelerator is None else torch.accelerator.device_index(accelerator.index)
