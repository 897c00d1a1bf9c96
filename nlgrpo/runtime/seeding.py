"""What makes a run repeatable: the global random generators, and PyTorch's deterministic algorithms.

The package does not draw from the generators of Python, NumPy and PyTorch, but reward functions may, so a run seeds,
saves and restores them.
"""

from __future__ import annotations

import base64
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nlgrpo.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS adds in one order
NO_VERSION = re.compile(r"(\S+) does not have a deterministic implementation")  # what PyTorch's error says


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of the generators as JSON values; for CUDA, that of the current device."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    state = {"python": random.getstate(), "numpy": numpy, "torch": _to_text(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the generators to a state from `random_state`, which may have been written to JSON."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    key = np.asarray(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"] | {"state": state["numpy"]["state"] | {"key": key}})  # noqa: NPY002
    torch.set_rng_state(_to_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_to_bytes(state["cuda"]))


def _to_text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _to_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# --- deterministic algorithms -----------------------------------------------------------------------------------------


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Context in which every op of PyTorch adds in the same order each time, or raises; without effect unless ``on``.

    It must begin before the process uses CUDA, because cuBLAS reads its setting from the environment when it starts.
    Everything is as before at its end. Raises UserError for another value of CUBLAS_WORKSPACE_CONFIG, and if an op
    has no deterministic version; the message names the op.
    """
    if not on:
        yield
        return
    chosen = os.environ.get(WORKSPACE)
    if chosen is not None and chosen not in WORKSPACES:
        raise UserError(
            f"{WORKSPACE}={chosen}: with train.deterministic expected {' or '.join(WORKSPACES)}; "
            "unset it, and the run sets it itself"
        )
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    memory: Any = torch.utils.deterministic  # a module whose settings are properties
    filled = memory.fill_uninitialized_memory
    os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it costs a pass over each new tensor
    try:
        yield
    except RuntimeError as error:
        op = NO_VERSION.search(str(error))
        if op is None:
            raise
        raise UserError(
            f"train.deterministic: PyTorch has no deterministic version of {op[1]} on this device; "
            "avoid what needs it, or set train.deterministic = false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        if chosen is None:
            del os.environ[WORKSPACE]
