"""Reference implementations of the ops in plain PyTorch: differentiable, without argument checks or fused passes.

Legend: T packed tokens, D width, V vocabulary, P prompts, M samples per prompt. Inputs narrower than float32 are
widened before any non-linear operation. Results are float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that are summed by a product with a triangle of ones


def running_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative sums over the last dimension, in ``dtype`` (by default that of ``x``): ``x.cumsum(-1, dtype=dtype)``.

    In deterministic mode on a GPU they are sums by blocks, in one order; there an infinity or a NaN makes the results
    from the beginning of its block on NaN. Differentiable.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sums_by_blocks(x if dtype is None else x.to(dtype))
    return x.cumsum(-1, dtype=dtype)


def sums_by_blocks(x: Tensor) -> Tensor:
    """Cumulative sums by products: within blocks of `BLOCK` numbers, plus those of the blocks before."""
    n = x.shape[-1]
    if n == 0:
        return x
    size = min(n, BLOCK)
    blocks = F.pad(x, (0, -n % size)).unflatten(-1, (-1, size))
    within = blocks @ torch.ones(size, size, dtype=x.dtype, device=x.device).triu()
    if blocks.shape[-2] > 1:
        totals = sums_by_blocks(within[..., -1])
        within = within + F.pad(totals[..., :-1], (1, 0))[..., None]
    return within.flatten(-2)[..., :n]


# exp(20) = 5e8. A ratio that far from 1 means that something is broken upstream. With the clamp, the loss and the norm
# of its gradient stay finite in float32. It is one-sided, as exp of a very negative number is a harmless 0.
MAX_LOG_RATIO = 20.0


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` (T,) and entropy (T,) of softmax((hidden @ weight.T + bias) / temperature)."""
    return token_logprob(F.linear(hidden, weight, bias), targets, temperature=temperature)


