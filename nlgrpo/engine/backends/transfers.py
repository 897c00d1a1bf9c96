"""Weights for a vLLM server by vLLM's own transfer: NCCL to other GPUs, or CUDA IPC on the same ones.

Needs vLLM in the trainer's environment, and GPUs. It was not run yet: nothing here was measured.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from nlgrpo.engine.backends import vllm_library
from nlgrpo.engine.backends.base import UNKNOWN, EngineError
from nlgrpo.runtime.distributed import Ranks

Result = TypeVar("Result")


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

        Raises EngineError on all ranks if it fails: the connection cannot be used again.
        """
        self.ranks.agree(lambda: self._on_first(self.server.pause))
        try:
            if self.sender is None:
                workers, port = self.ranks.gather_objects(self.ranks.agree(self._rendezvous))[0]
                self.sender = self.ranks.agree(lambda: self._connect(workers, port))
            self.ranks.agree(self._send)
        except EngineError:
            with contextlib.suppress(EngineError):
                self._on_first(lambda: self.server.resume(UNKNOWN))
            raise
        self.ranks.agree(lambda: self._on_first(lambda: self.server.resume(version)))

    def _on_first(self, work: Callable[[], object]) -> None:
        """Call the server on rank 0. Raises EngineError if it fails."""
        if self.ranks.first:
            self._as_engine_error(work)

    def _as_engine_error(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except Exception as error:  # of HTTP and of vLLM
            raise EngineError(f"{self.server.url} does not take weights by {self.kind}: {error}") from error

    def _rendezvous(self) -> tuple[int, int]:
        """Number of the server's workers, and a free port of this host; on rank 0."""
        if not self.ranks.first:
            return 0, 0
        with socket.socket() as free:
            free.bind(("", 0))
            return self._as_engine_error(self.server.workers), int(free.getsockname()[1])

    def _connect(self, workers: int, port: int) -> Any:
        address = socket.gethostbyname(socket.gethostname()) if self.ranks.first else ""
        connect = partial(
            vllm_library.weight_sender, self.kind, self.server.url, self.weights, rank=self.ranks.rank,
            world=1 + workers, address=address, port=port,
        )  # fmt: skip
        return self._as_engine_error(connect)

    def _send(self) -> None:
        try:
            self._as_engine_error(self.sender.send_weights)
        finally:
            self.weights.finish()
