"""PyTorch's deterministic algorithms for a whole run: the same command gives the same bits again, also on a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS adds in one order
NO_VERSION = re.compile(r"(\S+) does not have a deterministic implementation")  # what PyTorch's error says


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Context in which every op of PyTorch adds in the same order each time, or raises; without effect unless ``on``.

    It must begin before the process uses CUDA, because cuBLAS reads its setting from the environment when it starts.
    Everything is as before at its end. Raises ValueError for another value of CUBLAS_WORKSPACE_CONFIG, and if an op
    has no deterministic version; the message names the op.
    """
    if not on:
        yield
        return
    chosen = os.environ.get(WORKSPACE)
    if chosen is not None and chosen not in WORKSPACES:
        raise ValueError(
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
        raise ValueError(
            f"train.deterministic: PyTorch has no deterministic version of {op[1]} on this device; "
            "avoid what needs it, or set train.deterministic = false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        if chosen is None:
            del os.environ[WORKSPACE]
