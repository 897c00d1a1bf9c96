"""Memory bandwidth of GPUs: the roofline of the kernels, which all read or write more than they compute."""

from __future__ import annotations

import re

# Name by nvidia-smi, and bytes per second by NVIDIA's data sheets.
BANDWIDTHS = {
    r"A100.*40GB": 1.555e12,
    r"A100 80GB PCIe": 1.935e12,
    r"A100-SXM4-80GB": 2.039e12,
    r"H100 PCIe": 2.0e12,
    r"H100 NVL": 3.9e12,
    r"H100 80GB HBM3": 3.35e12,
    r"H200": 4.8e12,
    r"B200": 8.0e12,
    r"L40S": 0.864e12,
    r"(GeForce )?RTX 4090": 1.008e12,
}


def bandwidth(name: str) -> float | None:
    """Return the memory bandwidth of a GPU in bytes per second; None for an unknown one, or a part of one (MIG)."""
    plain = name.removeprefix("NVIDIA ").strip()
    return next((value for pattern, value in BANDWIDTHS.items() if re.fullmatch(pattern, plain)), None)
