"""The life of a server process: it listens, responds, and stops on SIGTERM after the requests that it has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nlgrpo.apps.respond.batching import Batcher
from nlgrpo.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes a free port. Raises UserError if the address cannot be used."""
    if not 0 <= port < 65536:
        raise UserError(f"port = {port}: expected a number in [0, 65535]")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def run(app: ASGIApp, batcher: Batcher, listener: socket.socket, *, grace: float) -> int:
    """Serve until SIGTERM or SIGINT. Then respond to the requests that have arrived, for ``grace`` seconds at most.

    Requests that are still waiting after that get status 503. Ctrl-C then ends the process at once. Returns exit
    status 0; 1 if a batch was still running at the end.
    """
    config = uvicorn.Config(app, lifespan="off", timeout_keep_alive=30, log_level="info", server_header=False)
    asyncio.run(_Server(config, batcher, grace).serve([listener]))
    if batcher.close(timeout=1.0):
        return 0
    print("stopped while a batch was running", file=sys.stderr, flush=True)
    os._exit(1)  # the thread of the model cannot be interrupted, and Python would wait for it


class _Server(uvicorn.Server):
    """uvicorn's server with its own handling of signals: exit status 0, and an end that does not wait for ever."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, grace: float) -> None:
        super().__init__(config)
        self.batcher = batcher
        self.grace = grace

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = signal.getsignal(signal.SIGINT)

        def stop(number: int, _: FrameType | None) -> None:
            if not self.should_exit:
                self.should_exit = True
                loop.call_soon_threadsafe(loop.call_later, self.grace, self._end)
            elif number == signal.SIGINT:
                os._exit(130)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        try:
            yield
        finally:
            # All is answered, and the process ends: another SIGTERM must not change its status.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, before)

    def _end(self) -> None:
        """Fail what is still waiting, and close the connections once those answers had time to leave."""
        self.batcher.close(timeout=0)
        asyncio.get_running_loop().call_later(1.0, self._force)

    def _force(self) -> None:
        self.force_exit = True
