"""Threads that cannot keep the process alive, and whose end is always seen, whatever ends them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result], name: str = "nlgrpo-background") -> Future[Result]:
    """Run ``work`` in a daemon thread, with the caller's GPU, and return the future of its result.

    The future gets whatever ``work`` raises, also KeyboardInterrupt and SystemExit.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be cancelled
    torch = sys.modules.get("torch")  # without it, nothing uses a GPU
    gpu = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if torch is not None and gpu is not None:
                torch.cuda.set_device(gpu)  # per thread
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own, until it is stopped.

    A task that raises KeyboardInterrupt or SystemExit ends ``run_forever``. The task has the exception too, so whoever
    awaits it gets it; the loop continues.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            try:
                return loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                continue

    in_thread(run, name)
    return loop
