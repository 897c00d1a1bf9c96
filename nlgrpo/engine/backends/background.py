"""Work in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run ``work`` in a daemon thread, which cannot keep the process alive. It uses the caller's GPU."""
    future: Future[Result] = Future()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # per thread
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="nlgrpo-background").start()
    return future
