"""The best reward transform for best-of-N and worst-of-N at a given beta: the fixed point of InfAlign's Corollary 2.

The policy's calibrated rewards u have a density f and CDF F. The optimum of W_BoN(F) - beta KL(f || uniform) satisfies

    Phi(u) = -N^2 int_u^1 (v F(v))^{N-1} dv,    f = F' ~ e^{Phi / beta}        (BoN)

and that of W_WoN the same with (1-v)(1-F(v)) in place of v F(v). Fixed-point iteration oscillates for small beta. It is
not needed, because the two equations together are a differential equation,

    beta (log f)' = N^2 (u F)^{N-1},   F(0) = 0,   F(1) = 1,

whose form does not change when u and F are scaled. So F(u) = g(t)/g(t_1) at u = t/t_1 with one curve for all beta,

    dg/dt = p,   d(log p)/dt = s (t g)^{N-1},   t = g = 0 and p = 1 at its start;    s = 1 for BoN, -1 for WoN

which ends at t_1, where x = t^N g^{N-1} reaches N^2/beta. (For WoN, t/t_1 is 1 - u and g/g_1 is 1 - F.) x rises from 0
to infinity, hence each beta has exactly one solution. As an optimum exists, the solution is the optimum, also for WoN,
whose objective is not concave. In terms of tau = log x,

    d(log t) = dtau/d,   d(log g) = r dtau/d,   d(log p) = s x dtau/d,    r = p t/g,   d = N + (N-1) r

This form avoids the pole of g(t) for BoN and the unbounded t for WoN; beta determines where the integration ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nlgrpo.calibration.quadrature import panels_for
from nlgrpo.objectives.base import is_integer, is_number

Interpolant = Callable[[np.ndarray], np.ndarray]

NODES, WEIGHTS = np.polynomial.legendre.leggauss(3)
# smallest beta of best-of-N and worst-of-N: KL(f || uniform) up to 6 and more
LEAST = {False: 1e-20, True: 1e-60}
MOST = 1e12
TOLERANCE = 1e-8  # of the residual
START = np.log(1e-30)  # tau at which t = g and p = 1 up to rounding
BEHIND = 40.0  # distance in tau below min(0, end) from which Phi is constant up to rounding
STEP = 0.02  # in tau, of the interpolation


class FixedPoint:
    """Phi of Corollary 2 for ``n``, ``beta``, best-of-n or ``worst``-of-n, with Phi(1) = 0. Created by `solve`."""

    def __init__(self, n: int, beta: float, worst: bool) -> None:
        self.n = n
        self.beta = beta
        self.worst = worst
        points = self._worst_of_n() if worst else self._best_of_n()
        self._quintic = _quintic(*points)
        self.residual = self._residual()

    def __call__(self, w: Tensor) -> Tensor:
        """Return Phi at u = 1 - ``w``, float64 of any shape. For small beta Phi varies only near w = 0."""
        return torch.from_numpy(self._quintic(w.cpu().numpy())).to(w)

    def _times(self) -> np.ndarray:
        end = np.log(self.n**2 / self.beta)
        start = max(START, min(end, 0.0) - BEHIND)
        return np.arange(end, start, -STEP)

    def _best_of_n(self) -> tuple[np.ndarray, ...]:
        """Return w = 1 - u in ascending order from 0, with Phi and its first two derivatives in w."""
        n = self.n
        tau = self._times()
        curve = _curve(self.n, self.worst)

        # log(1/u), integrated from the end: the difference of two log t would lose its digits for u close to 1
        back = STEP * (np.arange(len(tau) - 1)[:, None] + (1 + NODES) / 2)
        between = curve((tau[0] - back).ravel())
        r = np.exp(_log_r(between)).reshape(back.shape)
        d = n + (n - 1) * r
        steps = STEP / 2 * (1 / d) @ WEIGHTS
        log_u = -np.concatenate(([0.0], steps.cumsum()))

        log_t, log_g, log_p = curve(tau)
        log_F = log_g - log_g[0]
        w = -np.expm1(log_u)
        phi = self.beta * (log_p - log_p[0])
        slope = -(float(n) ** 2) * np.exp((n - 1) * (log_u + log_F))
        r = np.exp(_log_r((log_t, log_g, log_p)))
        curvature = -(n - 1) * slope * (1 + r) * np.exp(-log_u)
        return w, phi, slope, curvature

    def _worst_of_n(self) -> tuple[np.ndarray, ...]:
        """The same for worst-of-n, where w is t/t_1 itself."""
        n = self.n
        log_t, log_g, log_p = _curve(n, self.worst)(self._times()[::-1])
        log_w = log_t - log_t[-1]
        log_rest = log_g - log_g[-1]
        log_w[-1] = 0.0
        slope = -(float(n) ** 2) * np.exp((n - 1) * (log_w + log_rest))
        r = np.exp(_log_r((log_t, log_g, log_p)))
        curvature = (n - 1) * slope * (1 + r) * np.exp(-log_w)
        return np.exp(log_w), self.beta * log_p, slope, curvature

    def _residual(self) -> float:
        """Largest error over u of Corollary 2's equation, Phi against the Phi of the density e^{Phi / beta}."""
        panels, logs = panels_for(lambda u, w: self(w) / self.beta)
        density = logs.exp()
        if self.worst:
            # 1 - F at u
            v = panels.w
            F = panels.above(density) / panels.total(density)
        else:
            v = panels.u
            F = panels.below(density) / panels.total(density)
        integrand = (v * F).clamp(min=0) ** (self.n - 1)
        again = -(float(self.n) ** 2) * panels.above(integrand)
        return float((again - self(panels.w)).abs().max())


