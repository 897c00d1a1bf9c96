"""What a reward returned, as numbers, and what of it is none.

Legend: a batch has ``count`` completions, in groups of ``samples`` M.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Fault:
    """What a reward did wrong, and for which completion (None: the whole call)."""

    what: str
    advice: str
    index: int | None = None
    cause: BaseException | None = None


def values_of(output: Any, count: int, scale: float) -> tuple[Tensor, list[Fault]]:
    values = torch.full((count,), math.nan, dtype=torch.float64)
    wrong = None
    kind = type(output).__name__
    if isinstance(output, (Tensor, np.ndarray)) and output.ndim != 1:
        wrong = f"returned shape {tuple(output.shape)}"
    elif hasattr(output, "tolist"):  # a Series of pandas is a list too
        try:
            output = output.tolist()
        except (RuntimeError, NotImplementedError) as error:  # of a tensor that is sparse, or on no device
            wrong = f"returned a {kind} that holds no list ({str(error).splitlines()[0]})"
    if wrong is None and not isinstance(output, (list, tuple)):
        wrong = f"returned a value of type {kind}, not a list,"
    elif wrong is None and len(output) != count:
        wrong = f"returned {len(output)} values"
    if wrong is not None:
        advice = 'A reward function returns one float or None per completion; see the README, "Your own reward".'
        return values, [Fault(f"{wrong} for {count} completions", advice)]

    faults = []
    for i, item in enumerate(output):
        number = _number(item)
        if number is None:
            continue
        if math.isfinite(scale * number):
            values[i] = scale * number
        else:
            scaled = "" if scale == 1 else f", scaled by {scale:g}"
            what = f"returned {reprlib.repr(item)}{scaled}"
            faults.append(Fault(what, "A value is a finite number, or None to abstain.", i))
    return values, faults


def similarities_of(output: Any, count: int, samples: int, scale: float) -> tuple[Tensor, list[Fault]]:
    """The rows of the kernel matrices, (count, M); NaN in those of completions for which it abstained."""
    rows = list(output) if isinstance(output, (list, tuple, Tensor, np.ndarray)) else None
    kernel = torch.full((count, samples), math.nan, dtype=torch.float64)
    advice = 'A kernel returns for each completion a list of M floats, or None; see the README, "Diversity".'
    if rows is None or len(rows) != count:
        came = f"a value of type {type(output).__name__}" if rows is None else f"{len(rows)} rows"
        return kernel, [Fault(f"returned {came} for {count} completions in groups of {samples}", advice)]
    faults = []
    for i, row in enumerate(rows):
        if row is None:
            continue
        numbers, wrong = values_of(row, samples, scale)
        kernel[i] = numbers
        faults += [Fault(f"{fault.what} in the row of a completion", advice, i) for fault in wrong[:1]]
    grouped = kernel.view(-1, samples, samples)
    absent = torch.tensor([row is None for row in rows]).view(-1, samples)
    grouped[absent[:, None, :].expand_as(grouped)] = math.nan
    faults += [Fault(what, advice, i) for i, what in _odd(grouped, absent)] if not faults else []
    return kernel, faults


def _odd(kernel: Tensor, absent: Tensor) -> list[tuple[int, str]]:
    """The completions in whose row a similarity is missing or is not that of the same two in the other order."""
    there = ~(absent[:, :, None] | absent[:, None, :])
    far = (kernel - kernel.mT).abs() > 1e-4 * kernel.nan_to_num().abs().amax((-2, -1), keepdim=True)
    found = []
    for group, j, i in (there & (far | kernel.isnan())).nonzero().tolist():
        pair = f"{kernel[group, j, i]:g} for samples {j} and {i}, {kernel[group, i, j]:g} for {i} and {j}"
        found.append((group * kernel.shape[1] + j, f"returned {pair}"))
    return found


def _number(item: Any) -> float | None:
    """float(item) of a number or bool, None of None, NaN of what is no number."""
    if isinstance(item, (Tensor, np.ndarray, np.generic)):
        item = item.item() if item.ndim == 0 else math.nan
    if item is None:
        return None
    try:
        return float(item) if isinstance(item, (int, float)) else math.nan
    except OverflowError:  # an int beyond the largest float
        return math.inf
