"""The transform of InfAlign's Theorem 1 for any calibrated procedure, at a given beta.

Let both the policy and the reference answer through a procedure with density g and CDF G of the rank (`Procedure`). The
policy's calibrated rewards u have the CDF F. The policy that is best for W(F) - beta KL, W(F) = 1 - int G(F) dG, has

    Phi(u) = dW/dF' = -int_u^1 g(F(v)) g(v) dv,    F' ~ e^{Phi / beta}                           (Eqs. 5 to 7)

or, as a differential equation with two boundary values,

    F' = p,   beta (log p)' = g(F) g(u),   F(0) = 0,   F(1) = 1

With R = 1 - F, integrated down from u = 1, where Phi = R = 0 and log p = s is unknown, every solution has an s for
which R(u = 0) = 1. As the slope of log p is at most a = max(g)^2 / beta, R(u = 0) <= 1 for s = 0 and >= 1 for
s = log(a / (1 - e^{-a})): there is a solution in between, and none outside. The range is searched on a grid, and each
solution is then found by shooting.

g may jump: the integration stops where u or F reaches a jump and resumes with the values of the other side.

If g increases, W is concave and there is one solution, which is the optimum. Otherwise a solution is a stationary point
of W - beta KL: Theorem 1 is a necessary condition. A table such as "distortion:2,0,0,1" can have three, and the best
is returned; one that the grid does not separate from another may be missed. For worst-of-N it is the optimum
(`nlgrpo.calibration.fixed_point`). For CVaR the solution is Phi = min(u, alpha) / alpha^2 for every beta, because
F(u) is at most u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlgrpo.calibration.procedures import CalibratedProcedure
from nlgrpo.calibration.quadrature import logit, panels_for
from nlgrpo.objectives.base import is_number
from nlgrpo.objectives.rank_based import RankBased

# range of beta
LEAST = 1e-12
MOST = 1e12
TOLERANCE = 1e-8  # of the residual
SHOTS = 33  # values of s in the search for solutions
# relative tolerances of the integration, of the search and of the solution
ROUGH = 1e-8
FINE = 1e-13
NEAR = 1e-5  # fraction of a cell, more than the error of the search
BEYOND = 2.0  # R at which an integration ends: it only grows, and must end at 1
LONGEST = {ROUGH: 1.0, FINE: 0.05}  # step in u; the interpolation of the solution is of order 7
CLOSE = 1e-12  # distance to a jump that counts as reached


class StationaryPoint:
    """Phi of Theorem 1 for a procedure at ``beta``, with Phi(1) = 0. Created by `solve`.

    ``others``: number of further stationary points that were found, all with a smaller W - beta KL.
    """

    def __init__(self, procedure: CalibratedProcedure, beta: float) -> None:
        self.procedure = procedure
        self.beta = beta
        found = [_Shot(procedure, beta, s, FINE) for s in _starts(procedure, beta)]
        measured = [(*self._measure(shot), shot) for shot in found]
        self.value, self.residual, self._shot = max(measured, key=lambda each: each[0])
        self.others = len(found) - 1

    def __call__(self, w: Tensor) -> Tensor:
        """Return Phi at u = 1 - ``w``, float64 of any shape."""
        return self._shot.phi(w)

    def _measure(self, shot: _Shot) -> tuple[float, float]:
        """Return W - beta KL, and the largest error over u of Phi, both by quadrature of the density e^{Phi / beta}."""
        beta = self.beta
        g = self.procedure
        edges = [*map(logit, g.breaks), *shot.crossed]
        panels, logs = panels_for(lambda u, w: shot.phi(w) / beta, edges)
        total = panels.total(logs.exp())
        density = logs.exp() / total
        F = panels.below(density).clamp(0, 1)
        again = -panels.above(g.density(F) * g.density(panels.u))
        kl = panels.total(torch.where(density > 0, density * (logs - total.log()), 0.0))
        residual = float((again - shot.phi(panels.w)).abs().max())
        return 1 - g.loss_rate(panels, F) - beta * float(kl), residual


class _Shot:
    """R = 1 - F and Phi as functions of w = 1 - u, integrated from w = 0 with log p = ``s`` there.

    ``end``: R at w = 1, which is 1 for a solution, or 2 if it would be larger. ``crossed``: log(u / w) where F reaches
    a jump of g.
    """

    def __init__(self, procedure: CalibratedProcedure, beta: float, s: float, tolerance: float) -> None:
        from scipy.integrate import OdeSolution, solve_ivp  # the import takes half a second

        breaks = procedure.breaks
        in_u = in_f = len(breaks)  # pieces of g in which u and F are
        w = 0.0
        state = np.zeros(2)
        times = [0.0]
        parts = list[Any]()
        self.crossed = list[float]()
        while w < 1:
            if in_f and 1 - state[0] - breaks[in_f - 1] < CLOSE:
                in_f = self._cross(in_f, w)
                continue
            target = 1 - breaks[in_u - 1] if in_u else 1.0
            if in_u and target - w < CLOSE:
                in_u -= 1
                continue
            solution = solve_ivp(
                _slopes(procedure, beta, s, in_u, in_f),
                (w, target),
                state,
                method="DOP853",
                dense_output=True,
                events=[_reaches(1 - BEYOND), *([_reaches(breaks[in_f - 1])] if in_f else [])],
                max_step=LONGEST[tolerance],
                rtol=tolerance,
                atol=(tolerance / 100, tolerance / 100 * min(1.0, beta)),
            )
            if solution.status < 0:
                raise ValueError(f"{procedure.name}: beta = {beta:g} could not be integrated: {solution.message}")
            times += solution.sol.ts[1:].tolist()
            parts += solution.sol.interpolants
            w = float(solution.t[-1])
            state = solution.y[:, -1]
            if solution.status == 1:
                if len(solution.t_events[0]):
                    break
                in_f = self._cross(in_f, w)
        self.end = float(state[0])
        self._curve = OdeSolution(np.array(times), parts)

    def _cross(self, in_f: int, w: float) -> int:
        """Note that F is at a jump of g, and return its next piece."""
        self.crossed.append(math.log1p(-w) - math.log(w))
        return in_f - 1

    def phi(self, w: Tensor) -> Tensor:
        return torch.from_numpy(self._curve(w.flatten().cpu().numpy())[1].reshape(tuple(w.shape))).to(w)


@lru_cache(maxsize=512)
def solve(objective: RankBased, beta: float) -> StationaryPoint:
    """Return the best stationary point of W - beta KL for a procedure. Its ``residual`` is at most 1e-8.

    Raises ValueError as `Procedure`, for a beta outside [1e-12, 1e12], and for a larger residual.
    """
    procedure = CalibratedProcedure(objective)
    if not (is_number(beta) and LEAST <= beta <= MOST):
        raise ValueError(f"fp:{procedure.name}: beta = {beta!r}; expected a number in [{LEAST:g}, {MOST:g}].")
    solution = StationaryPoint(procedure, float(beta))
    if not solution.residual <= TOLERANCE:
        raise ValueError(
            f"fp:{procedure.name}: the solution for beta = {beta:g} has a residual of {solution.residual:.1e}, over "
            f"{TOLERANCE:g}; use a larger beta, or a smoother weight of the rank."
        )
    return solution


def _slopes(
    procedure: CalibratedProcedure, beta: float, s: float, in_u: int, in_f: int
) -> Callable[[float, np.ndarray], tuple[float, float]]:
    """Return the derivatives of R and Phi in w, with g continued from the given pieces."""
    of_u = procedure.on(in_u)
    of_f = procedure.on(in_f)

    def slopes(w: float, y: np.ndarray) -> tuple[float, float]:
        return math.exp(s + min(float(y[1]), 0.0) / beta), -of_u(1 - w) * of_f(1 - float(y[0]))

    return slopes


def _reaches(level: float) -> Callable[[float, np.ndarray], float]:
    """Return the event in which F falls to ``level``."""

    def event(w: float, y: np.ndarray) -> float:
        return float(1 - y[0] - level)

    event.terminal = True  # type: ignore[attr-defined]
    return event


def _starts(procedure: CalibratedProcedure, beta: float) -> list[float]:
    """Return s of all solutions that the grid separates. Raises ValueError if there is none."""
    a = procedure.highest**2 / beta
    most = math.log(a) - math.log(-math.expm1(-a)) if a > 1e-3 else a / 2
    grid = np.array([0.0, most])
    if not procedure.increases() and a > 0.1:
        grid = np.linspace(0, most, SHOTS)
    inside = [_Shot(procedure, beta, float(s), ROUGH).end >= 1 for s in grid[1:-1]]
    above = [False, *inside, True]  # known at both ends
    cells = [(float(grid[i]), float(grid[i + 1])) for i in range(len(grid) - 1) if above[i] != above[i + 1]]
    found = [s for cell in cells if (s := _root(procedure, beta, *cell)) is not None]
    if not found:
        raise ValueError(
            f"fp:{procedure.name}: no solution was found for beta = {beta:g}; use a larger beta, or a smoother weight "
            "of the rank."
        )
    return found


def _root(procedure: CalibratedProcedure, beta: float, low: float, high: float) -> float | None:
    """Return the s in a cell for which R(u = 0) = 1, or None if the signs at its ends were wrong."""
    from scipy.optimize import brentq

    def excess(s: float, tolerance: float) -> float:
        return _Shot(procedure, beta, s, tolerance).end - 1

    near = NEAR * (high - low)
    low = max(0.0, low - near)
    high = high + near
    if excess(low, ROUGH) * excess(high, ROUGH) < 0:
        rough = brentq(excess, low, high, args=(ROUGH,), xtol=near / 100)
        if excess(rough - near, FINE) * excess(rough + near, FINE) < 0:
            low = rough - near
            high = rough + near
    if excess(low, FINE) * excess(high, FINE) > 0:
        return None
    return float(brentq(excess, low, high, args=(FINE,), xtol=1e-14))
