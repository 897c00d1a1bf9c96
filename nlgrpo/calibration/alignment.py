"""InfAlign-CTRL: calibrate rewards by samples of the reference, transform them, and predict KL and win rates.

    calibrate   reward -> its rank u in [0, 1] among K samples of the reference for the same prompt
    transform   u -> Phi(u), `nlgrpo.calibration.transforms`
    train       any policy optimisation on Phi(u) with a KL penalty of weight beta to the reference

The KL and the win rates at the optimum depend on Phi, beta and N only, not on the model or the reward (Theorem 2). The
curves here are exact for continuous rewards and a policy that reaches its optimum.

Legend: P prompts, M samples per prompt, K samples of the reference per prompt, B values of beta.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nlgrpo.calibration.procedures import CalibratedProcedure
from nlgrpo.calibration.quadrature import Panels, logit, panels_for
from nlgrpo.calibration.transforms import Exponential, Transform, as_transform, parse_transform
from nlgrpo.kernels import ecdf
from nlgrpo.objectives.base import Objective, first, is_integer, is_number
from nlgrpo.objectives.registry import parse

__all__ = [
    "Curve",
    "Transform",
    "alignment_curve",
    "at_kl",
    "calibrate",
    "calibrate_by_median",
    "calibrate_pooled",
    "parse_transform",
    "suggest",
]

FURTHEST = 700.0  # largest |log beta| in the search for a KL
EXPONENTS = (0.1, 500.0)  # range of |t| in the search for the best exp:t
JUMP = 1e-6  # error of a KL beyond which it jumps at the beta that was found
NONE: Mapping[str, CalibratedProcedure] = {}


def calibrate(rewards: Tensor, reference: Tensor) -> Tensor:
    """Return the fraction of reference samples that each reward beats, ties counting 1/2: (P, M), (P, K) -> (P, M).

        C(x, y) = 1/K sum_i [1{r(x, y) > r(x, z_i)} + 1/2 1{r(x, y) = r(x, z_i)}],  z_i ~ pi_ref      (InfAlign, Eq. 12)

    The result is float64, in multiples of 1/(2K). It does not change under an increasing function of the reward
    (Lemma 3). Its error as an estimate of the reference's CDF is below sqrt(log(2/delta) / (2K)) with probability
    1 - delta (Lemma 6).

    Raises ValueError for other shapes, K < 2, and NaN, naming the first.
    """
    for name, x in (("rewards (P, M)", rewards), ("reference (P, K)", reference)):
        if x.ndim != 2:
            raise ValueError(f"expected {name}, got {tuple(x.shape)}.")
    if len(rewards) != len(reference):
        raise ValueError(
            f"expected the same number of prompts, got rewards of {len(rewards)}, reference of {len(reference)}."
        )
    if reference.shape[1] < 2:
        raise ValueError(f"expected K >= 2 samples of the reference per prompt, got {reference.shape[1]}.")
    _refuse_nan(rewards, reference)
    return ecdf.cdf(reference, rewards, "mid")


def calibrate_pooled(rewards: Tensor, pool: Tensor) -> Tensor:
    """Return the fraction of the samples of all prompts that each reward beats, ties counting 1/2; any shape, float64.

        C(r) = 1/S sum_s [1{r > r_s} + 1/2 1{r = r_s}],  r_s: the S rewards of the reference at all prompts

    ``pool``: the S rewards, of any shape. Unlike `calibrate`, the result is an increasing function of the reward, the
    same at every prompt: it keeps how prompts differ, and changes only the scale.

    Raises ValueError for S < 2, and NaN, naming the first.
    """
    if pool.numel() < 2:
        raise ValueError(f"expected S >= 2 samples of the reference over all prompts, got {pool.numel()}.")
    _refuse_nan(rewards, pool)
    return ecdf.cdf(pool.flatten(), rewards.flatten(), "mid").view(rewards.shape)


def calibrate_by_median(rewards: Tensor, reference: Tensor) -> Tensor:
    """Return sigmoid(r - median) with the median of the prompt's reference samples: (P, M), (P, K) -> (P, M), float64.

    If the reward is a Bradley-Terry score in logits, this is the probability that a response is preferred to one of
    median reward. InfAlign, Sec. 5.5, calibrates "based on the median rewards per-prompt" and gives no equation; this
    one is in [0, 1], as its transforms need, and 1/2 at the median. Unlike `calibrate`, it depends on the reward's
    unit. The median of an even number of samples is the mean of the two in the middle.

    Raises ValueError for shapes that do not agree, and NaN, naming the first.
    """
    if rewards.ndim != 2 or reference.ndim != 2 or len(rewards) != len(reference) or not reference.shape[1]:
        shapes = f"{tuple(rewards.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"rewards and reference: expected (P, M) and (P, K) with K >= 1, got {shapes}.")
    _refuse_nan(rewards, reference)
    return (rewards.double() - reference.double().quantile(0.5, dim=1, keepdim=True)).sigmoid()


def _refuse_nan(rewards: Tensor, reference: Tensor) -> None:
    for name, x in (("reward", rewards), ("reference's reward", reference)):
        if bool(x.isnan().any()):
            rows = torch.atleast_2d(x.isnan()).flatten(0, -2)
            raise ValueError(f"{name} of {first(rows)} is NaN; leave out samples without a reward.")


# --- alignment curves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """KL and win rates against the reference at the optimum for each ``beta``; all (B,), float64.

    ``kl`` in nats; win rates in [0, 1]: one sample against one, best of ``n`` against best of ``n``, and worst of ``n``
    against worst of ``n``. ``procedures`` has the win rates (B,) under further procedures, by name.
    """

    n: int
    beta: Tensor
    kl: Tensor
    win_rate: Tensor
    bon_win_rate: Tensor
    won_win_rate: Tensor
    procedures: Mapping[str, Tensor] = field(default_factory=dict)


def alignment_curve(
    transform: Transform | str,
    betas: Iterable[float] | Tensor,
    n: int,
    procedures: Sequence[Objective | str] = (),
) -> Curve:
    """Compute KL and win rates of the optimum for Phi and each beta (InfAlign, Theorem 3). F: CDF of u at the optimum.

        F(u) = int_0^u e^{Phi/beta} / Z,  Z = int_0^1 e^{Phi/beta},       KL = E_F[Phi] / beta - log Z
        win rate 1 - int F,     BoN 1 - N int F^N u^{N-1},     WoN N int (1-F)^N (1-u)^{N-1}

    The identity has the best win rate of a single sample. "log" is best-of-m of the reference, m = 1 + 1/beta: its win
    rate is m/(m+1), for a single sample and under best-of-N, at KL = log m - (m-1)/m.

    ``transform``: a `Transform` or its name (`parse_transform`), such as "exp:10" or "bon_fp:4". "bon_fp" and "won_fp"
    without a number take N = ``n``. A fixed point without a beta is solved for each beta.

    ``procedures``: rank-based objectives or their names, such as "cvar:0.1". Each gives the win rate of the optimum
    against the reference when both answer through the procedure (Theorem 4), with g and G as in `Procedure`:

        win rate 1 - int_0^1 G(F(u)) dG(u)

    Errors are about 1e-12. Raises ValueError for n < 1, another transform, a beta that is not positive and finite, a
    density too concentrated to be integrated, and as `Procedure` for an objective that is not rank-based or has a
    negative weight.
    """
    _check_n(n)
    phi = as_transform(transform, n)
    extra = _named(procedures)
    each = betas.tolist() if isinstance(betas, Tensor) else betas
    return _curve(n, [_aligned(phi, beta, extra) for beta in each], extra)


def at_kl(
    transform: Transform | str, kls: Sequence[float], n: int, procedures: Sequence[Objective | str] = ()
) -> Curve:
    """Compute the curve at given KLs: ``beta`` is solved for, with an error of the KL below 1e-9.

    ``transform`` and ``procedures`` are as in `alignment_curve`. Raises ValueError as `alignment_curve`, for a KL that
    is not positive, and for one that the transform cannot reach or, for a fixed point that is not unique, jumps over.
    """
    _check_n(n)
    phi = as_transform(transform, n)
    extra = _named(procedures)
    return _curve(n, [_aligned(phi, _beta_for(phi, kl), extra) for kl in kls], extra)


def suggest(n: int, kl: float, *, worst: bool = False) -> float:
    """Return the t for which "exp:t" has the highest best-of-n win rate at this KL. ``worst``: worst-of-n, with t < 0.

    Raises ValueError for n < 2, for which the identity is best, and as `at_kl`.
    """
    from scipy.optimize import minimize_scalar  # the import takes half a second

    _check_n(n, least=2)
    sign = -1.0 if worst else 1.0

    def loss(log_t: float) -> float:
        transform = Exponential(sign * math.exp(log_t))
        _, loss_of_best, loss_of_worst = _aligned(transform, _beta_for(transform, kl)).losses(n)
        return math.log(max(loss_of_worst if worst else loss_of_best, 1e-300))

    low = math.log(EXPONENTS[0])
    high = math.log(EXPONENTS[1])
    step = (high - low) / 16
    best = min((low + i * step for i in range(17)), key=loss)
    bounds = max(low, best - step), min(high, best + step)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return sign * math.exp(found.x)


@dataclass(frozen=True)
class _Aligned:
    """The optimum at one beta, and its CDF on panels of [0, 1]."""

    beta: float
    kl: float
    panels: Panels
    F: Tensor

    def losses(self, n: int) -> tuple[float, float, float]:
        """Loss rates against the reference of one sample, best of n, and worst of n, computed without cancellation."""
        F = self.F
        panels = self.panels
        # 1 - (1 - F)^n
        any_below = -torch.expm1(n * torch.log1p(-F))
        single = panels.total(F)
        best = n * panels.total(F**n * panels.u ** (n - 1))
        worst = n * panels.total(any_below * panels.w ** (n - 1))
        return float(single), float(best), float(worst)


def _aligned(transform: Transform, beta: float, procedures: Mapping[str, CalibratedProcedure] = NONE) -> _Aligned:
    """Compute the optimum, on panels that end where a procedure's g jumps, in u or in F."""
    if not (is_number(beta) and beta > 0):
        raise ValueError(f"beta = {beta!r}: expected a finite number > 0, the weight of the KL penalty.")
    phi = transform.at(beta)
    optimum = _on_panels(phi, beta, ())
    breaks: set[float] = set()
    for procedure in procedures.values():
        breaks.update(procedure.breaks)
    if not breaks:
        return optimum
    edges = []
    for b in sorted(breaks):
        edges.append(logit(b))
        edges.append(optimum.panels.crossing(optimum.F, b))
    return _on_panels(phi, beta, edges)


