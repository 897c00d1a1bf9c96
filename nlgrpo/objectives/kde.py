"""Kernel density smoothing of a group's reward distribution, for small M. Legend: P prompts, M samples per prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nlgrpo.kernels.reference import running_sums
from nlgrpo.objectives.base import Objective, first, is_number
from nlgrpo.objectives.rank_based import OfN, RankBased

REACH = 9  # number of bandwidths from a sample beyond which its smoothed step is flat, to 1e-18
NODES = 8  # Gauss-Legendre nodes per interval of at most one bandwidth: relative error 1e-13 for a smooth f


@dataclass(frozen=True)
class Smoothed(Objective):
    """A rank-based ``objective`` on the group's reward distribution, smoothed by a Gaussian kernel.

        C_h(r) = 1/M sum_j Phi((r - r_j) / h)
        R = int r dF(C_h(r));      r~_j = -int_{r_j}^{r_max} f(C_h(r)) dr                    (IAMA, Sec. 4; Silverman)

    ``bandwidth`` is h, or "silverman" for 0.9 min(s, IQR / 1.34) M^(-1/5) of each group (Silverman 1986, eq. 3.31; s
    the standard deviation with M - 1; s alone if the quartiles are equal). h -> 0 gives the plug-in estimate of
    ``objective``.

    C_h varies less from group to group than the empirical CDF, but it is biased: it spreads the rewards by h, so that R
    of "bon:4" is too large. It ignores that a reward may be bounded or take few values. The integrals use 8
    Gauss-Legendre nodes per interval of one bandwidth, and are less accurate where f jumps (`CVaR`). The cost is
    O(M^2). With ``probs`` nothing is smoothed.

    Raises ValueError for an objective that is not rank-based or has the "unbiased" estimator, and for a bandwidth that
    is neither "silverman" nor a finite number > 0. The methods raise it for infinite rewards.
    """

    objective: RankBased
    bandwidth: float | Literal["silverman"] = "silverman"

    def __post_init__(self) -> None:
        unbiased = isinstance(self.objective, OfN) and self.objective.estimator == "unbiased"
        if unbiased or not isinstance(self.objective, RankBased):
            raise ValueError(
                f"Smoothed(objective={self.objective}): expected a rank-based objective with the plug-in estimator, "
                'such as "mean", "bon:4" or "cvar:0.1".'
            )
        if self.bandwidth != "silverman" and not (is_number(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(
                f"Smoothed(bandwidth={self.bandwidth!r}): expected 'silverman' or a finite number > 0, "
                "in units of the reward."
            )

    @property
    def name(self) -> str:
        name = f"{self.objective.name}:kde"
        return name if self.bandwidth == "silverman" else f"{name}:{self.bandwidth!r}"

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        if probs is not None:
            return self.objective.linearize(rewards, probs)
        borders, widths, cdf = self._intervals(rewards)
        parts = widths * self._over_nodes(self.objective._f(cdf))
        above = running_sums(torch.nn.functional.pad(parts, (0, 1)).flip(-1)).flip(-1)
        from_each = above.gather(-1, torch.searchsorted(borders, rewards))
        best = rewards.argmax(-1, keepdim=True)
        return from_each.gather(-1, best) - from_each

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        if probs is not None:
            return self.objective.value(rewards, probs)
        borders, widths, cdf = self._intervals(rewards)
        # F(1), and the integral of F(1) - F(C_h)
        end = self.objective._integral(torch.ones_like(borders[:, -1:]))[:, 0]
        rest = end[:, None, None] - self.objective._integral(cdf)
        return end * borders[:, 0] + (widths * self._over_nodes(rest)).sum(-1)

    def _with_weights(self, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError(f"{self}: the kernel smoother takes no importance weights; use {self.objective} instead.")

    def _uncentred(self, rewards: Tensor, probs: Tensor | None = None) -> Tensor:
        best = rewards.argmax(-1, keepdim=True)
        return self._linearize(rewards, probs) + self.objective._uncentred(rewards, probs).gather(-1, best)

    def _intervals(self, rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the borders of intervals (P, B + 1), their widths (P, B), and C_h at their nodes (P, B, n).

        Every reward is a border. An interval is at most a bandwidth wide, or C_h is flat in it.
        """
        if rewards.isinf().any():
            raise ValueError(f"reward of {first(rewards.isinf())} is infinite; {self} needs finite rewards.")
        h = self._bandwidth(rewards)
        steps = torch.arange(-REACH, REACH + 1, dtype=rewards.dtype, device=rewards.device)
        borders = (rewards[:, :, None] + h[:, :, None] * steps).flatten(1).sort(dim=-1).values
        widths = borders.diff(dim=-1)
        nodes = torch.from_numpy(np.polynomial.legendre.leggauss(NODES)[0]).to(rewards)
        r = borders[:, :-1, None] + widths[:, :, None] * (nodes + 1) / 2
        distance = r[..., None] - rewards[:, None, None, :]
        positive_h = h.clamp(min=torch.finfo(h.dtype).tiny)[:, :, None, None]
        return borders, widths, torch.special.ndtr(distance / positive_h).mean(-1)

    @staticmethod
    def _over_nodes(values: Tensor) -> Tensor:
        """Mean over each interval, (P, B, n) -> (P, B)."""
        weights = torch.from_numpy(np.polynomial.legendre.leggauss(NODES)[1] / 2).to(values)
        return (values * weights).sum(-1)

    def _bandwidth(self, rewards: Tensor) -> Tensor:
        """h of each group, (P, 1); 0 for equal rewards."""
        if self.bandwidth != "silverman":
            return torch.full_like(rewards[:, :1], self.bandwidth)
        M = rewards.shape[1]
        if M == 1:
            return torch.zeros_like(rewards)
        std = rewards.std(-1, keepdim=True)
        quarters = torch.tensor([0.25, 0.75], dtype=rewards.dtype, device=rewards.device)
        low, high = rewards.quantile(quarters, dim=-1)
        between = ((high - low) / 1.34)[:, None]
        least = torch.where(between > 0, torch.minimum(std, between), std)
        equal = (rewards == rewards[:, :1]).all(-1, keepdim=True)
        return torch.where(equal, 0.0, 0.9 * least * M**-0.2)
