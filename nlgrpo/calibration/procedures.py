"""Calibrated inference-time procedures (InfAlign, Definition 6): what a rank-based objective does to a policy.

A procedure that reweights a response by the rank of its reward among the policy's own,

    T[pi](y) = g(C(r(y))) pi(y),    g = f / int_0^1 f,    G(z) = int_0^z g

is the rank-based objective with the weight f. If the policy's calibrated rewards have the CDF F, the responses after
the procedure have the CDF G(F(u)), and those of the reference G(u).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nlgrpo.calibration.quadrature import COEFFICIENTS, FINE, LAST, MOST, NODES, ROUNDS, WEIGHTS, Panels
from nlgrpo.objectives.base import Objective
from nlgrpo.objectives.rank_based import RankBased

GRID = 1025  # points at which the sign of f is checked
NARROW = 1e-11  # width below which a piece that is still rough contains a jump
MARGIN = 1e-12  # distance to a jump within which g keeps the value of its side


class CalibratedProcedure:
    """A rank-based ``objective`` as a calibrated procedure; g and G map float64 tensors of ranks to their shape.

    ``breaks``: ranks in (0, 1) at which g jumps, ascending. G is a sum of integrals of g >= 0 and keeps its relative
    precision near 0. A function of the user may jump or have an infinite slope at a few places, which are found by
    halving.

    Raises ValueError for an objective that is not rank-based, an f that is negative or 0 everywhere, and one with more
    places of this kind than can be resolved.
    """

    def __init__(self, objective: Objective) -> None:
        if not isinstance(objective, RankBased):
            raise ValueError(
                f"{objective}: expected a rank-based objective, such as 'bon:4', 'wor:4', 'bop:4.0', 'cvar:0.1' or "
                "'distortion:0,1,2': a calibrated procedure weights a response by its rank alone."
            )
        self.objective = objective
        self._check_sign(torch.linspace(0, 1, GRID, dtype=torch.float64))
        edges, rough = self._resolved()
        self._begin = edges[:-1]
        self._width = edges.diff()
        masses = (self.objective.weight_at(self._nodes(edges[:-1], edges[1:])) @ WEIGHTS) * self._width / 2
        self._total = float(masses.sum())
        self._below = torch.nn.functional.pad(masses.cumsum(0)[:-1], (1, 0))
        self.breaks = objective.jumps or _jumps(edges, rough)

    @property
    def name(self) -> str:
        return self.objective.name

    def density(self, ranks: Tensor) -> Tensor:
        """Return g at ``ranks``."""
        return self.objective.weight_at(ranks) / self._total

    def cdf(self, ranks: Tensor) -> Tensor:
        """Return G at ``ranks``."""
        i = (torch.searchsorted(self._begin, ranks.contiguous(), right=True) - 1).clamp(min=0)
        begin = self._begin[i]
        partial = (self.objective.weight_at(self._nodes(begin, ranks)) @ WEIGHTS) * (ranks - begin) / 2
        return (self._below[i] + partial) / self._total

    def on(self, piece: int) -> Callable[[float], float]:
        """Return g on the ``piece``-th interval between breaks, continued by its values at the ends.

        For single numbers, where a tensor operation would take most of the time: by the polynomials of `_resolved`.
        """
        ends = (0.0, *self.breaks, 1.0)
        low = ends[piece] + MARGIN * (piece > 0)
        high = ends[piece + 1] - MARGIN * (piece < len(self.breaks))
        begins = self._begin.tolist()
        widths = self._width.tolist()
        polynomials = self._polynomials

        def g(rank: float) -> float:
            z = min(max(rank, low), high)
            i = bisect_right(begins, z) - 1
            x = 2 * (z - begins[i]) / widths[i] - 1
            value = 0.0
            for coefficient in polynomials[i]:  # Horner's rule
                value = value * x + coefficient
            return value

        return g

    @cached_property
    def _polynomials(self) -> list[list[float]]:
        """Coefficients of g on each piece in x from -1 to 1, highest power first, without those below rounding."""
        values = self.density(self._nodes(self._begin, self._begin + self._width))
        series = (values @ COEFFICIENTS.T).numpy()
        series[np.abs(series) < 1e-16 * self.highest] = 0
        return [
            np.polynomial.legendre.leg2poly(np.trim_zeros(row, "b"))[::-1].tolist() if row.any() else []
            for row in series
        ]

    @property
    def highest(self) -> float:
        """The largest value of g, at Gauss-Legendre nodes of all pieces and on a grid."""
        return float(self._sampled().max())

    def increases(self) -> bool:
        """Whether g never decreases. The win rate is then a concave function of the policy."""
        return bool((self._sampled().diff() >= 0).all())

    def loss_rate(self, panels: Panels, F: Tensor) -> float:
        """Return int_0^1 G(F(u)) dG(u), the loss rate against the reference; F (J, 16) is the CDF at the nodes."""
        return float(panels.total(self.cdf(F) * self.density(panels.u)))

    def _sampled(self) -> Tensor:
        """Values of g at ascending ranks in [0, 1]."""
        nodes = self._nodes(self._begin, self._begin + self._width).flatten()
        return self.density(torch.cat((nodes, torch.linspace(0, 1, GRID, dtype=torch.float64))).sort().values)

    def _nodes(self, begin: Tensor, end: Tensor) -> Tensor:
        """Gauss-Legendre nodes of intervals, (.., 16)."""
        return begin[..., None] + (end - begin)[..., None] * (1 + NODES) / 2

    def _resolved(self) -> tuple[Tensor, Tensor]:
        """Return edges of pieces (I + 1,) on which f is a polynomial up to rounding, and which were too rough (I,)."""
        edges = torch.tensor((0.0, *self.objective.jumps, 1.0), dtype=torch.float64)
        for _ in range(ROUNDS):
            values = self.objective.weight_at(self._nodes(edges[:-1], edges[1:]))
            self._check_sign(self._nodes(edges[:-1], edges[1:]))
            half = edges.diff() / 2
            total = float((values @ WEIGHTS) @ half)
            if not total > 0:
                raise ValueError(f"{self.objective}: f is 0 everywhere; a procedure needs f > 0 somewhere.")
            split = (values * half[:, None] @ LAST.T).abs().sum(-1) > FINE * total
            if not bool(split.any()):
                break
            if len(split) > MOST:
                raise ValueError(
                    f"{self.objective}: f jumps or bends at too many places to be integrated; use a piecewise smooth f."
                )
            edges = torch.cat((edges, ((edges[:-1] + edges[1:]) / 2)[split])).sort().values
        return edges, edges.diff() < NARROW

    def _check_sign(self, ranks: Tensor) -> None:
        values = self.objective.weight_at(ranks)
        if bool((values < 0).any()):
            at = float(ranks[values < 0][0])
            value = float(values[values < 0][0])
            raise ValueError(
                f"{self.objective}: f({at:g}) = {value:g}; a procedure needs f >= 0, the relative probability that a "
                "response of this rank is chosen."
            )


def _jumps(edges: Tensor, narrow: Tensor) -> tuple[float, ...]:
    """Return the middle of the narrowest piece of each run of ``narrow`` pieces inside (0, 1)."""
    found: list[tuple[float, float]] = []  # width and middle
    previous = -2
    for i in narrow.nonzero().flatten().tolist():
        width = float(edges[i + 1] - edges[i])
        middle = float(edges[i] + edges[i + 1]) / 2
        if i == previous + 1 and found:
            found[-1] = min(found[-1], (width, middle))
        else:
            found.append((width, middle))
        previous = i
    return tuple(middle for _, middle in found if NARROW < middle < 1 - NARROW)
