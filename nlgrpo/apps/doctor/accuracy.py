"""Errors of results and gradients, compared with float64 and measured in units of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nlgrpo.apps.doctor.findings import Result, attempt

Pair = tuple[Tensor, Tensor]  # a result, and its true value


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal numbers in float32, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def evaluate(op: Callable[..., Any], inputs: Sequence[Tensor], gradients: bool = True) -> list[Tensor]:
    """Results of ``op(*inputs)``, and the gradients of their fixed random sum by all floating-point ``inputs``."""
    inputs = [x.detach().clone().requires_grad_(gradients and x.is_floating_point()) for x in inputs]
    out = op(*inputs)
    results = [out] if isinstance(out, Tensor) else list(out)
    found = [x.detach() for x in results]
    if gradients:
        results = [x for x in results if x.requires_grad]
        upstream = [normal(*x.shape, seed=100 + i, device=str(x.device)).to(x) for i, x in enumerate(results)]
        found += torch.autograd.grad(results, [x for x in inputs if x.requires_grad], upstream)
    return found


def against_float64(
    ours: Callable[..., Any], truth: Callable[..., Any], inputs: Sequence[Tensor], *, gradients: bool = True
) -> list[Pair]:
    """Results and gradients of ``ours`` on ``inputs``, paired with those of ``truth`` on the same in float64."""
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    found = evaluate(ours, inputs, gradients)
    expected = evaluate(truth, exact, gradients)
    return list(zip(found, expected, strict=True))


def roundings(pairs: Sequence[Pair]) -> float:
    """Largest |ours - truth| / (eps max |truth|), where eps is that of the dtype of ``ours``.

    Infinite for results that are not finite or have another shape, and for integers that are not equal.
    """
    return max(_roundings(*pair) for pair in pairs)


def _roundings(ours: Tensor, truth: Tensor) -> float:
    if ours.shape != truth.shape:
        return math.inf
    if not ours.is_floating_point():
        return 0.0 if bool((ours == truth).all()) else math.inf
    if not ours.numel():
        return 0.0
    scale = float(truth.abs().max()) or 1.0
    error = float((ours.double() - truth.double()).abs().max()) / scale / torch.finfo(ours.dtype).eps
    return error if math.isfinite(error) else math.inf


def judge(pairs: Sequence[Pair], bound: float, advice: str) -> Result:
    """Return ok if the error is at most ``bound`` roundings, else failed with ``advice``."""
    error = roundings(pairs)
    detail = f"error {error:.2g} eps (bound {bound:g})"
    numbers = {"error_eps": error if math.isfinite(error) else None, "bound_eps": bound}
    if error > bound:
        return Result("failed", detail, advice, numbers=numbers)
    return Result("ok", detail, numbers=numbers)


def compare(part: str, pairs: Callable[[], Sequence[Pair]], bound: float, advice: str) -> Result:
    """Return `judge`'s result of ``pairs()`` under the name ``part``; failed if the call raises."""
    return attempt(part, lambda: judge(pairs(), bound, advice), advice)
