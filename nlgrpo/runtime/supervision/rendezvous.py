"""The key-value store of the ranks that the launcher started, with keys that no earlier attempt has written."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from nlgrpo.errors import UserError

POLL = 0.05  # seconds


class Rendezvous:
    """The ranks of one attempt, from torchrun's environment variables. Raises UserError if some of them are missing.

    torchrun keeps its store when it restarts the ranks (PyTorch 2.13), and the keys of the attempt before: a rank would
    then connect to the address of a process that has ended. Hence the ranks agree on a new prefix of all keys.
    """

    def __init__(self, timeout: timedelta) -> None:
        if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if name not in os.environ]:
            raise UserError(
                f"MASTER_ADDR is set, but not {', '.join(missing)}: start the ranks with torchrun, or unset MASTER_ADDR"
            )
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher; otherwise by rank 0
        self.root = _connect(timeout, serve=self.rank == 0 and not served)
        self.prefix = agree(self.root, self.rank, self.world, timeout)
        self.store = dist.PrefixStore(self.prefix, self.root)

    def connect(self, name: str, timeout: timedelta) -> dist.Store:
        """Return the store with the prefix ``name``, over a connection of its own."""
        return dist.PrefixStore(f"{self.prefix}/{name}", _connect(timeout))


def agree(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """Return a name that rank 0 has made up, on every rank. Keys of ranks that have ended do no harm.

    Each rank asks with a key of its own, and rank 0 answers whoever asks until all ranks have confirmed.
    """
    if rank > 0:
        question = uuid.uuid4().hex
        store.set(f"question {rank}", question)
        store.wait([f"answer {question}"], timeout)
        name = store.get(f"answer {question}").decode()
        store.set(f"confirmed {rank} {name}", "")
        return name
    name = uuid.uuid4().hex
    missing = list(range(1, world))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {missing} did not start within {timeout.total_seconds():.0f} s")
        for other in missing:
            if store.check([f"question {other}"]):
                store.set(f"answer {store.get(f'question {other}').decode()}", name)
        time.sleep(POLL)
        missing = [other for other in missing if not store.check([f"confirmed {other} {name}"])]
    return name


def _connect(timeout: timedelta, *, serve: bool = False) -> dist.TCPStore:
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=serve)
