"""Integrals over [0, 1] of densities that may concentrate at either end: Gauss-Legendre panels in z = log(u / (1 - u)).

Both u and w = 1 - u have full relative precision everywhere, down to e^-80 from an end. A density that is e^1000 times
higher at u = 1 than at u = 0, or as narrow as 1e-17, is therefore integrated accurately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

ORDER = 16  # nodes per panel
REACH = 80.0  # panels cover |z| <= REACH; the uniform distribution has a mass of e^-80 outside
FINE = 1e-13  # largest fraction of the integral in a panel's last two coefficients
MOST = 10_000  # no more halving beyond this number of panels
ROUNDS = 60  # of halving
ROUGH = 1e-6  # fraction of the integral that may stay unresolved


def _tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return nodes and weights on [-1, 1], and matrices for integrals from -1 to each node and Legendre coefficients.

    The polynomial through values at the nodes is sum_k c_k P_k, c_k = (2k + 1)/2 sum_i weight_i P_k(x_i) value_i. The
    integral of P_k is (P_{k+1} - P_{k-1}) / (2k + 1), that of P_0 is x + 1.
    """
    x, weights = np.polynomial.legendre.leggauss(ORDER)
    P = np.polynomial.legendre.legvander(x, ORDER)
    k = np.arange(ORDER)
    # (k, i)
    coefficients = (k[:, None] + 0.5) * weights * P[:, :-1].T
    # (i, k)
    of_0 = (x + 1)[:, None]
    of_others = (P[:, 2:] - P[:, :-2]) / (2 * k[1:] + 1)
    integrals = np.concatenate((of_0, of_others), axis=1)
    return (
        torch.from_numpy(x),
        torch.from_numpy(weights),
        torch.from_numpy(np.ascontiguousarray(integrals @ coefficients)),
        torch.from_numpy(np.ascontiguousarray(coefficients)),
    )


NODES, WEIGHTS, INTEGRALS, COEFFICIENTS = _tables()
LAST = COEFFICIENTS[-2:]


class Panels:
    """Nodes of all panels, (J, 16) in ascending order: ``u``, and ``w`` = 1 - u, float64."""

    def __init__(self, edges: Tensor) -> None:
        self._edges = edges
        half = edges.diff()[:, None] / 2
        z = edges[:-1, None] + half * (1 + NODES)
        self.u = z.sigmoid()
        self.w = (-z).sigmoid()
        self._steps = half * self.u * self.w  # du = steps * weight

    def total(self, values: Tensor) -> Tensor:
        """Integral over [0, 1] of a function given at the nodes, a scalar."""
        return (values * self._steps @ WEIGHTS).sum()

    def below(self, values: Tensor) -> Tensor:
        """Integral from 0 to each node, (J, 16)."""
        steps = values * self._steps
        before = torch.nn.functional.pad((steps @ WEIGHTS).cumsum(0)[:-1], (1, 0))
        return steps @ INTEGRALS.T + before[:, None]

    def above(self, values: Tensor) -> Tensor:
        """Integral from each node to 1, (J, 16)."""
        return self.total(values) - self.below(values)

    def rough(self, values: Tensor) -> Tensor:
        """Fraction of the whole integral in the last two coefficients of each panel, (J,)."""
        last = (values * self._steps @ LAST.T).abs().sum(-1)
        return last / self.total(values)

    def crossing(self, values: Tensor, level: float) -> float:
        """Return the z at which an increasing function, given at the nodes, reaches ``level``."""
        from scipy.optimize import brentq  # the import takes half a second

        coefficients = values @ COEFFICIENTS.T
        # its values at the upper edges, where every P_k is 1
        at_edges = coefficients.sum(-1)
        above = (at_edges >= level).nonzero()
        if not len(above):
            return float(self._edges[-1])
        j = int(above[0])
        low, high = self._edges[j : j + 2].tolist()
        series = coefficients[j].numpy()

        def excess(x: float) -> float:
            return float(np.polynomial.legendre.legval(x, series)) - level

        if excess(-1.0) >= 0:
            return low
        x = brentq(excess, -1.0, 1.0, xtol=1e-15)
        return low + (high - low) * (1 + x) / 2


def logit(u: float) -> float:
    """Return z of ``u`` in (0, 1)."""
    return math.log(u) - math.log1p(-u)


def panels_for(
    log_density: Callable[[Tensor, Tensor], Tensor], edges_at: Iterable[float] = ()
) -> tuple[Panels, Tensor]:
    """Return panels that resolve a density, and its logarithm at their nodes minus the maximum.

    ``log_density`` maps u and 1 - u to a tensor of their shape, which may contain -inf. Panels in which it is not
    smooth, as at a kink or a jump, are halved until their error is negligible. ``edges_at``: values of z at which
    panels end, where another integrand is not smooth.

    Raises ValueError for a density that is too narrow for the panels or too rough to be resolved.
    """
    edges = torch.linspace(-REACH, REACH, 321, dtype=torch.float64)
    extra = torch.tensor([z for z in edges_at if abs(z) < REACH], dtype=torch.float64)
    edges = torch.cat((edges, extra)).unique()
    for _ in range(ROUNDS):
        panels = Panels(edges)
        logs = log_density(panels.u, panels.w)
        logs = logs - logs.max()
        density = logs.exp()
        rough = panels.rough(density)
        split = rough > FINE
        if not bool(split.any()) or len(rough) > MOST:
            break
        middles = (edges[:-1] + edges[1:])[split] / 2
        edges = torch.cat((edges, middles)).sort().values
    at_ends = density[[0, -1], [0, -1]].sum()
    outside = float(at_ends / panels.total(density)) * math.exp(-REACH)
    # ROUGH allows for a transform that rounds to float32
    if not (outside < FINE and float(rough.sum()) < ROUGH):
        raise ValueError(
            "the density exp(Phi / beta) is too narrow or too rough to be integrated; "
            "use a piecewise smooth transform with few pieces, or a larger beta."
        )
    return panels, logs
