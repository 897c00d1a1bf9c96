"""What the card can do: bytes of a copy, operations of a matrix product, and the time to launch a small kernel."""

from __future__ import annotations

import statistics
from argparse import Namespace

import torch
from kernels_side import Case, measure_floor

from gpu_kit.child import Kit
from gpu_kit.measuring import seconds

LAUNCHES = 1000


def run(kit: Kit) -> None:
    args = Namespace(device=kit.device, quick=kit.rehearse)
    dtype = kit.pick(torch.bfloat16, torch.float32)
    rates = {unit: statistics.median(measure_floor(ceiling(unit, dtype), args)["rates"]) for unit in ("B", "FLOP")}
    kit.put(copy_bytes_per_second=rates["B"], product_flops=rates["FLOP"], dtype=str(dtype))
    x = torch.zeros(8, device=kit.device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    kit.put(launch_of_an_add_seconds=seconds(launch, kit.device) / LAUNCHES)


def ceiling(unit: str, dtype: torch.dtype) -> Case:
    """A large copy, or a large product of ``dtype``: `measure_floor` chooses the sizes."""
    return Case("ceiling", {}, dtype, lambda *_: None, {}, (0.0, 0.0), unit=unit)  # type: ignore[arg-type]
