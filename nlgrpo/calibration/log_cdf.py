"""Smoothers for the logarithm of an empirical CDF, which is -inf below the smallest sample."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

STEEPEST = 700.0  # largest b times the range of the samples: e^-700 is still positive in float64


@dataclass(frozen=True)
class Exponential:
    """Fitted curves log F(r) = -a e^{-b (r - origin)}: amplitude, rate and origin of each row, (P,) float64 each."""

    a: Tensor
    b: Tensor
    origin: Tensor

    def __call__(self, r: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return log F at rewards ``r`` (P, Q), or at (S,) with the row index of each."""
        if rows is None:
            a = self.a[:, None]
            b = self.b[:, None]
            origin = self.origin[:, None]
        else:
            a = self.a[rows]
            b = self.b[rows]
            origin = self.origin[rows]
        return -a * torch.exp(-b * (r.double() - origin))


def add_half(cdf: Tensor, size: Tensor | int) -> Tensor:
    """Return log((count + 1/2) / (M + 1)) with count = M ``cdf``, which is finite and below 0 everywhere."""
    return ((cdf * size + 0.5) / (size + 1)).log()


def fit_exponential(samples: Sequence[Tensor], cdf: Sequence[Tensor], weights: Sequence[Tensor] | None) -> Exponential:
    """Fit a and b of each row by least squares, minimising sum_j w_j (log F(r_j) + a e^{-b r_j})^2.

    The sum runs over all samples with F > 0, ties included (vBoN, Sec. 6 and its footnote on f(x) = -a exp(-b x)).
    ``samples``, ``cdf`` and ``weights`` (1 by default) contain one tensor per row.

    Raises ValueError for a row without two different finite samples with F > 0, and if the fit does not converge.
    """
    fits = []
    for row, (r, F) in enumerate(zip(samples, cdf, strict=True)):
        w = torch.ones_like(F) if weights is None else weights[row]
        kept = (F > 0) & r.isfinite() & (w > 0)
        rewards = r[kept].double().cpu().numpy()
        log_F = F[kept].log().cpu().numpy()
        try:
            fits.append(_fit(rewards, log_F, w[kept].cpu().numpy()))
        except ValueError as error:
            raise ValueError(f"row {row}: {error}; use more samples, or smoother='add-half'.") from None
    device = samples[0].device if samples else None
    a, b, origin = torch.tensor(fits, dtype=torch.float64, device=device).view(-1, 3).T
    return Exponential(a, b, origin)


def _fit(r: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, float, float]:
    """Return a, b and the origin of y = -a e^{-b (r - origin)}, fitted with r scaled to x in [0, 1]."""
    from scipy.optimize import OptimizeWarning, curve_fit  # the import takes half a second

    spread = np.ptp(r) if len(r) else 0.0
    if not 0 < spread < np.inf:
        raise ValueError("an exponential fit of log F needs two different finite samples with F > 0")
    low = r.min()
    x = (r - low) / spread

    def curve(x: np.ndarray, a: float, b: float) -> np.ndarray:
        return -a * np.exp(-b * x)

    def slopes(x: np.ndarray, a: float, b: float) -> np.ndarray:
        decay = np.exp(-b * x)
        return np.stack((-decay, a * x * decay), axis=-1)

    # exact at the smallest sample; the rate is a guess
    start = (-y[x.argmin()], 1.0)
    bounds = ((0.0, 0.0), (np.inf, STEEPEST))
    accuracy = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12, "max_nfev": 1000}
    try:
        with warnings.catch_warnings():
            # about the covariance, which is not used
            warnings.simplefilter("ignore", OptimizeWarning)
            (a, b), _ = curve_fit(curve, x, y, p0=start, sigma=w**-0.5, bounds=bounds, jac=slopes, **accuracy)
    except RuntimeError as error:
        raise ValueError(f"no exponential fits log F ({error})") from None
    return float(a), float(b / spread), float(low)
