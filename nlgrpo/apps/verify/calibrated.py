"""Continuous policies as densities of the calibrated reward u in [0, 1], whose density under the reference is 1.

Win rates are integrals over the densities of what best-of-n and worst-of-n choose (InfAlign, Def. 4 and Lemma 5), and
not the integrals of Theorem 3. They are computed by Simpson's rule in s, with u = sin^2(pi s / 2), which places more
points near both ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import cumulative_simpson
from torch import Tensor

S = np.linspace(0.0, 1.0, 40_001)[1:-1]
# u and 1 - u, both exact near 0
U = np.sin(np.pi * S / 2) ** 2
W = np.cos(np.pi * S / 2) ** 2
# du / ds
SLOPE = np.pi / 2 * np.sin(np.pi * S)


def points() -> tuple[Tensor, Tensor]:
    """The grid: u and 1 - u."""
    return torch.from_numpy(U), torch.from_numpy(W)


def below(values: np.ndarray) -> np.ndarray:
    """Integral over u from 0 to each point of the grid; integrands are 0 or finite at the ends, where du/ds = 0."""
    padded = np.concatenate(([0.0], values * SLOPE, [0.0]))
    integral: np.ndarray = cumulative_simpson(padded, dx=S[1] - S[0], initial=0)
    return integral[1:]


@dataclass(frozen=True)
class Density:
    """Density ``f`` of u on the grid, and its CDF ``F``."""

    f: np.ndarray
    F: np.ndarray

    @classmethod
    def of(cls, log_density: Tensor) -> Density:
        """Normalise e^{log_density}."""
        f = np.exp(log_density.numpy() - float(log_density.max()))
        F = below(f)
        return cls(f / F[-1], F[:-1] / F[-1])

    @property
    def kl(self) -> float:
        """KL to the uniform density."""
        log_f = np.log(np.maximum(self.f, 1e-300))
        return float(below(np.where(self.f > 0, self.f * log_f, 0.0))[-1])

    def win_rate(self, n: int, *, worst: bool = False) -> float:
        """P(the best of n beats the best of n of the reference), or the worst the worst."""
        if worst:
            chosen = n * self.f * (1 - self.F) ** (n - 1)
            # 1 - (1 - u)^n
            wins = -np.expm1(n * np.log(W))
        else:
            chosen = n * self.f * self.F ** (n - 1)
            wins = U**n
        return float(below(chosen * wins)[-1])

    def corollary_2(self, n: int, *, worst: bool = False) -> np.ndarray:
        """-n^2 int_u^1 (v F(v))^{n-1} dv, or with (1 - v)(1 - F(v)) for worst-of-n, at the points of the grid."""
        if worst:
            inner = (W * (1 - self.F)) ** (n - 1)
        else:
            inner = (U * self.F) ** (n - 1)
        up_to = below(inner)
        above = up_to[-1] - up_to[:-1]
        return -(float(n) ** 2) * above
