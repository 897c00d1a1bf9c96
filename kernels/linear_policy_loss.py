"""Policy-gradient loss from hidden states, with its gradient computed in the forward.

The log-probability of a token determines its loss and the gradient of its logits. One block of logits therefore serves
both passes: three matrix products instead of the four needed if the backward recomputes the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose, implementation, scalar
from .head import IGNORE, Gradients, block_logits, blocks, check_devices, checked, shape
from .policy_loss import check_settings, named, scalars
from .reference import PolicyLossSettings

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


class PolicyLoss(NamedTuple):
    """Result of `linear_policy_loss`. Only ``loss`` has a gradient."""

    loss: Tensor
    """Scalar."""
    logprob: Tensor
    """(T,), nats; 0 for ignored tokens."""
    entropy: Tensor
    """(T,), nats."""
    statistics: dict[str, Tensor]
    """See `nlgrpo.kernels.policy_loss_with_statistics`."""


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    token_weights: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    emulate_bf16_logits: bool = False,
    impl: str = "auto",
    **settings: Any,
) -> PolicyLoss:
    """Sum over tokens of `policy_loss` of `linear_logprob`. Equivalent to

        logprob, entropy = linear_logprob(hidden, weight, targets, temperature=temperature, bias=bias)
        losses = policy_loss(logprob, old_logprob, advantages, ref_logprob=ref_logprob, ...)
        loss = (token_weights * losses)[targets != -100].sum()

    hidden (T, D), weight (V, D), bias (V,) and targets (T,) as in `linear_logprob`; old_logprob, advantages,
    token_weights and ref_logprob (T,), constants. ``old_logprob=None``: the policy has not changed since sampling, and
    every ratio is 1. ``token_weights`` are 1 by default. Ratios are per token; a loss with sequence-level ratios (GSPO)
    needs all log-probs before any gradient, and `linear_logprob`. ``settings``: eps_low, eps_high, dual_clip, beta, kl
    and surrogate of `policy_loss`.

    Differentiable once in hidden, weight and bias. The forward computes and stores the required gradients, in the
    dtypes of the inputs (for a float16 weight in float32); the other memory does not grow with T. Gradients are stored
    for token weights scaled to at most 1 and rescaled in the backward, so that a loss scale for float16 takes effect in
    time.

    Raises ValueError as `linear_logprob` and `policy_loss`.
    """
    hidden, weight, bias = checked(hidden, weight, bias, targets, temperature)
    chosen = PolicyLossSettings(**settings)
    check_settings(chosen, ref_logprob)
    per_token = {"old_logprob": old_logprob, "advantages": advantages}
    per_token |= {"token_weights": token_weights, "ref_logprob": ref_logprob}
    for name, x in per_token.items():
        if x is not None and x.shape != targets.shape:
            raise ValueError(f"expected {name} {shape(targets)}, one per target, got {shape(x)}.")
    if token_weights is None:
        token_weights = torch.ones_like(advantages)
    check_devices(hidden, **per_token)
    token_weights = token_weights.to(_wide(hidden)).masked_fill(targets == IGNORE, 0.0)
    largest = F.pad(token_weights.abs(), (0, 1), value=torch.finfo(token_weights.dtype).tiny).amax()
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss, logprob, entropy, sums, *_ = _op(
        hidden, weight, bias, targets, old_logprob, advantages, token_weights / largest, ref_logprob,
        *scalars(chosen), chosen.kl, chosen.surrogate, scalar(temperature), emulate_bf16_logits,
        choose(impl, "linear_policy_loss", hidden, cpp=(torch.float32,)), wanted,
    )  # fmt: skip
    return PolicyLoss(loss * largest, logprob.detach(), entropy.detach(), named(sums, chosen, ref_logprob))


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


@torch.library.custom_op("nlgrpo::linear_policy_loss", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    token_weights: Tensor,
    ref_logprob: Tensor | None,
    eps_low: Tensor,
    eps_high: Tensor,
    dual_clip: Tensor,
    beta: Tensor,
    kl: str,
    surrogate: str,
    temperature: Tensor,
    emulate_bf16: bool,
    impl: str,
    wanted: list[bool],
) -> Results:
    """Return loss, log-prob, entropy, statistics (5,), and gradients of hidden, weight and bias if ``wanted``."""
    loss, logprob, entropy, sums = _empty_results(hidden)
    parts = blocks(targets, len(weight), hidden.itemsize)
    gradients = Gradients(hidden, weight, wanted, len(parts), _kept(weight))
    numbers = (eps_low.item(), eps_high.item(), dual_clip.item(), beta.item())
    settings = PolicyLossSettings(*numbers, kl, surrogate)
    epilogue = implementation("epilogue", impl)
    policy = implementation("policy_loss", impl)
    for rows in parts:
        logits = block_logits(hidden[rows], weight, bias, emulate_bf16)
        logp, H, kept = epilogue.statistics(logits, targets[rows], temperature.item())
        logprob[rows] = logp
        entropy[rows] = H
        old = logp if old_logprob is None else old_logprob[rows].to(loss)
        A = advantages[rows].to(loss)
        w = token_weights[rows].to(loss)
        ref = None if ref_logprob is None else ref_logprob[rows].to(loss)
        losses, slope, counts = policy.loss_and_slope(logp, old, A, ref, settings)
        loss += (w * losses).sum()
        largest = torch.maximum(sums[3], counts[3])
        sums += counts
        sums[3] = largest
        if any(wanted):
            epilogue.gradient(logits, targets[rows], kept, H, w * slope, None, temperature.item(), logits)
            gradients.add(rows, logits, hidden[rows], weight)
    return loss, logprob, entropy, sums, *gradients.results()


def _empty_results(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T = hidden.shape[0]
    dtype = _wide(hidden)
    loss = hidden.new_zeros((), dtype=dtype)
    logprob = hidden.new_zeros(T, dtype=dtype)
    entropy = hidden.new_zeros(T, dtype=dtype)
    sums = hidden.new_zeros(5, dtype=dtype)
    return loss, logprob, entropy, sums


def _kept(weight: Tensor) -> torch.dtype:
    """Dtype of the stored gradient of weight: before scaling, a sum over tokens may be too large for float16."""
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


@torch.library.custom_op("nlgrpo::linear_policy_loss_backward", mutates_args=())
def _backward_op(hidden: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, dtype: torch.dtype) -> Three:
    """Multiply the gradients from the forward by the upstream gradient; results in ``dtype``. Not differentiable."""
    return hidden * grad, (weight * grad).to(dtype), (bias * grad).to(dtype)


@_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> Results:
    return *_empty_results(hidden), *Gradients(hidden, weight, rest[-1], dtype=_kept(weight)).results()


@_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, dtype: torch.dtype) -> Three:
    return torch.empty_like(hidden), torch.empty_like(weight, dtype=dtype), torch.empty_like(bias, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.wanted = inputs[-1]
    ctx.dtype = inputs[0].dtype
    ctx.others = len(inputs) - 3
    ctx.save_for_backward(*output[4:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward_op(*ctx.saved_tensors, grad, ctx.dtype)
    wanted = [g if want else None for g, want in zip(grads, ctx.wanted, strict=True)]
    return *wanted, *[None] * ctx.others


_op.register_autograd(_backward, setup_context=_setup)
