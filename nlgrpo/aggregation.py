"""Several objectives as one: g(R_1, .., R_m) and its gradient, which weighs the m linearised rewards.

The first variation of g(R_1[pi], .., R_m[pi]) is sum_i (dg/dR_i) (dR_i/dpi), with dg/dR_i taken at the values over the
whole batch (IAMA, Alg. 2). Legend: m rewards, P prompts, M samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightedSum:
    """g(R) = sum_i w_i R_i, whose gradient is w wherever the values are.

    ``weights`` is any sequence of m numbers; they need not sum to 1, and a negative one asks for less of its reward.
    Raises ValueError for no weights, and for one that is not finite.
    """

    weights: Sequence[float]

    def __post_init__(self) -> None:
        weights = tuple(float(w) for w in self.weights)
        if not weights or not all(math.isfinite(w) for w in weights):
            raise ValueError(f"WeightedSum(weights={list(weights)}): expected one finite number per reward.")
        object.__setattr__(self, "weights", weights)

    def value(self, values: Tensor) -> Tensor:
        """g at ``values`` (m,), a scalar. A reward of weight 0 is left out, also where its value is not defined."""
        weights = self.gradient(values)
        return torch.where(weights == 0, 0.0, weights * values).sum()

    def gradient(self, values: Tensor) -> Tensor:
        """dg/dR_i at ``values`` (m,), (m,) in their dtype and on their device."""
        if values.shape != (len(self.weights),):
            raise ValueError(
                f"expected one value per weight, ({len(self.weights)},), got {tuple(values.shape)}; "
                "WeightedSum needs as many weights as there are rewards."
            )
        return torch.tensor(self.weights, dtype=values.dtype, device=values.device)


def combine(linear: Tensor, gradient: Tensor) -> Tensor:
    """Linearised reward of the aggregate, sum_i gradient_i linear_i: (m, P, M) and (m,) -> (P, M).

    A reward of gradient 0 is left out, also where its linearised rewards are infinite.
    """
    if linear.ndim != 3 or gradient.shape != linear.shape[:1]:
        raise ValueError(
            f"expected linear (m, P, M) and gradient (m,), got {tuple(linear.shape)} and {tuple(gradient.shape)}."
        )
    scale = gradient.to(linear)[:, None, None]
    return torch.where(scale == 0, 0.0, scale * linear).sum(0)
