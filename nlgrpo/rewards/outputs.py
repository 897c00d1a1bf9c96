"""Convert the return values of rewards to tensors, and report invalid ones.

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
    """Fault of a reward, with the index of the completion (None: the full call)."""

    what: str
    advice: str
    index: int | None = None
    cause: BaseException | None = None


def values_of(output: Any, count: int, scale: float) -> tuple[Tensor, list[Fault]]:
    """Values (count,) of a reward times ``scale``, in float64, NaN for None and for invalid values; and the faults."""
    values = torch.full((count,), math.nan, dtype=torch.float64)
    wrong = None
    kind = type(output).__name__
    if isinstance(output, (Tensor, np.ndarray)) and output.ndim != 1:
        wrong = f"returned shape {tuple(output.shape)}"
    elif hasattr(output, "tolist"):  # also a pandas Series
        try:
            output = output.tolist()
        except (RuntimeError, NotImplementedError) as error:  # a sparse tensor, or one on the meta device
            wrong = f"returned a {kind} that cannot be converted to a list ({str(error).splitlines()[0]})"
    if wrong is None and not isinstance(output, (list, tuple)):
        wrong = f"returned a value of type {kind}, not a list,"
    elif wrong is None and len(output) != count:
        wrong = f"returned {len(output)} values"
    if wrong is not None:
        advice = (
            "A reward function returns one float or None per completion; "
            'see the guide "Your own model, data and reward".'
        )
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
            faults.append(Fault(what, "A value must be a finite number, or None to abstain.", i))
    return values, faults


def similarities_of(output: Any, count: int, samples: int, scale: float) -> tuple[Tensor, list[Fault]]:
    """Rows (count, M) of the kernel matrices, with NaN for completions for which it abstained; and the faults."""
    rows = list(output) if isinstance(output, (list, tuple, Tensor, np.ndarray)) else None
    kernel = torch.full((count, samples), math.nan, dtype=torch.float64)
    advice = 'A kernel returns a list of M floats or None per completion; see the guide "Several users and diversity".'
    if rows is None or len(rows) != count:
        returned = f"a value of type {type(output).__name__}" if rows is None else f"{len(rows)} rows"
        return kernel, [Fault(f"returned {returned} for {count} completions in groups of {samples}", advice)]
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
    faults += [Fault(what, advice, i) for i, what in _asymmetric(grouped, absent)] if not faults else []
    return kernel, faults


def _asymmetric(kernel: Tensor, absent: Tensor) -> list[tuple[int, str]]:
    """Find completions whose row has a missing similarity or one that differs from its transpose; with a message."""
    present = ~(absent[:, :, None] | absent[:, None, :])
    differs = (kernel - kernel.mT).abs() > 1e-4 * kernel.nan_to_num().abs().amax((-2, -1), keepdim=True)
    found = []
    for group, j, i in (present & (differs | kernel.isnan())).nonzero().tolist():
        pair = f"{kernel[group, j, i]:g} for samples {j} and {i}, {kernel[group, i, j]:g} for {i} and {j}"
        found.append((group * kernel.shape[1] + j, f"returned {pair}"))
    return found


def _number(item: Any) -> float | None:
    """Convert a number or bool to float; None stays None, anything else is NaN."""
    if isinstance(item, (Tensor, np.ndarray, np.generic)):
        item = item.item() if item.ndim == 0 else math.nan
    if item is None:
        return None
    try:
        return float(item) if isinstance(item, (int, float)) else math.nan
    except OverflowError:  # an int beyond the largest float
        return math.inf
