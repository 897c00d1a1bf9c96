"""Policy-gradient losses of PPO and GRPO, CISPO and REINFORCE, per token."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .dispatch import choose, scalar
from .reference import PolicyLossSettings

KL_KINDS = ("k1", "k2", "k3", "k3_iw")
SURROGATES = ("ppo", "cispo", "reinforce")


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    *,
    log_ratio: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    mask: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl: str = "k3",
    surrogate: str = "ppo",
    impl: str = "auto",
) -> Tensor:
    """Policy-gradient loss of each token. The caller averages over tokens.

        rho  = exp(logprob - old_logprob)
        loss = S + beta KL(logprob, ref_logprob)

    S depends on ``surrogate`` (sg stops the gradient):

        "ppo"         S = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)    Schulman et al. 2017
        "cispo"       S = -sg(min(rho, 1 + eps_high)) A logprob                  MiniMax-M1 2025, arXiv:2506.13585
        "reinforce"   S = -A logprob                                             Williams 1992

    "ppo" drops the gradient of clipped tokens; "cispo" caps their weight instead, ignores ``eps_low``, and its cap is
    TRL's ``epsilon_high``. "reinforce" has no ratio: off-policy it is biased. The values of the latter two are only
    meaningful for their gradients. S is 0 if the factor of logprob is 0, even for logprob = -inf.

    All tensors have one shape, usually (T,). ``log_ratio`` replaces the difference logprob - old_logprob, with its own
    gradient, for ratios that are not per token (GSPO). ``dual_clip``, above 1 + eps_high, bounds the S of "ppo" by
    -dual_clip A where A < 0, so that a large ratio has no gradient there (Ye et al. 2020, eq. 5; TRL's ``delta``).
    ``kl`` is the estimator, with d = ref_logprob - logprob: "k1" -d, "k2" d^2/2, "k3" e^d - d - 1, "k3_iw"
    rho (e^d - d - 1). Off-policy, only the importance-weighted k3_iw estimates the KL and its gradient. Log-ratios, and
    d in k3, are clamped at 20, beyond which the gradient is 0.

    Where ``mask`` is false (or 0) the loss and its gradient are 0 for any input. The result is float32, or float64 for
    float64 inputs. With logprob == old_logprob the gradient is that of -A logprob. "triton" cannot differentiate by the
    advantages and raises ValueError if they require a gradient; "auto" then uses plain PyTorch.

    Raises ValueError for shapes that do not match, eps < 0, eps_low > 1, dual_clip <= 1 + eps_high or with a surrogate
    other than "ppo", an unknown ``kl`` or ``surrogate``, beta < 0, and beta > 0 without ref_logprob.
    """
    terms = Terms(logprob, old_logprob, advantages, log_ratio, ref_logprob, mask)
    settings = PolicyLossSettings(eps_low, eps_high, dual_clip, beta, kl, surrogate)
    _check(terms, settings)
    if beta == 0.0:
        terms = terms._replace(ref_logprob=None)
    if _by_triton(impl, terms):
        return _fused(terms, settings)[0]
    return reference.policy_loss(**terms._asdict(), **settings._asdict())


def policy_loss_with_statistics(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    *,
    log_ratio: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    mask: Tensor | None = None,
    impl: str = "auto",
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `policy_loss` and its statistics from the same pass: detached scalars, to be summed over batches.

    ``settings``: eps_low, eps_high, dual_clip, beta, kl and surrogate of `policy_loss`.

    ``clip_low``   number of ratios below 1 - eps_low where A < 0; 0 in "cispo" and "reinforce"
    ``clip_high``  number of ratios above 1 + eps_high where A > 0; in "cispo" for any A, 0 in "reinforce"
    ``clip_dual``  with ``dual_clip``: number of ratios above it where A < 0
    ``ratio_max``  largest ratio, clamped at e^20 (over batches: the maximum); 0 without tokens
    ``kl``         with ``ref_logprob``: sum of the KL estimate over tokens, for any beta
    """
    terms = Terms(logprob, old_logprob, advantages, log_ratio, ref_logprob, mask)
    chosen = PolicyLossSettings(**settings)
    _check(terms, chosen)
    if not _by_triton(impl, terms):
        return reference.policy_loss(**terms._asdict(), **settings), _statistics(terms, chosen)
    loss, sums = _fused(terms, chosen)
    return loss, named(sums, chosen, ref_logprob)


class Terms(NamedTuple):
    """Tensors of the loss, of one shape."""

    logprob: Tensor
    old_logprob: Tensor
    advantages: Tensor
    log_ratio: Tensor | None
    ref_logprob: Tensor | None
    mask: Tensor | None


def _check(terms: Terms, settings: PolicyLossSettings) -> None:
    shape = terms.logprob.shape
    for name, x in terms._asdict().items():
        if x is not None and x.shape != shape:
            raise ValueError(f"expected {name} of the shape of logprob {tuple(shape)}, got {tuple(x.shape)}.")
        if x is not None and x.device != terms.logprob.device:
            raise ValueError(f"expected {name} on {terms.logprob.device}, as logprob, got {x.device}.")
    check_settings(settings, terms.ref_logprob)


def check_settings(settings: PolicyLossSettings, ref_logprob: Tensor | None) -> None:
    eps_low, eps_high, dual_clip, beta, kl, surrogate = settings
    if surrogate not in SURROGATES:
        raise ValueError(f"surrogate={surrogate!r} is not known; expected one of {', '.join(SURROGATES)}.")
    if dual_clip is not None and surrogate != "ppo":
        raise ValueError(
            f"dual_clip={dual_clip}: expected None with surrogate={surrogate!r}; dual clipping needs surrogate='ppo'."
        )
    if not (0 <= eps_low <= 1 and eps_high >= 0):
        raise ValueError(f"eps_low={eps_low}, eps_high={eps_high}: expected 0 <= eps_low <= 1 and eps_high >= 0.")
    if dual_clip is not None and not dual_clip > 1 + eps_high:
        raise ValueError(f"dual_clip={dual_clip}: expected None or a number > 1 + eps_high = {1 + eps_high}.")
    if kl not in KL_KINDS:
        raise ValueError(f"kl={kl!r} is not known; expected one of {', '.join(KL_KINDS)}.")
    if not beta >= 0:
        raise ValueError(f"beta={beta}: expected a number >= 0.")
    if beta != 0.0 and ref_logprob is None:
        raise ValueError(f"beta={beta} needs ref_logprob, the log-probabilities of the reference policy; got None.")


def named(sums: Tensor, settings: PolicyLossSettings, ref_logprob: Tensor | None) -> dict[str, Tensor]:
    """Return the requested statistics by name, from the five ``sums`` of a fused pass."""
    low, high, dual, largest, kl = sums.detach().unbind()
    statistics = {"clip_low": low, "clip_high": high, "ratio_max": largest}
    if settings.dual_clip is not None:
        statistics["clip_dual"] = dual
    if ref_logprob is not None:
        statistics["kl"] = kl
    return statistics


def _by_triton(impl: str, terms: Terms) -> bool:
    chosen = choose(impl, "policy_loss", *(x for x in terms[:5] if x is not None)) == "triton"
    if not (chosen and torch.is_grad_enabled() and terms.advantages.requires_grad):
        return chosen
    if impl == "triton":
        raise ValueError(
            "impl='triton': policy_loss has no gradient with respect to the advantages; detach them or use 'auto'."
        )
    return False


def _fused(terms: Terms, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    loss, _, _, _, sums = _policy_loss_op(*terms, *scalars(settings), settings.kl, settings.surrogate)
    return loss.view(terms.logprob.shape), sums


def scalars(settings: PolicyLossSettings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return eps_low, eps_high, dual_clip and beta as tensors for a custom op."""
    dual_clip = math.inf if settings.dual_clip is None else settings.dual_clip
    return scalar(settings.eps_low), scalar(settings.eps_high), scalar(dual_clip), scalar(settings.beta)


@torch.no_grad()
def _statistics(terms: Terms, settings: PolicyLossSettings) -> dict[str, Tensor]:
    logprob, old_logprob = reference.widen(terms.logprob), reference.widen(terms.old_logprob)
    ratio = logprob - old_logprob if terms.log_ratio is None else reference.widen(terms.log_ratio)
    statistics = reference.policy_statistics(ratio, terms.advantages, settings, terms.mask)
    if terms.ref_logprob is not None:
        penalty = reference.kl_penalty(logprob, reference.widen(terms.ref_logprob), settings.kl, ratio)
        keep = penalty if terms.mask is None else torch.where(terms.mask.bool(), penalty, 0.0)
        statistics["kl"] = keep.sum()
    return statistics


@torch.library.custom_op("nlgrpo::policy_loss", mutates_args=())
def _policy_loss_op(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    log_ratio: Tensor | None,
    ref_logprob: Tensor | None,
    mask: Tensor | None,
    eps_low: Tensor,
    eps_high: Tensor,
    dual_clip: Tensor,
    beta: Tensor,
    kl: str,
    surrogate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return loss, derivatives by the log-ratio, and by the log-prob through the KL and the score, and statistics."""
    from . import policy_loss_triton

    numbers = (eps_low.item(), eps_high.item(), dual_clip.item(), beta.item())
    settings = PolicyLossSettings(*numbers, kl, surrogate)
    return policy_loss_triton.policy_loss(logprob, old_logprob, advantages, log_ratio, ref_logprob, mask, settings)


@_policy_loss_op.register_fake
def _(logprob: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, ref_logprob, surrogate = logprob.numel(), others[3], others[-1]
    sizes = (T, T, T if ref_logprob is not None else 0, T if surrogate != "ppo" else 0, 5)
    a, b, c, d, e = (logprob.new_empty(size, dtype=torch.float32) for size in sizes)
    return a, b, c, d, e


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:5]]
    ctx.shape, ctx.has_log_ratio = inputs[0].shape, inputs[3] is not None
    ctx.has_ref, ctx.has_score = inputs[4] is not None, inputs[-1] != "ppo"
    ctx.save_for_backward(*output[1:4])


@torch.library.custom_op("nlgrpo::policy_loss_backward", mutates_args=())
def _backward_op(
    grad: Tensor, through_ratio: Tensor, through_kl: Tensor, through_score: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the derivatives from the forward, where not empty, by the upstream gradient. Not differentiable."""
    by_kl, by_score = (grad * x if len(x) else torch.empty_like(x) for x in (through_kl, through_score))
    return grad * through_ratio, by_kl, by_score


@_backward_op.register_fake
def _(grad: Tensor, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = map(torch.empty_like, slopes)
    return a, b, c


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    by_ratio, by_kl, by_score = _backward_op(grad, *ctx.saved_tensors)
    candidates = ((by_ratio, not ctx.has_log_ratio), (by_kl, ctx.has_ref), (by_score, ctx.has_score))
    parts = [part for part, exists in candidates if exists]
    grads: list[Tensor | None] = [sum(parts[1:], parts[0]) if parts else None, *[None] * 4]
    if ctx.has_ref:
        grads[4] = -by_kl
    if ctx.has_log_ratio:
        grads[3] = by_ratio
    else:
        grads[1] = -by_ratio
    shaped = [None if g is None else g.view(ctx.shape).to(to) for g, to in zip(grads, ctx.dtypes, strict=True)]
    return *shaped, *[None] * 7


_policy_loss_op.register_autograd(_backward, setup_context=_setup)
