"""Policy loss of tokens and its derivative by their log-probs in plain PyTorch, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import MAX_LOG_RATIO, PolicyLossSettings, kl_penalty, policy_loss, policy_statistics, score_factor


def loss_and_slope(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    ref_logprob: Tensor | None,
    settings: PolicyLossSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and dloss/dlogprob, each (n,), and the statistics (5,) of `policy_loss_triton.policy_loss`.

    dloss/dlogprob = dS/dlogprob + beta dKL/dlogprob, where dS/dlogprob depends on ``surrogate``:

        ppo         -A rho where the ratio is not clipped, else 0
        cispo       -A min(rho, 1 + eps_high)
        reinforce   -A
    """
    log_ratio = logprob - old_logprob
    loss = policy_loss(logprob, old_logprob, advantages, ref_logprob=ref_logprob, **settings._asdict())
    eps_low, eps_high, dual_clip, beta, kl, surrogate = settings
    limit = torch.inf if dual_clip is None else dual_clip
    rho, within = log_ratio.clamp(max=MAX_LOG_RATIO).exp(), ~(log_ratio > MAX_LOG_RATIO)
    if surrogate == "ppo":
        below, above = rho < 1 - eps_low, rho > 1 + eps_high
        clipped = ((advantages > 0) & above) | ((advantages < 0) & (below | (rho > limit)))
        slope = torch.where(within & ~clipped, -advantages * rho, 0.0)
    else:
        slope = -score_factor(rho, advantages, eps_high, surrogate)
    counts = policy_statistics(log_ratio, advantages, settings)
    sums = [counts["clip_low"], counts["clip_high"], counts["clip_dual"], counts["ratio_max"]]
    if ref_logprob is None:
        return loss, slope, torch.stack([*sums, rho.new_zeros(())])
    penalty = kl_penalty(logprob, ref_logprob, kl, log_ratio)
    return loss, slope + beta * _kl_slope(logprob, ref_logprob, kl, rho, within), torch.stack([*sums, penalty.sum()])


def _kl_slope(logprob: Tensor, ref_logprob: Tensor, kl: str, rho: Tensor, within: Tensor) -> Tensor:
    """Return dKL/dlogprob of `reference.kl_penalty`. ``within``: where the log-ratio is not clamped."""
    d = ref_logprob - logprob
    if kl == "k1":
        return torch.ones_like(d)
    if kl == "k2":
        return -d
    cut = d.clamp(max=MAX_LOG_RATIO)
    k3_slope = torch.where(d > MAX_LOG_RATIO, 0.0, -torch.expm1(cut))
    if kl == "k3":
        return k3_slope
    return rho * (k3_slope + torch.where(within, torch.expm1(cut) - cut, 0.0))
