"""Defaults that depend on the device: the compute dtype and the size of a micro-batch."""

from __future__ import annotations

import torch


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that ``model.dtype`` names; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def micro_batch_tokens(configured: int | None, device: torch.device) -> int:
    """Return the tokens per forward and backward: as configured, or the default of the device."""
    return configured or (16384 if device.type == "cuda" else 1024)
