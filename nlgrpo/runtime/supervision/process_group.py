"""The process group of a command: joined, watched and left."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from nlgrpo import errors
from nlgrpo.errors import UserError
from nlgrpo.runtime.atomic_files import disk_errors
from nlgrpo.runtime.distributed import Ranks
from nlgrpo.runtime.supervision.phases import TimeLimits
from nlgrpo.runtime.supervision.rendezvous import Rendezvous

# What gloo and NCCL say if another rank has ended.
ENDED = re.compile("Connection (closed|reset) by peer|remote process exited")
COURTESY = 1.0  # seconds that other ranks leave to the first one, whose output is looked at


@contextmanager
def start(limits: TimeLimits | None = None) -> Iterator[Ranks]:
    """Context that joins torchrun's process group (NCCL on GPUs, gloo on CPUs) and leaves it at the end.

    Without torchrun, the group is this process alone. Several ranks are watched: all end if one is silent, or if none
    makes progress within ``limits``. Collectives wait at least twice as long, so that the watchdog, which knows which
    rank is to blame, is first. An exception that leaves the context on one of several ranks ends the process. It is
    shown once (`nlgrpo.errors`), by rank 0 if all ranks raised it.
    """
    limits = limits or TimeLimits()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=_collectives(limits))
    met = Rendezvous(timeout) if "MASTER_ADDR" in os.environ else None
    store, rank, world = (dist.HashStore(), 0, 1) if met is None else (met.store, met.rank, met.world)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    try:
        with _watched(met, limits), disk_errors():
            yield Ranks(rank, world, device)
    except BrokenPipeError:  # the reader of the output is gone
        raise
    except Exception as error:
        if world == 1:
            raise
        fault = _of_rank(error, rank)
        _show_once(fault, rank, store)
        raise errors.Shown(fault) from error
    finally:
        # Reference cycles of a sharded model keep the group alive after its destruction. Its threads would then run in
        # an interpreter that is shutting down, and the process may abort. One process shards nothing.
        if dist.get_world_size() > 1:
            gc.collect()
        dist.destroy_process_group()


def _watched(met: Rendezvous | None, limits: TimeLimits) -> AbstractContextManager[None]:
    """Context in which several ranks watch each other."""
    if met is None or met.world == 1:
        return nullcontext()
    from nlgrpo.runtime.supervision.watchdog import watching

    return watching(met, limits)


def _of_rank(error: Exception, rank: int) -> Exception:
    """Return the error to show for an exception of one of several ranks."""
    if isinstance(error, RuntimeError) and ENDED.search(str(error)):
        return UserError(f"rank {rank} has lost the connection to another rank, which has ended: {error}")
    if not isinstance(error, UserError):
        error.add_note(f"This is rank {rank}.")
    return error


def _show_once(fault: Exception, rank: int, store: dist.Store) -> None:
    """Show the error of a rank unless another rank shows one, and return when it is shown.

    The first rank goes first, since its output is looked at; a rank that has an error from another one leaves it to
    that. Who ended earlier could have the launcher end all before the error is shown.
    """
    patience = 0.0 if rank == 0 else COURTESY
    if isinstance(fault, UserError) and fault.elsewhere:
        patience = 3 * COURTESY
    try:
        if not _comes(store, "claimed", patience) and store.add("claimed", 1) == 1:
            errors.show(fault)
            store.set("shown", "")
            time.sleep(COURTESY / 2)  # if this rank serves the store, the others can still read it
        else:
            _comes(store, "shown", COURTESY)
    except RuntimeError:  # the rank that serves the store has ended
        errors.show(fault)


def _comes(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether a key is set within ``seconds``."""
    begun = time.monotonic()
    while not (found := store.check([key])) and time.monotonic() - begun < seconds:
        time.sleep(COURTESY / 20)
    return found


def _collectives(limits: TimeLimits) -> float:
    """Seconds that a collective may wait: twice the longest limit, between half an hour and a week."""
    return min(max(1800.0, 2 * limits.largest), 7 * 86400.0)
