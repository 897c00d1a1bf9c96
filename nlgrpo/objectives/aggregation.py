"""Aggregates of several objectives: g(R_1, .., R_m) and its gradient, which weights the m linearised rewards.

The first variation of g(R_1[pi], .., R_m[pi]) is sum_i (dg/dR_i) (dR_i/dpi), with dg/dR_i taken at the values over the
whole batch (IAMA, Alg. 2). Values are (m,), or (m, P) for g at each prompt, E_x g(R_1(x), .., R_m(x)), which is a
different objective. Legend: m rewards, P prompts, M samples per prompt.

A string names an aggregate in a config: "sum", "min", "smooth_min:4"; `parse` reads it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Aggregate(ABC):
    """A function g of the values of m objectives. NaN is the value of a reward that abstained everywhere."""

    def value(self, values: Tensor) -> Tensor:
        """Return g at ``values`` (m,) or (m, P): a scalar, or (P,). Raises ValueError for another shape."""
        return self._value(self._checked(values))

    def gradient(self, values: Tensor) -> Tensor:
        """Return dg/dR_i at ``values``, with their shape, dtype and device. Raises ValueError as `value`."""
        return self._gradient(self._checked(values))

    def _checked(self, values: Tensor) -> Tensor:
        weights = getattr(self, "weights", None)
        if weights is not None and values.shape[:1] != (len(weights),):
            raise ValueError(
                f"expected one value per weight, ({len(weights)},), got {tuple(values.shape)}; "
                f"{type(self).__name__} needs one weight per reward."
            )
        if values.ndim not in (1, 2) or len(values) == 0:
            raise ValueError(f"expected one value per reward, (m,) or (m, P), got {tuple(values.shape)}.")
        return values

    @abstractmethod
    def _value(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _gradient(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class WeightedSum(Aggregate):
    """Weighted sum g(R) = sum_i w_i R_i, with the constant gradient w.

    ``weights``: m numbers, which need not sum to 1; a negative weight minimizes its objective. A reward of weight 0 is
    ignored, and so is NaN. If only NaN is left, g is NaN.

    Raises ValueError for empty or non-finite weights.
    """

    weights: Sequence[float]

    def __post_init__(self) -> None:
        weights = tuple(float(w) for w in self.weights)
        if not weights or not all(math.isfinite(w) for w in weights):
            raise ValueError(f"WeightedSum(weights={list(weights)}): expected one finite number per reward.")
        object.__setattr__(self, "weights", weights)

    def _value(self, values: Tensor) -> Tensor:
        weights = self._gradient(values)
        ignored = (weights == 0) | values.isnan()
        total = torch.where(ignored, 0.0, weights * values).sum(0)
        return total.masked_fill(ignored.all(0) & values.isnan().any(0), torch.nan)

    def _gradient(self, values: Tensor) -> Tensor:
        return _column(self.weights, values).expand_as(values)


@dataclass(frozen=True)
class Min(Aggregate):
    """Minimum g(R) = min_i R_i: train for the worst objective.

    The subgradient is 1 at the smallest value, split evenly between ties, and 0 elsewhere. ``weights`` (m numbers, or
    None for all) only select what is compared: rewards of weight 0 are ignored, and so are NaN. If nothing is left, g
    is NaN and its gradient 0.

    Raises ValueError for weights that are negative, infinite or all 0.
    """

    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        _check_shares(self, self.weights)

    def _compared(self, values: Tensor) -> Tensor:
        """Return the values, with inf for ignored ones."""
        out = values.isnan()
        if self.weights is not None:
            out = out | (_column(self.weights, values) == 0)
        return values.masked_fill(out, torch.inf)

    def _value(self, values: Tensor) -> Tensor:
        least = self._compared(values).amin(0)
        return least.masked_fill(least == torch.inf, torch.nan)

    def _gradient(self, values: Tensor) -> Tensor:
        least = (self._compared(values) == self._value(values)).to(values)
        return least / least.sum(0).clamp(min=1)


@dataclass(frozen=True)
class SmoothMin(Aggregate):
    """g(R) = -1/gamma log sum_i w_i e^{-gamma R_i}, a minimum whose gradient is shared by all values near it.

        dg/dR_i = softmax_i(log w_i - gamma R_i)                                                  (IAMA, Sec. 3)

    ``gamma`` > 0, in 1/reward: gamma -> inf is `Min`, and gamma -> 0 the weighted mean, if the weights sum to 1.
    ``weights``: m numbers >= 0, equal and summing to 1 by default. The gradient sums to 1. Rewards of weight 0 and NaN
    are ignored, and the others share their weight; if nothing is left, g is NaN and its gradient 0.

    Raises ValueError for a gamma that is not positive and finite, and for weights that are negative, infinite or all 0.
    """

    gamma: float
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.gamma, int | float) and math.isfinite(self.gamma) and self.gamma > 0):
            raise ValueError(f"SmoothMin(gamma={self.gamma!r}): expected a finite number > 0, in 1/reward.")
        _check_shares(self, self.weights)

    def _exponents(self, values: Tensor) -> Tensor:
        """Return log w_i - gamma R_i, with -inf for ignored rewards."""
        there = ~values.isnan()
        if self.weights is None:
            weights = torch.ones_like(values[:1])
            total = torch.ones_like(values[0])
        else:
            weights = _column(self.weights, values)
            total = weights.sum(0)
        # those that are left share the weight of all
        shares = weights * (total / (weights * there).sum(0))
        exponents = shares.log() - self.gamma * values
        return torch.where(there & (weights > 0), exponents, -torch.inf)

    def _value(self, values: Tensor) -> Tensor:
        total = self._exponents(values).logsumexp(0)
        return torch.where(total == -torch.inf, torch.nan, -total / self.gamma)

    def _gradient(self, values: Tensor) -> Tensor:
        exponents = self._exponents(values)
        return torch.where((exponents == -torch.inf).all(0), 0.0, exponents.softmax(0))


def parse_aggregate(text: str, weights: Sequence[float]) -> Aggregate:
    """Parse the name of an aggregate: "sum" -> `WeightedSum`, "min" -> `Min`, "smooth_min:GAMMA" -> `SmoothMin`.

    `SmoothMin` gets the weights divided by their sum, so it lies between the smallest value and the weighted mean.

    Raises ValueError for another text, and for weights that do not fit.
    """
    name, _, argument = text.strip().partition(":")
    if text.strip() == "sum":
        return WeightedSum(weights)
    if text.strip() == "min":
        return Min(weights)
    try:
        gamma = float(argument)
    except ValueError:
        gamma = math.nan
    if name != "smooth_min" or not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(f"aggregate {text!r} is not known; expected 'sum', 'min' or 'smooth_min:GAMMA', GAMMA > 0.")
    total = sum(SmoothMin(gamma, weights).weights or ())
    return SmoothMin(gamma, [w / total for w in weights])


def moving_average(before: Sequence[float], values: Tensor, memory: float) -> Tensor:
    """Return memory * before + (1 - memory) * values, (m,). NaN in either is ignored."""
    old = values.new_tensor(before) if before else torch.full_like(values, torch.nan)
    moved = memory * old + (1 - memory) * values
    moved = torch.where(values.isnan(), old, moved)
    return torch.where(old.isnan(), values, moved)


def combine(linear: Tensor, gradient: Tensor) -> Tensor:
    """Return the linearised reward of the aggregate, sum_i gradient_i linear_i: (m, P, M), (m,) or (m, P) -> (P, M).

    A reward with gradient 0 is ignored, also if its linearised rewards are infinite.
    """
    if linear.ndim != 3 or gradient.shape not in (linear.shape[:1], linear.shape[:2]):
        raise ValueError(
            "expected linear (m, P, M) and gradient (m,) or (m, P), "
            f"got {tuple(linear.shape)} and {tuple(gradient.shape)}."
        )
    scale = gradient.to(linear).reshape(len(linear), -1, 1)
    return torch.where(scale == 0, 0.0, scale * linear).sum(0)


def sum_of_applicable(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of each sample's rewards, (m, P, M) -> (P, M), over those that apply at its prompt.

    A reward applies at a prompt if it scores one of the samples there and its weight is not 0. NaN for a sample on
    which one of these abstains, because its sum would lack a part that others have, and at prompts without any.
    """
    column = _column(weights, rewards)
    applies = ~rewards.isnan().all(-1, keepdim=True) & (column != 0)
    total = torch.where(applies, column * rewards, 0.0).sum(0)
    return total.masked_fill(~applies.any(0), torch.nan)


def _column(weights: Sequence[float], values: Tensor) -> Tensor:
    """Return the weights as (m,), (m, 1) or (m, 1, 1), to broadcast over ``values``."""
    column = torch.tensor(weights, dtype=values.dtype, device=values.device)
    others = [1] * (values.ndim - 1)
    return column.view(-1, *others)


def _check_shares(aggregate: Min | SmoothMin, weights: Sequence[float] | None) -> None:
    """Check the weights and store them as a tuple, if there are any."""
    if weights is None:
        return
    shares = tuple(float(w) for w in weights)
    if not all(math.isfinite(w) and w >= 0 for w in shares) or not any(shares):
        raise ValueError(f"{type(aggregate).__name__}(weights={list(shares)}): expected numbers >= 0, not all 0.")
    object.__setattr__(aggregate, "weights", shares)
