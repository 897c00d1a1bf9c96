"""What depends on the device: the compute dtype, the size of a micro-batch, and free memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nlgrpo.errors import UserError, did_you_mean, nearest


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


GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """Limits of a GPU.

    ``memory``: bytes that PyTorch reports, less than the nominal size. ``flops``: dense bfloat16 operations per second,
    accumulated in float32. ``bandwidth``: bytes per second of the memory. ``device``: regular expression of the name by
    the driver, without "NVIDIA ".
    """

    memory: float
    flops: float
    bandwidth: float
    device: str


GPUS: dict[str, GPU] = {
    "a100-40gb": GPU(39.4 * GIB, 312e12, 1.555e12, r"A100.*40GB"),
    "a100": GPU(79.1 * GIB, 312e12, 2.039e12, r"A100-SXM4?-80GB"),
    "a100-pcie": GPU(79.1 * GIB, 312e12, 1.935e12, r"A100 80GB PCIe"),
    "h100": GPU(79.1 * GIB, 989e12, 3.35e12, r"H100( 80GB HBM3e?)?"),
    "h100-pcie": GPU(79.1 * GIB, 756e12, 2.0e12, r"H100 PCIe"),
    "h100-nvl": GPU(93.0 * GIB, 835e12, 3.9e12, r"H100 NVL"),
    "h200": GPU(139.8 * GIB, 989e12, 4.8e12, r"H200"),
    "h200-nvl": GPU(139.8 * GIB, 835e12, 4.8e12, r"H200 NVL"),
    "b200": GPU(178.3 * GIB, 2250e12, 8.0e12, r"B200"),
    "l4": GPU(22.0 * GIB, 121e12, 0.3e12, r"L4"),
    "l40s": GPU(44.4 * GIB, 362e12, 0.864e12, r"L40S"),
    "a10": GPU(22.0 * GIB, 125e12, 0.6e12, r"A10"),
    "a10g": GPU(22.0 * GIB, 70e12, 0.6e12, r"A10G"),
    "rtx3090": GPU(23.6 * GIB, 71e12, 0.936e12, r"(GeForce )?RTX 3090"),
    "rtx4090": GPU(23.6 * GIB, 165e12, 1.008e12, r"(GeForce )?RTX 4090"),
    "rtx5090": GPU(31.3 * GIB, 209e12, 1.792e12, r"(GeForce )?RTX 5090"),
}


def gpu_named(name: str) -> GPU:
    """Return the GPU of this name in `GPUS`. Raises UserError, with the nearest name, if there is none."""
    key = name.lower().replace("_", "-")
    if key not in GPUS:
        raise UserError(f"unknown GPU {name!r}{did_you_mean(nearest(key, GPUS))} Known are: {', '.join(GPUS)}")
    return GPUS[key]


def gpu_of_device(name: str) -> GPU | None:
    """Return the GPU whose driver reports ``name``; None for an unknown one, or a part of one (MIG)."""
    plain = name.removeprefix("NVIDIA ").strip()
    return next((gpu for gpu in GPUS.values() if re.fullmatch(gpu.device, plain)), None)


def bandwidth(name: str) -> float | None:
    """Return the memory bandwidth of the GPU that the driver calls ``name``, in bytes per second; None as above."""
    gpu = gpu_of_device(name)
    return None if gpu is None else gpu.bandwidth
