"""Validation of the return values of reward and kernel functions. Shapes: P prompts, M samples per prompt."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from nlgrpo.objectives.diversity import check_kernel
from nlgrpo.rewards.outputs import values_of

_CONVERSION_ERRORS = (TypeError, ValueError, RuntimeError)  # RuntimeError: float() of a tensor with several numbers


def read_rewards(values: Any, count: int, name: str) -> Tensor:
    """Convert the return value of a reward function to float64 (count,), with NaN where it abstained.

    Raises ValueError for anything but one finite number, NaN or None per completion.
    """
    read = values_of(values, count, 1.0)
    if not read.faults:
        return read.values
    fault = read.faults[0]
    expected = "expected a list of one number or None per completion"
    if fault.index is None and " values for " in fault.what:
        raise ValueError(f"reward {name!r} {fault.what}; {expected}.")
    if fault.what in ("returned inf", "returned -inf"):
        raise ValueError(
            f"reward {name!r} is {fault.what.split()[1]} for completion {fault.index}: its advantage would be "
            "infinite; return a finite number, or None to abstain."
        )
    raise ValueError(f"reward {name!r} returned {reprlib.repr(values)}; {expected} (it {fault.what}).")


def read_similarities(values: Any, count: int, samples: int, name: str) -> Tensor:
    """Convert the return value of a kernel function to float64 (P, M, M), with NaN rows and columns where it abstained.

    Raises ValueError for a wrong number of values, and for similarities that are not finite and symmetric.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or len(values) != count:
        raise ValueError(
            f"kernel function {name!r} returned {reprlib.repr(values)} for {count} completions; expected a list of "
            f"{samples} similarities, or None, per completion."
        )
    rows = [[math.nan] * samples if row is None else _row(row, i, samples, name) for i, row in enumerate(values)]
    kernel = torch.tensor(rows, dtype=torch.float64).view(-1, samples, samples)
    present = ~kernel.diagonal(dim1=-2, dim2=-1).isnan()
    both = present[:, :, None] & present[:, None, :]
    check_kernel(kernel.masked_fill(~both, 0.0), f"kernel function {name!r}")
    return kernel.masked_fill(~both, math.nan)


def _row(row: Any, i: int, samples: int, name: str) -> list[float]:
    expected = f"expected its {samples} similarities with the completions of its group, itself included, or None."
    try:
        numbers = _numbers(row)
    except _CONVERSION_ERRORS as error:
        raise ValueError(
            f"kernel function {name!r} returned {reprlib.repr(row)} for completion {i}; {expected}"
        ) from error
    if len(numbers) != samples:
        raise ValueError(f"kernel function {name!r} returned {len(numbers)} numbers for completion {i}; {expected}")
    return numbers


def _numbers(values: Any) -> list[float]:
    """Convert to floats, None to NaN. Raises one of _CONVERSION_ERRORS for any other value."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, (str, bytes, Mapping, Set)):
        raise TypeError(f"a value of type {type(items).__name__} is not a list of numbers")
    numbers = []
    for item in items:
        if isinstance(item, (str, bytes)):
            raise TypeError(f"{item!r} is not a number")
        numbers.append(math.nan if item is None else float(item))
    return numbers
