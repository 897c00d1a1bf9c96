"""Weights for a vLLM server by vLLM's own transfer: NCCL to other GPUs, or CUDA IPC on the same ones.

Needs vLLM in the trainer's environment, and GPUs. It was not run yet: nothing here was measured.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nlgrpo.engine.backends import vllm_library
from nlgrpo.engine.backends.returned import EngineError
from nlgrpo.runtime.distributed import Ranks


@dataclass
class Weights:
    """Full weights under their names in a Hugging Face directory, to be read several times; collective."""

    pairs: Callable[[], Iterator[tuple[str, Tensor]]]
    shapes: list[tuple[str, torch.dtype, tuple[int, ...]]]
    reading: Iterator[tuple[str, Tensor]] = field(default_factory=lambda: iter(()))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.reading = self.pairs()
        return self.reading

    def finish(self) -> None:
        """Read what a failed transfer left, because the other ranks gather it too."""
        deque(self.reading, maxlen=0)


class Receiver(Protocol):
    """The server, as `vllm_http.Server` calls it."""

    url: str

    def pause(self) -> None: ...

    def resume(self, version: str) -> None: ...

    def workers(self) -> int: ...


@dataclass
class Transfer:
    """Connection to one server. All ranks take part; rank 0 sends."""

    kind: Literal["nccl", "ipc"]
    server: Receiver
    ranks: Ranks
    weights: Weights
    sender: Any = None

    def send(self, version: str) -> None:
        """Replace the server's weights, and name them ``version``; collective. Requests in flight continue with them.

        Raises EngineError on all ranks if it fails, since the connection cannot be used again.
        """
        if self.ranks.first:
            self.server.pause()
        try:
            if self.sender is None:
                self.sender = self._connect()
            self.sender.send_weights()
        except Exception as error:
            raise EngineError(f"{self.server.url} did not take the weights by {self.kind}: {error}") from error
        finally:
            self.weights.finish()
            if self.ranks.first:
                self.server.resume(version)

    def _connect(self) -> Any:
        world, port = self.ranks.gather_objects(self._rendezvous())[0]
        address = socket.gethostbyname(socket.gethostname()) if self.ranks.first else ""
        return vllm_library.weight_sender(
            self.kind, self.server.url, self.weights, rank=self.ranks.rank, world=1 + world, address=address, port=port
        )

    def _rendezvous(self) -> tuple[int, int]:
        """Number of the server's workers, and a free port of this host."""
        if not self.ranks.first:
            return 0, 0
        try:
            workers = self.server.workers()
        except Exception as error:
            raise EngineError(f"{self.server.url}: {error}") from error
        with socket.socket() as free:
            free.bind(("", 0))
            return workers, int(free.getsockname()[1])
