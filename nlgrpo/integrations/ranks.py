"""Collectives for groups that another trainer splits between ranks: positions, gathering, and means over all groups."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_part(count: int, samples: int) -> slice:
    """Positions of this rank's ``count`` completions in the whole groups that contain them.

    TRL fills the ranks one after another with equal numbers of completions, so a group may be split between ranks.
    Raises ValueError if the completions of all ranks are not whole groups.
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

    If groups are split between ranks, every rank has gathered all of them, which does not change the mean.
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
    own = rewards.to(_communication_device())
    parts = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts).cpu()


def world_size() -> int:
    """Number of ranks; 1 without a launcher."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is rank 0, which logs for all."""
    return world_size() == 1 or dist.get_rank() == 0


def _communication_device() -> torch.device:
    """The CPU if the process group has a backend for it, else this rank's accelerator."""
    accelerator = _accelerator()
    return torch.device("cpu") if accelerator is None or "cpu:" in dist.get_backend_config() else accelerator


def _accelerator() -> torch.device | None:
    """Accelerator of this rank, by the launcher's LOCAL_RANK.

    TRL awaits async functions in a thread whose current accelerator is the first one, on every rank.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index())))


def on_own_accelerator() -> AbstractContextManager[Any]:
    """Context manager in which new tensors on an accelerator are on this rank's."""
    accelerator = _accelerator()
    return nullcontext() if accelerator is None else torch.accelerator.device_index(accelerator.index)
