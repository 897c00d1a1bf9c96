"""Groups that lie on several ranks of a trainer that has started them: where they are, gathered, and means over all."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_part(count: int, samples: int) -> slice:
    """Where the ``count`` completions of this rank are in the whole groups around them.

    TRL fills the ranks one after another with equal numbers of completions, so a group may be split between ranks.
    """
    if count % samples == 0:
        return slice(0, count)
    world = world_size()
    if count * world % samples:
        raise ValueError(
            f"{count} completions on each of {world} rank{'s' * (world > 1)} are no whole groups of {samples}; "
            "expected samples to be the number of completions that the trainer draws for a prompt."
        )
    start = dist.get_rank() * count
    return slice(start, start + count)


def means(values: Tensor) -> Tensor:
    """Mean of each objective over the groups of all ranks that have a value, (m, P) -> (m,); NaN where none has.

    Groups that lie on several ranks are on all of them, and the mean is the same.
    """
    there = ~values.isnan()
    totals = torch.stack((torch.where(there, values, 0.0).sum(-1), there.sum(-1).to(values)))
    if world_size() > 1:
        totals = totals.to(_communicates_on())
        dist.all_reduce(totals)
    total, count = totals.cpu()
    return total / count


def gather(rewards: Tensor) -> Tensor:
    """(n,) of every rank -> (world * n,) on the CPU, in the order of the ranks."""
    mine = rewards.to(_communicates_on())
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts).cpu()


def world_size() -> int:
    """1 without a launcher."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this rank is the one that speaks for all."""
    return world_size() == 1 or dist.get_rank() == 0


def _communicates_on() -> torch.device:
    """The CPU where the ranks can meet there, else this rank's accelerator."""
    accelerator = _accelerator()
    return torch.device("cpu") if accelerator is None or "cpu:" in dist.get_backend_config() else accelerator


def _accelerator() -> torch.device | None:
    """This rank's. TRL awaits async functions in a thread in which the current one is the first on every rank.

    Its launchers tell which one is meant.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index())))


def on_own_accelerator() -> AbstractContextManager[Any]:
    """Within, tensors that are made on an accelerator are on this rank's."""
    accelerator = _accelerator()
    return nullcontext() if accelerator is None else torch.accelerator.device_index(accelerator.index)