def token_logprob(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` (T,) and entropy (T,) of softmax(logits / temperature), logits (T, V)."""
    logits = widen(logits)
    if temperature != 1.0:
        logits = logits / temperature
    logp = logits.log_softmax(-1)
    # A logit of -inf gives p log p = 0 * -inf; count it as 0, with a gradient of 0.
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    return logp.gather(-1, targets[:, None]).sum(-1), entropy  # not [:, 0]: FSDP2 warns if a module returns a view


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str, log_ratio: Tensor | None = None) -> Tensor:
    """Estimate KL(pi || pi_ref) per token: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 with d = log pi_ref - log pi.

    k3_iw is rho k3, rho = exp(``log_ratio``): an estimate under the current policy from samples of an older one. Its
    gradient also goes through rho.
    """
    d = ref_logprob - logprob
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(max=MAX_LOG_RATIO)
    k3 = torch.expm1(d) - d
    if kind == "k3":
        return k3
    assert log_ratio is not None, f"{kind} needs the log-ratio"
    return k3 * log_ratio.clamp(max=MAX_LOG_RATIO).exp()


class PolicyLossSettings(NamedTuple):
    """Numbers and names of the policy loss; see `nlgrpo.kernels.policy_loss`."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    surrogate: str = "ppo"


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    *,
    log_ratio: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    mask: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Return S + beta KL, elementwise; 0 where ``mask`` is false. S depends on ``surrogate`` (sg stops the gradient):

        ppo         -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)
        cispo       -sg(min(rho, 1 + eps_high)) A logprob
        reinforce   -A logprob

    With ``dual_clip`` the S of ppo is at most -dual_clip A where A < 0. ``settings``: `PolicyLossSettings`.
    """
    eps_low, eps_high, dual_clip, beta, kl, surrogate = PolicyLossSettings(**settings)
    logprob = widen(logprob)
    old_logprob = widen(old_logprob)
    advantages = widen(advantages)
    log_ratio = logprob - old_logprob if log_ratio is None else widen(log_ratio)
    keep = torch.ones_like(logprob, dtype=torch.bool) if mask is None else mask.bool()
    # Masked entries may contain anything, infinities included. They are replaced before exp, because the gradient of a
    # torch.where around the result would multiply 0 * inf = NaN.
    log_ratio = torch.where(keep, log_ratio, 0.0)
    advantages = torch.where(keep, advantages, 0.0)
    rho = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    if surrogate == "ppo":
        loss = -torch.minimum(rho * advantages, rho.clamp(1 - eps_low, 1 + eps_high) * advantages)
        if dual_clip is not None:
            loss = torch.where((advantages < 0) & (rho > dual_clip), -dual_clip * advantages, loss)
    else:
        lp = torch.where(keep, logprob, 0.0)
        factor = score_factor(rho, advantages, eps_high, surrogate)
        loss = -factor * torch.where((factor == 0) & (lp == -torch.inf), 0.0, lp)
    if ref_logprob is not None and beta != 0.0:
        lp = torch.where(keep, logprob, 0.0)
        ref_lp = torch.where(keep, widen(ref_logprob), 0.0)
        loss = loss + beta * kl_penalty(lp, ref_lp, kl, log_ratio)
    return loss


def score_factor(rho: Tensor, advantages: Tensor, eps_high: float, surrogate: str) -> Tensor:
    """Return the factor of -logprob in S: sg(min(rho, 1 + eps_high)) A in "cispo", A in "reinforce"."""
    if surrogate == "reinforce":
        return advantages
    weight = rho.detach().clamp(max=1 + eps_high)
    # The ratio of two log-probs of -inf is NaN; with an advantage of 0 the factor is 0.
    return weight.masked_fill(weight.isnan() & (advantages == 0), 0.0) * advantages


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Sum of token_weights times `policy_loss`, with its ``options``, of the log-probs from `linear_logprob`."""
    logprob, _ = linear_logprob(hidden, weight, targets, temperature=temperature, bias=bias)
    if old_logprob is None:
        old_logprob = logprob.detach()
    losses = policy_loss(logprob, old_logprob, advantages, **options)
    if token_weights is not None:
        losses = token_weights * losses
    return losses.sum()


def policy_statistics(
    log_ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """Count the ratios clipped from below (A < 0) and from above (A > 0), and return the largest ratio; scalars.

    With ``dual_clip`` also count the ratios above it (A < 0). "cispo" counts only the ratios above the cap, for any
    sign of A; "reinforce" counts none.
    """
    eps_low, eps_high, dual_clip, _, _, surrogate = settings
    keep = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask.bool()
    rho = torch.where(keep, log_ratio, -torch.inf).clamp(max=MAX_LOG_RATIO).exp()
    if surrogate == "ppo":
        low = keep & (rho < 1 - eps_low) & (advantages < 0)
        high = (rho > 1 + eps_high) & (advantages > 0)
    else:
        low = torch.zeros_like(keep)
        high = (rho > 1 + eps_high) & (surrogate == "cispo")
    largest = rho.amax() if rho.numel() else rho.new_zeros(())
    statistics = {"clip_low": low.sum().to(rho), "clip_high": high.sum().to(rho), "ratio_max": largest}
    if dual_clip is not None:
        statistics["clip_dual"] = ((rho > dual_clip) & (advantages < 0)).sum().to(rho)
    return statistics


def linearize(rewards: Tensor, weights: Tensor) -> Tensor:
    """Linearised rewards r~_(i) = -sum_{k=i}^{M-1} w_k (r_(k+1) - r_(k)), in the order of ``rewards`` (P, M).

    ``weights`` (M,) or (P, M). The gap between equal rewards is 0, also between equal infinities. A gap of weight 0
    counts 0, even if it is infinite.
    """
    ordered, order = rewards.sort(dim=-1, stable=True)
    lower = ordered[..., :-1]
    upper = ordered[..., 1:]
    neg_gaps = torch.where(lower == upper, 0.0, lower - upper)
    neg_gaps = torch.where(weights[..., :-1] == 0, 0.0, weights[..., :-1] * neg_gaps)
    below_best = neg_gaps.flip(-1).cumsum(-1).flip(-1)
    return torch.zeros_like(rewards).scatter(-1, order, torch.nn.functional.pad(below_best, (0, 1)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of ``x``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up (T, F) for ``x (T, 2F)``, which contains gate, then up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of ``x (T, H, d)`` in the half-split layout: (a, b) -> (a cos - b sin, b cos + a sin).

    ``rope``: cos and sin, each (T, r/2). a and b are the halves of the first r dimensions; the others do not change.
    """
    cos, sin = (x[:, None] for x in rope)
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def split_and_rotate(qkv: Tensor, rope: tuple[Tensor, Tensor] | None, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``qkv (T, H + 2 Hk, d)`` into q (T, H, d), k and v (T, Hk, d), and rotate q and k. H is ``heads``."""
    kv_heads = (qkv.shape[1] - heads) // 2
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
    q, k = (qk if rope is None else rotate(qk, rope)).split((heads, kv_heads), dim=1)
    return q, k, v


def draw(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Sample tokens (R,) by inversion: the first token whose cumulative probability exceeds ``noise (R,)`` in [0, 1).

    The sum is in float64, so that no token of a large vocabulary is lost to rounding. ``noise`` is scaled by the total,
    so that a sum below 1 cannot select an index beyond the vocabulary. NaN selects the last token.
    """
    cumulative = running_sums(log_probs.exp(), torch.float64)
    threshold = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=log_probs.shape[-1] - 1)


def sample_tokens(logits: Tensor, noise: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample tokens (R,) of softmax(logits / temperature), logits (R, V), and return them with their log-probs."""
    logits = widen(logits)
    if temperature != 1.0:
        logits = logits / temperature
    logp = logits.log_softmax(-1)
    tokens = draw(logp, noise)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]
