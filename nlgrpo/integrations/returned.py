"""Validation of the return values of reward and kernel functions. Shapes: P prompts, M samples per prompt."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nlgrpo.objectives.diversity import check_kernel
from nlgrpo.rewards.history import History
from nlgrpo.rewards.outputs import listed, values_of


def read_rewards(values: Any, count: int, history: History) -> Tensor:
    """Convert the return value of a reward function to float64 (count,), with NaN where it abstained.

    ``history``: of this reward; it warns of the share of NaN. Raises ValueError for anything but one finite number, NaN
    or None per completion.
    """
    read = values_of(values, count, 1.0)
    for fault in read.faults[:1]:
        where = "" if fault.index is None else f" for completion {fault.index}"
        raise ValueError(
            f"reward {history.name!r} {fault.what}{where}; expected a list of one finite number, or None to abstain, "
            "per completion."
        )
    if read.nans:
        history.add_nans(read.nans, count)
    return read.values


def read_similarities(values: Any, count: int, samples: int, name: str) -> Tensor:
    """Convert the return value of a kernel function to float64 (P, M, M), with NaN rows and columns where it abstained.

    Raises ValueError for a wrong number of values, and for similarities that are not finite and symmetric.
    """
    rows = listed(values, count, width=samples, items="rows")
    if isinstance(rows, str):
        raise ValueError(
            f"kernel function {name!r} {rows} for {count} completions; expected a list of {samples} similarities, or "
            "None, per completion."
        )
    numbers = torch.full((count, samples), math.nan, dtype=torch.float64)
    for i, row in enumerate(rows):
        if row is None:
            continue
        read = values_of(row, samples, 1.0)
        for fault in read.faults[:1]:
            raise ValueError(
                f"kernel function {name!r} {fault.what} in the row of completion {i}; expected its {samples} "
                "similarities with the completions of its group, itself included, or None."
            )
        numbers[i] = read.values
    kernel = numbers.view(-1, samples, samples)
    present = ~kernel.diagonal(dim1=-2, dim2=-1).isnan()
    both = present[:, :, None] & present[:, None, :]
    check_kernel(kernel.masked_fill(~both, 0.0), f"kernel function {name!r}")
    return kernel.masked_fill(~both, math.nan)
