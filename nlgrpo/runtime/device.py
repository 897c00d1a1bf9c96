"""What depends on the device: the compute dtype, the size of a micro-batch, and free memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that ``model.dtype`` names; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """Return the dtype of trained parameters: float32 for a model that computes in bfloat16, else the compute dtype."""
    return torch.float32 if compute == torch.bfloat16 else compute


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that PyTorch can still allocate: free ones, and those that it keeps for itself."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class MicroBatchLimit(NamedTuple):
    """Tokens per forward and backward."""

    tokens: int
    group: int
    """A prompt and its completions are split only above this number of tokens, because each part repeats the prompt."""


def micro_batch_limit(configured: int | None, device: torch.device) -> MicroBatchLimit:
    """Return the limits of a micro-batch: as configured, or the default of the device.

    On a CPU, 1024 tokens fit its caches, but repeating a long prompt costs more than leaving the caches.
    """
    if configured is not None:
        return MicroBatchLimit(configured, configured)
    return MicroBatchLimit(16384, 16384) if device.type == "cuda" else MicroBatchLimit(1024, 8192)