@lru_cache(maxsize=512)
def solve(n: int, beta: float, worst: bool = False) -> FixedPoint:
    """Return the fixed point for ``n`` and ``beta``. Its ``residual`` is at most 1e-8.

    Raises ValueError for an n that is not an integer >= 2, for a beta outside [1e-20, 1e12] (worst-of-n:
    [1e-60, 1e12]), and for a larger residual.
    """
    check_n(n, worst)
    name = "won_fp" if worst else "bon_fp"
    if not (is_number(beta) and LEAST[worst] <= beta <= MOST):
        raise ValueError(f"{name}: beta = {beta!r}; expected a number in [{LEAST[worst]:g}, {MOST:g}].")
    solution = FixedPoint(n, float(beta), worst)
    if not solution.residual <= TOLERANCE:
        raise ValueError(
            f"{name}: the fixed point for N = {n}, beta = {beta:g} has a residual of {solution.residual:.1e}, "
            f"over {TOLERANCE:g}; use a smaller N or a larger beta."
        )
    return solution


def check_n(n: int | None, worst: bool) -> None:
    """Raise ValueError for an n that is not an integer >= 2."""
    if not is_integer(n, 2):
        name = "won_fp" if worst else "bon_fp"
        raise ValueError(
            f"{name}: N = {n!r}; expected an integer >= 2, such as '{name}:4'. For N = 1 the best transform is "
            "'identity'."
        )


@lru_cache(maxsize=32)
def _curve(n: int, worst: bool) -> Interpolant:
    """Return the curve of all fixed points: a function from tau = log x (Q,) to log t, log g and log p (3, Q)."""
    from scipy.integrate import solve_ivp  # the import takes half a second

    sign = -1 if worst else 1

    def slopes(tau: float, y: np.ndarray) -> tuple[float, float, float]:
        r = np.exp(y[0] - y[1] + y[2])
        d = n + (n - 1) * r
        return 1 / d, r / d, sign * np.exp(tau) / d

    # near 0, x = t^(2n-1) and log p = s x / (2n-1)
    log_t = START / (2 * n - 1)
    log_p = sign * np.exp(START) / (2 * n - 1)
    end = np.log(n**2 / LEAST[worst]) + STEP
    solution = solve_ivp(
        slopes,
        (START, end),
        (log_t, log_t, log_p),
        method="DOP853",
        dense_output=True,
        # for the interpolation, of order 7
        max_step=0.2,
        rtol=1e-13,
        # log p is tiny at first, and for large beta to the end
        atol=(1e-14, 1e-14, 1e-300),
    )
    curve: Interpolant = solution.sol
    return curve


def _log_r(state: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    log_t, log_g, log_p = state
    log_r: np.ndarray = log_p + log_t - log_g
    return log_r


def _quintic(w: np.ndarray, phi: np.ndarray, slope: np.ndarray, curvature: np.ndarray) -> Interpolant:
    """Interpolate Phi on [0, 1] from its value and two derivatives at nodes ``w``; constant outside the nodes."""
    from scipy.interpolate import BPoly

    values = np.stack((phi, slope, curvature))
    if w[0] > 0:
        w = np.insert(w, 0, 0.0)
        values = np.insert(values, 0, (phi[0], 0, 0), axis=1)
    if w[-1] < 1:
        w = np.append(w, 1.0)
        values = np.append(values, [[phi[-1]], [0], [0]], axis=1)
    # Bernstein coefficients, from both ends of each interval
    h = np.diff(w)
    y, d, e = values[:, :-1]
    c0 = y
    c1 = y + h * d / 5
    c2 = y + 2 * h * d / 5 + h**2 * e / 20
    y, d, e = values[:, 1:]
    c3 = y - 2 * h * d / 5 + h**2 * e / 20
    c4 = y - h * d / 5
    c5 = y
    curve: Interpolant = BPoly(np.stack((c0, c1, c2, c3, c4, c5)), w)
    return curve
