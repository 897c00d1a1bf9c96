"""Policy loss in Triton: loss, gradient and statistics in one pass over the tokens, in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_its_device
from .reference import MAX_LOG_RATIO, PolicyLossSettings

BLOCK = 1024
CUT = tl.constexpr(MAX_LOG_RATIO)
KINDS = {"k1": 1, "k2": 2, "k3": 3, "k3_iw": 4}
SURROGATES = {"ppo": 0, "cispo": 1, "reinforce": 2}


@triton.jit
def _k3(d):
    """Return e^d - 1 - d. Near 0, where the difference would lose digits, by its series (truncation error 1e-9)."""
    series = 1.0 + d / 3 * (1.0 + d / 4 * (1.0 + d / 5 * (1.0 + d / 6 * (1.0 + d / 7 * (1.0 + d / 8 * (1.0 + d / 9))))))
    return tl.where(tl.abs(d) < 0.5, d * d / 2 * series, tl.exp(d) - 1.0 - d)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["T", "low", "high", "dual", "beta"])
def _policy_loss_kernel(
    logprob, old_logprob, advantages, log_ratio, ref_logprob, mask,
    loss, through_ratio, through_kl, through_score, statistics, T, low, high, dual, beta,
    KIND: tl.constexpr, SURROGATE: tl.constexpr, HAS_LOG_RATIO: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """KIND 0: no reference. ``statistics``, one row per program: low, high and dual clips, largest ratio, sum of KL."""
    program = tl.program_id(0).to(tl.int64)
    t = program * BLOCK + tl.arange(0, BLOCK)
    inside = t < T
    keep = inside
    if HAS_MASK:
        keep = inside & (tl.load(mask + t, mask=inside, other=0) != 0)
    lp = tl.load(logprob + t, mask=keep, other=0.0).to(tl.float32)
    if HAS_LOG_RATIO:
        lr = tl.load(log_ratio + t, mask=keep, other=0.0).to(tl.float32)
    else:
        lr = tl.where(keep, lp - tl.load(old_logprob + t, mask=keep, other=0.0).to(tl.float32), 0.0)
    A = tl.load(advantages + t, mask=keep, other=0.0).to(tl.float32)

    rho = tl.exp(_least(lr, CUT))
    none = tl.zeros((BLOCK,), tl.int1)
    if SURROGATE == 0:
        plain, clipped = rho * A, _least(_largest(rho, low), high) * A
        value = -_least(plain, clipped)
        grad = tl.where(plain > clipped, 0.0, -A)  # by rho; if both are equal, rho is not clipped or A is 0
        past_low, past_high, past_dual = (rho < low) & (A < 0), (rho > high) & (A > 0), (A < 0) & (rho > dual)
        value, grad = tl.where(past_dual, -dual * A, value), tl.where(past_dual, 0.0, grad)
    else:
        past_low, past_high, past_dual = none, none, none
        factor = A
        if SURROGATE == 1:
            past_high = rho > high
            factor = tl.where(A == 0, 0.0, _least(rho, high) * A)
        grad = tl.zeros((BLOCK,), tl.float32)
        value = -factor * tl.where((factor == 0) & (lp == float("-inf")), 0.0, lp)
        tl.store(through_score + t, tl.where(keep, -factor, 0.0), mask=inside)
    kl = tl.zeros((BLOCK,), tl.float32)
    if KIND > 0:
        d = tl.load(ref_logprob + t, mask=keep, other=0.0).to(tl.float32) - lp
        cut = _least(d, CUT)
        if KIND == 1:
            kl, slope = -d, tl.full((BLOCK,), 1.0, tl.float32)
        elif KIND == 2:
            kl, slope = d * d / 2, -d
        else:
            k3 = _k3(cut)
            slope = tl.where(d > CUT, 0.0, -(k3 + cut))
            if KIND == 4:
                kl, slope = rho * k3, rho * slope
                grad += beta * k3
            else:
                kl = k3
        value += beta * kl
        tl.store(through_kl + t, tl.where(keep, beta * slope, 0.0), mask=inside)
    tl.store(loss + t, tl.where(keep, value, 0.0), mask=inside)
    moves = keep & ~(lr > CUT)
    if SURROGATE > 0 and KIND < 4:
        moves = none  # else a ratio of NaN would give NaN * 0
    tl.store(through_ratio + t, tl.where(moves, grad * rho, 0.0), mask=inside)

    statistics += program * 5
    tl.store(statistics, tl.sum((keep & past_low).to(tl.float32), 0))
    tl.store(statistics + 1, tl.sum((keep & past_high).to(tl.float32), 0))
    tl.store(statistics + 2, tl.sum((keep & past_dual).to(tl.float32), 0))
    tl.store(statistics + 3, tl.reduce(tl.where(keep, rho, 0.0), 0, _largest))
    tl.store(statistics + 4, tl.sum(tl.where(keep, kl, 0.0), 0))


@on_its_device
def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    log_ratio: Tensor | None,
    ref_logprob: Tensor | None,
    mask: Tensor | None,
    settings: PolicyLossSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return loss, derivatives by the log-ratio, and by the log-prob through the KL penalty and the score; statistics.

    All but the statistics are flat, (T,). The derivative through the KL is empty without a reference. The derivative
    through the score, -`reference.score_factor`, is empty for "ppo". The statistics (5,)
    are the numbers of ratios clipped low, high and by dual_clip, the largest ratio, and the sum of the KL.
    """
    eps_low, eps_high, dual_clip, beta, kl, surrogate = settings
    flat = [None if x is None else x.reshape(-1) for x in (logprob, old_logprob, advantages, log_ratio, ref_logprob)]
    T, device = logprob.numel(), logprob.device
    loss, through_ratio = (torch.empty(T, dtype=torch.float32, device=device) for _ in range(2))
    through_kl = torch.zeros(T if ref_logprob is not None else 0, dtype=torch.float32, device=device)
    through_score = torch.empty(T if surrogate != "ppo" else 0, dtype=torch.float32, device=device)
    programs = triton.cdiv(T, BLOCK)
    parts = torch.empty(programs, 5, dtype=torch.float32, device=device)
    if T:
        _policy_loss_kernel[(programs,)](
            *flat, None if mask is None else mask.reshape(-1), loss, through_ratio, through_kl, through_score, parts,
            T, 1.0 - eps_low, 1.0 + eps_high, float("inf") if dual_clip is None else float(dual_clip), float(beta),
            KIND=KINDS[kl] if ref_logprob is not None else 0, SURROGATE=SURROGATES[surrogate],
            HAS_LOG_RATIO=log_ratio is not None, HAS_MASK=mask is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    sums = parts.sum(0)
    if T:
        sums[3] = parts[:, 3].amax()
    return loss, through_ratio, through_kl, through_score, sums


def loss_and_slope(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    ref_logprob: Tensor | None,
    settings: PolicyLossSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `policy_loss_torch.loss_and_slope`."""
    loss, slope, through_kl, through_score, sums = policy_loss(
        logprob, old_logprob, advantages, None, ref_logprob, None, settings
    )
    if ref_logprob is not None:
        slope = slope + through_kl
    return loss, slope if settings.surrogate == "ppo" else slope + through_score, sums
