"""A reward server in a process of its own, which can be down or hang."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from typing import Any

from support.http_server import JsonServer

from chaos.processes import Forked


def scores(_: str, body: Any) -> tuple[int, Any]:
    """Answer of OpenRLHF's protocol: a reward for each text."""
    values = [sum((i + 1) * len(word) for i, word in enumerate(text.split())) % 7 / 7 for text in body["query"]]
    return 200, {"rewards": values}


class RewardServer:
    """Listens on the same port after each restart."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/rewards"
        self.process: Forked | None = None
        self.recover()

    @property
    def pid(self) -> int:
        return 0 if self.process is None else self.process.pid

    def recover(self) -> None:
        """Start the server, or let it continue."""
        if self.process is None:
            self.process = Forked(self._serve)
        os.kill(self.process.pid, signal.SIGCONT)

    def disturb(self, kind: str, rng: random.Random) -> str:
        """End or stop the server, for a moment or until `recover`; returns for how long."""
        if kind == "server down":
            self.end()
        elif self.process is not None:
            os.kill(self.process.pid, signal.SIGSTOP)
        if rng.random() < 0.5:
            return "until the command ended"
        seconds = rng.uniform(0.2, 3.0)
        time.sleep(seconds)
        self.recover()
        return f"for {seconds:.1f} s"

    def end(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None

    def _serve(self) -> int:
        with JsonServer(scores, self.port):
            threading.Event().wait()
        return 0
