"""Global random generators of the process: Python's, NumPy's and PyTorch's.

The package does not draw from them, but reward functions may, so a run seeds, saves and restores them.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


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
