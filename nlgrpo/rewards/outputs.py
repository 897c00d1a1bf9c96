"""Convert the return values of rewards to tensors, and report invalid ones.

Legend: a batch has ``count`` completions, in groups of ``samples`` M.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RewardFault:
    """Fault of a reward, with the index of the completion (None: the full call)."""

    what: str
    advice: str
    index: int | None = None
    cause: BaseException | None = None


@dataclass(frozen=True)
class Read:
    """What a reward returned. ``values``: in float64, NaN for None, NaN and invalid values."""

    values: Tensor
    faults: list[RewardFault] = field(default_factory=list)
    nans: int = 0
    """Completions for which it returned NaN."""


def values_of(output: Any, count: int, scale: float) -> Read:
    """Read the values (count,) of a reward, and multiply them by ``scale``.

    ``output`` has a number or None for each completion: a list, any other sequence or iterator, a tensor or array of
    shape (count,) or (count, 1), or a list of lists with one number each. Texts, dicts and sets are faults, and so are
    infinite values.
    """
    values = torch.full((count,), math.nan, dtype=torch.float64)
    items = listed(output, count)
    if isinstance(items, str):
        advice = (
            "A reward function returns one float or None per completion; "
            'see the guide "Your own model, data and reward".'
        )
        return Read(values, [RewardFault(f"{items} for {count} completions", advice)])
    faults: list[RewardFault] = []
    nans = 0
    for i, item in enumerate(_without_singletons(items)):
        number = _number(item)
        if number is None:
            continue
        if math.isnan(number):
            nans += 1
        elif math.isfinite(scale * number):
            values[i] = scale * number
        else:
            scaled = "" if scale == 1 else f", scaled by {scale:g}"
            what = f"returned {reprlib.repr(item)}{scaled}"
            faults.append(RewardFault(what, "A value must be a finite number, or None to abstain.", i))
    return Read(values, faults, nans)


def similarities_of(output: Any, count: int, samples: int, scale: float) -> Read:
    """Read the rows (count, M) of the kernel matrices, with NaN for completions for which it abstained.

    A kernel abstains for a completion with None in place of its row, or with a row of None and NaN.
    """
    kernel = torch.full((count, samples), math.nan, dtype=torch.float64)
    advice = 'A kernel returns a list of M floats or None per completion; see the guide "Several users and diversity".'
    rows = listed(output, count, width=samples, items="rows")
    if isinstance(rows, str):
        what = rows.removesuffix(", not a list,")
        return Read(kernel, [RewardFault(f"{what} for {count} completions in groups of {samples}", advice)])
    faults: list[RewardFault] = []
    nans = 0
    for i, row in enumerate(rows):
        if row is None:
            continue
        read = values_of(row, samples, scale)
        kernel[i] = read.values
        nans += read.nans == samples
        faults += [RewardFault(f"{fault.what} in the row of a completion", advice, i) for fault in read.faults[:1]]
        if read.nans and not bool(read.values.isnan().all()):
            faults.append(RewardFault("returned nan in the row of a completion", advice, i))
    grouped = kernel.view(-1, samples, samples)
    absent = grouped.isnan().all(-1)
    grouped[absent[:, None, :].expand_as(grouped)] = math.nan
    faults += [RewardFault(what, advice, i) for i, what in _asymmetric(grouped, absent)] if not faults else []
    return Read(kernel, faults, nans)


def listed(output: Any, count: int, width: int = 1, items: str = "values") -> list[Any] | str:
    """Return the ``count`` items of an output, or what is wrong with it.

    ``width``: numbers per item; ``items``: what they are called.
    """
    kind = type(output).__name__
    if isinstance(output, (str, bytes, bytearray, Mapping, Set)):
        return f"returned a value of type {kind}, not a list,"
    if not hasattr(output, "tolist") and hasattr(output, "to_numpy"):  # a table of pandas
        output = output.to_numpy()
    if isinstance(output, (Tensor, np.ndarray)) and tuple(output.shape[1:]) not in ((), (width,)):
        return f"returned shape {tuple(output.shape)}"
    if isinstance(output, (Tensor, np.ndarray)) and output.ndim == 0:
        return "returned shape ()"
    if hasattr(output, "tolist"):  # also a pandas Series
        try:
            output = output.tolist()
        except (RuntimeError, NotImplementedError) as error:  # a sparse tensor, or one on the meta device
            return f"returned a {kind} that cannot be converted to a list ({str(error).splitlines()[0]})"
    endless = isinstance(output, Iterator)  # a generator may be
    try:
        found = list(islice(output, count + 1)) if endless else list(output)
    except TypeError:
        if hasattr(output, "__iter__"):  # an error of its code
            raise
        return f"returned a value of type {kind}, not a list,"
    if len(found) > count and endless:
        return f"returned more than {count} {items}"
    return found if len(found) == count else f"returned {len(found)} {items}"


def _without_singletons(items: list[Any]) -> list[Any]:
    """Return the numbers of ``[[0.5], [1.0]]``, an output of shape (n, 1); other items as they are."""
    nested = all(item is None or (isinstance(item, (list, tuple)) and len(item) == 1) for item in items)
    return [None if item is None else item[0] for item in items] if nested else items


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
    """Convert a number of any type to float; None stays None, and anything else is infinite, which is a fault."""
    if isinstance(item, (Tensor, np.ndarray)):
        numbers = item.tolist()
        item = numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers
    if isinstance(item, np.generic):
        item = item.item()
    if item is None:
        return None
    if not hasattr(item, "__float__"):  # bool, Decimal, Fraction and others have it; texts and complex numbers have not
        return math.inf
    try:
        return float(item)
    except Exception:  # beyond the largest float, not a number, or whatever the item's own code raises
        return math.inf
