"""Exponentially tilted objectives. Legend: P prompts, M samples per prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.objectives.base import Objective, first, is_number


@dataclass(frozen=True)
class SoftBestOfN(Objective):
    """Expected reward under the policy tilted by e^{r/tau}, the limit of soft best-of-N for many samples.

        e_j = exp((r_j - max r) / tau),   Z = E e,   R[pi] = E[r e] / Z,   dR/dpi(y_j) = e_j / Z (r_j - R)

    (IAMA, Alg. 4.) tau -> inf gives `Mean`, tau -> 0 the maximum. On a group it is a plug-in estimate with a bias of
    order 1/M.

    Raises ValueError for a tau that is not positive and finite. The methods raise it for infinite rewards.
    """

    tau: float

    def __post_init__(self) -> None:
        if not (is_number(self.tau) and self.tau > 0):
            raise ValueError(f"SoftBestOfN(tau={self.tau!r}): expected a finite number > 0, in units of the reward.")

    @property
    def name(self) -> str:
        return f"soft:{self.tau!r}"

    def _tilt(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return e_j / Z (P, M), r_j - max r (P, M), and R - max r (P, 1).

        The shift by max r cancels in e/Z. It prevents overflow, as r/tau reaches hundreds, and makes r_j - R exactly 0
        in a group of equal rewards.
        """
        _refuse_infinite(self, rewards)
        shifted = rewards - rewards.amax(-1, keepdim=True)
        e = (shifted / self.tau).exp()
        p = torch.full_like(rewards, 1 / rewards.shape[1]) if probs is None else probs
        tilt = e / (p * e).sum(-1, keepdim=True)
        return tilt, shifted, (p * tilt * shifted).sum(-1, keepdim=True)

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        tilt, shifted, expected = self._tilt(rewards, probs)
        return tilt * (shifted - expected)

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        _, _, expected = self._tilt(rewards, probs)
        return (rewards.amax(-1, keepdim=True) + expected)[:, 0]


@dataclass(frozen=True)
class EntropicRisk(Objective):
    """Entropic risk measure: the certainty equivalent of the reward under exponential utility.

        R[pi] = 1/beta log E e^{beta r};      dR/dpi(y_j) = e^{beta r_j} / (beta E e^{beta r})      (IAMA, App. C)

    beta > 0 seeks risk (beta -> inf gives the maximum), beta < 0 avoids it (beta -> -inf: the minimum), beta -> 0 gives
    `Mean`. On a group it is a plug-in estimate with a bias of order 1/M. Exponents are shifted by their maximum, and
    1/beta is subtracted from the first variation, so that its expectation is 0 and small beta loses no digits.

    Raises ValueError for a beta that is 0 or not finite. The methods raise it for infinite rewards.
    """

    beta: float

    def __post_init__(self) -> None:
        if not (is_number(self.beta) and self.beta != 0):
            raise ValueError(f"EntropicRisk(beta={self.beta!r}): expected a finite number other than 0, in 1/reward.")

    @property
    def name(self) -> str:
        return f"erm:{self.beta!r}"

    def _excess(self, rewards: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return s = max beta r over atoms with mass (P, 1), e^{beta r - s} - 1 (P, M), and its expectation (P, 1)."""
        _refuse_infinite(self, rewards)
        exponents = self.beta * rewards
        if probs is None:
            greatest = exponents.amax(-1, keepdim=True)
            excess = (exponents - greatest).expm1()
            return greatest, excess, excess.mean(-1, keepdim=True)
        greatest = exponents.where(probs > 0, -torch.inf).amax(-1, keepdim=True)
        excess = (exponents - greatest).expm1()
        return greatest, excess, torch.where(probs == 0, 0.0, probs * excess).sum(-1, keepdim=True)

    def _linearize(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        _, excess, expected = self._excess(rewards, probs)
        return (excess - expected) / (self.beta * (1 + expected))

    def _value(self, rewards: Tensor, probs: Tensor | None) -> Tensor:
        greatest, _, expected = self._excess(rewards, probs)
        return ((greatest + expected.log1p()) / self.beta)[:, 0]


def _refuse_infinite(objective: Objective, rewards: Tensor) -> None:
    if rewards.isinf().any():
        raise ValueError(f"reward of {first(rewards.isinf())} is infinite; {objective} needs finite rewards.")
