"""InfAlign-CTRL: rewards calibrated by samples of the reference, transformed, and what training for them comes to.

    calibrate   reward -> its rank u in [0, 1] among K samples of the reference for the same prompt
    transform   u -> Phi(u), `nlgrpo.calibration.transforms`
    train       any policy optimisation on Phi(u) with beta KL to the reference

How far that goes, and what it wins, depends on Phi, beta and N alone, not on the model or the reward (Theorem 2): the
curves here are exact for continuous rewards and a policy that reaches its optimum.

Legend: P prompts, M samples per prompt, K samples of the reference per prompt, B values of beta.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.calibration.quadrature import Panels, panels_for
from nlgrpo.calibration.transforms import Exponential, Transform, parse_transform
from nlgrpo.kernels import ecdf
from nlgrpo.objectives.base import first, is_number

__all__ = ["Curve", "Transform", "alignment_curve", "at_kl", "calibrate", "parse_transform", "suggest"]

FURTHEST = 700.0  # |log beta|, in search of a KL
EXPONENTS = (0.1, 500.0)  # among which |t| of exp:t is looked for


def calibrate(rewards: Tensor, reference: Tensor) -> Tensor:
    """Share of the reference's samples that a reward beats, equal ones counted one half: (P, M) by (P, K) -> (P, M).

        C(x, y) = 1/K sum_i [1{r(x, y) > r(x, z_i)} + 1/2 1{r(x, y) = r(x, z_i)}],  z_i ~ pi_ref      (InfAlign, Eq. 12)

    float64, multiples of 1/(2K). Any increasing function of the reward gives the same (Lemma 3); the error against the
    CDF of the reference is below sqrt(log(2/delta) / (2K)) with probability 1 - delta (Lemma 6).

    Raises ValueError for other shapes, K < 2, and NaN, naming the first.
    """
    for name, x in (("rewards (P, M)", rewards), ("reference (P, K)", reference)):
        if x.ndim != 2:
            raise ValueError(f"expected {name}, got {tuple(x.shape)}.")
    if len(rewards) != len(reference):
        raise ValueError(
            f"expected as many prompts in both, got rewards of {len(rewards)}, reference of {len(reference)}."
        )
    if reference.shape[1] < 2:
        raise ValueError(f"expected K >= 2 samples of the reference for each prompt, got {reference.shape[1]}.")
    for name, x in (("reward", rewards), ("reference's reward", reference)):
        if bool(x.isnan().any()):
            raise ValueError(f"{name} of {first(x.isnan())} is NaN; leave out what has no reward.")
    return ecdf.cdf(reference, rewards, "mid")


# --- alignment curves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """How far training goes and what it wins against the reference, at each ``beta``; all (B,), float64.

    ``kl`` in nats; win rates in [0, 1] of a single sample, of the best of ``n`` on both sides, and of the worst.
    """

    n: int
    beta: Tensor
    kl: Tensor
    win_rate: Tensor
    bon_win_rate: Tensor
    won_win_rate: Tensor


def alignment_curve(transform: Transform, betas: Iterable[float] | Tensor, n: int) -> Curve:
    """What the optimum for Phi and each beta comes to (InfAlign, Theorem 3), with F its CDF of calibrated rewards:

        F(u) = int_0^u e^{Phi/beta} / Z,  Z = int_0^1 e^{Phi/beta},       KL = E_F[Phi] / beta - log Z
        win rate 1 - int F,     BoN 1 - N int F^N u^{N-1},     WoN N int (1-F)^N (1-u)^{N-1}

    The identity is best for the win rate; "log" is best-of-m of the reference, m = 1 + 1/beta: it wins m/(m+1), alone
    and under best-of-N, at KL = log m - (m-1)/m. A fixed point without a beta is solved for each.

    Errors are about 1e-12. Raises ValueError for n < 1, a beta that is not positive and finite, and a density that
    crowds too closely to be integrated.
    """
    _check_n(n)
    each = [_aligned(transform, beta) for beta in (betas.tolist() if isinstance(betas, Tensor) else betas)]
    return _curve(n, each)


def at_kl(transform: Transform, kls: Sequence[float], n: int) -> Curve:
    """The curve at given KLs instead of betas: ``beta`` is solved for, to a KL that is right to 1e-9.

    Raises ValueError as `alignment_curve`, for a KL that is not positive, and for one that the transform cannot reach.
    """
    _check_n(n)
    return _curve(n, [_aligned(transform, _beta_for(transform, kl)) for kl in kls])


def suggest(n: int, kl: float, *, worst: bool = False) -> float:
    """The t with which "exp:t" has the largest best-of-n (worst-of-n) win rate at this KL; t < 0 for the worst.

    Raises ValueError for n < 2, for which the identity is best, and as `at_kl`.
    """
    from scipy.optimize import minimize_scalar  # half a second's import

    _check_n(n, least=2)
    sign = -1.0 if worst else 1.0

    def loss(log_t: float) -> float:
        transform = Exponential(sign * math.exp(log_t))
        lost = _aligned(transform, _beta_for(transform, kl)).losses(n)[2 if worst else 1]
        return math.log(max(lost, 1e-300))

    low, high = (math.log(t) for t in EXPONENTS)
    step = (high - low) / 16
    best = min((low + i * step for i in range(17)), key=loss)
    around = max(low, best - step), min(high, best + step)
    return sign * math.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-4}).x)


@dataclass(frozen=True)
class _Aligned:
    """The optimum at one beta, and its CDF on panels of [0, 1]."""

    beta: float
    kl: float
    panels: Panels
    F: Tensor

    def losses(self, n: int) -> tuple[float, float, float]:
        """How often one sample loses against the reference, the best of n, and the worst; none is 1 less something."""
        F, at = self.F, self.panels
        any_below = -torch.expm1(n * torch.log1p(-F))  # 1 - (1 - F)^n
        found = at.total(F), n * at.total(F**n * at.u ** (n - 1)), n * at.total(any_below * at.w ** (n - 1))
        single, best, worst = (float(loss) for loss in found)
        return single, best, worst


def _aligned(transform: Transform, beta: float) -> _Aligned:
    if not (is_number(beta) and beta > 0):
        raise ValueError(f"beta = {beta!r}: expected a finite number > 0, the weight of the KL.")
    phi = transform.at(beta)
    panels, logs = panels_for(lambda u, w: phi.below_top(u, w) / beta)
    total = panels.total(logs.exp())
    density = logs.exp() / total
    mean = panels.total(torch.where(density > 0, density * logs, 0.0))  # where it is 0, its logarithm may be -inf
    F = panels.below(density).clamp(0, 1)
    return _Aligned(beta, max(0.0, float(mean - total.log())), panels, F)


def _curve(n: int, each: Sequence[_Aligned]) -> Curve:
    rows = torch.tensor([(a.beta, a.kl, *a.losses(n)) for a in each], dtype=torch.float64).view(-1, 5)
    beta, kl, *losses = rows.unbind(1)
    return Curve(n, beta, kl, *(1 - loss for loss in losses))


def _beta_for(transform: Transform, kl: float) -> float:
    """The beta at which the optimum is this far; KL falls with beta."""
    from scipy.optimize import brentq

    if not (is_number(kl) and kl > 0):
        raise ValueError(f"KL = {kl!r}: expected a finite number > 0, in nats.")

    def excess(log_beta: float) -> float:
        return _aligned(transform, math.exp(log_beta)).kl - kl

    at = math.log(_rise(transform.at(1.0)))  # an e-fold or so between the median and the best
    value = excess(at)
    step = 1.0 if value > 0 else -1.0
    why = "it has come to its end"
    while abs(step) >= 0.5 and abs(at) < FURTHEST:
        further = max(-FURTHEST, min(FURTHEST, at + step))
        try:
            found = excess(further)
        except ValueError as error:  # no density is known there; one that is less far may do
            step, why = step / 2, str(error).rstrip(".")
            continue
        if found * value <= 0:
            return math.exp(brentq(excess, at, further, xtol=1e-12, rtol=1e-14))
        at, value, step = further, found, 2 * step
    raise ValueError(f"{transform}: KL = {kl:g} is out of reach, the furthest is {value + kl:.3g}: {why}.")


def _rise(phi: Transform) -> float:
    """Phi(1) - Phi(1/2), or where that is 0, Phi(1) - Phi(0)."""
    u = torch.tensor([0.5, 0.0], dtype=torch.float64)
    half, whole = (-phi.below_top(u, 1 - u)).tolist()
    return half or whole


def _check_n(n: int, least: int = 1) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < least:
        raise ValueError(f"N = {n!r}: expected an integer >= {least}, the samples that are chosen from.")