def _on_panels(phi: Transform, beta: float, edges_at: Sequence[float]) -> _Aligned:
    panels, logs = panels_for(lambda u, w: phi.below_top(u, w) / beta, edges_at)
    total = panels.total(logs.exp())
    density = logs.exp() / total
    # avoids 0 * -inf
    mean = panels.total(torch.where(density > 0, density * logs, 0.0))
    F = panels.below(density).clamp(0, 1)
    return _Aligned(beta, max(0.0, float(mean - total.log())), panels, F)


def _curve(n: int, optima: Sequence[_Aligned], procedures: Mapping[str, CalibratedProcedure] = NONE) -> Curve:
    rows = torch.tensor([(a.beta, a.kl, *a.losses(n)) for a in optima], dtype=torch.float64).view(-1, 5)
    beta, kl, single, best, worst = rows.unbind(1)
    extra = {}
    for name, procedure in procedures.items():
        losses = [procedure.loss_rate(a.panels, a.F) for a in optima]
        extra[name] = 1 - torch.tensor(losses, dtype=torch.float64)
    return Curve(n, beta, kl, 1 - single, 1 - best, 1 - worst, extra)


def _beta_for(transform: Transform, kl: float) -> float:
    """Return the beta at which the optimum has this KL, which decreases in beta."""
    from scipy.optimize import brentq

    if not (is_number(kl) and kl > 0):
        raise ValueError(f"KL = {kl!r}: expected a finite number > 0, in nats.")

    def excess(log_b: float) -> float:
        return _aligned(transform, math.exp(log_b)).kl - kl

    # the density at u = 1 is then e times that at u = 1/2
    log_beta = math.log(_rise(transform.at(1.0)))
    value = excess(log_beta)
    step = 1.0 if value > 0 else -1.0
    why = "this is the limit of the transform"
    while abs(step) >= 0.5 and abs(log_beta) < FURTHEST:
        next_log_beta = max(-FURTHEST, min(FURTHEST, log_beta + step))
        try:
            next_value = excess(next_log_beta)
        except ValueError as error:  # the density cannot be integrated there; a smaller step may work
            step = step / 2
            why = str(error).rstrip(".")
            continue
        if next_value * value <= 0:
            beta = math.exp(brentq(excess, log_beta, next_log_beta, xtol=1e-12, rtol=1e-14))
            if abs(_aligned(transform, beta).kl - kl) > JUMP:
                raise ValueError(
                    f"{transform}: no optimum has KL = {kl:g}: the best stationary point changes at beta = {beta:.6g}, "
                    "and the KL jumps; choose a beta instead, or another KL."
                )
            return beta
        log_beta = next_log_beta
        value = next_value
        step = 2 * step
    raise ValueError(f"{transform}: KL = {kl:g} is out of reach, the furthest is {value + kl:.3g}: {why}.")


def _rise(phi: Transform) -> float:
    """Return Phi(1) - Phi(1/2), or Phi(1) - Phi(0) if that is 0."""
    u = torch.tensor([0.5, 0.0], dtype=torch.float64)
    half, whole = (-phi.below_top(u, 1 - u)).tolist()
    return half or whole


def _named(procedures: Sequence[Objective | str]) -> dict[str, CalibratedProcedure]:
    """Return each procedure by its text, or the objective's name."""
    if isinstance(procedures, str):
        raise ValueError(f"procedures = {procedures!r}: expected a sequence, such as ['{procedures}'].")
    return {str(p): CalibratedProcedure(parse(p) if isinstance(p, str) else p) for p in procedures}


def _check_n(n: int, least: int = 1) -> None:
    if not is_integer(n, least):
        raise ValueError(f"N = {n!r}: expected an integer >= {least}, the number of samples to choose from.")
