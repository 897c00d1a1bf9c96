"""Log-probabilities of tokens, from logits or from hidden states, without a second array of the vocabulary's size.

The forward saves a few numbers per token, from which the backward recomputes the softmax. From hidden states, the
logits exist for one block of tokens at a time in both passes, so that the memory besides the arguments and their
gradients does not grow with T.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .dispatch import choose, implementation, scalar
from .head import Gradients, block_logits, blocks, check_targets, checked, shape

Both = tuple[Tensor, Tensor]
Statistics = tuple[Tensor, Tensor, Tensor]  # log-probability, entropy, and what the epilogue saves for its gradient


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    emulate_bf16_logits: bool = False,
    impl: str = "auto",
) -> Both:
    """Log-probability of ``targets`` and entropy of the next-token distribution, from hidden states.

    Equivalent to

        logits = (hidden @ weight.T + bias).float() / temperature
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], Categorical(logits=logits).entropy()

    hidden (T, D), weight (V, D), bias (V,) of one dtype; targets (T,) int64 in [0, V), or -100 for tokens to ignore:
    they are skipped, and both results and the gradient are 0. The results are (T,) in nats, float32, or float64 for
    float64 inputs; T may be 0. Differentiable in hidden, weight and bias; the backward recomputes the logits for one
    block of tokens at a time. Under autocast the inputs are cast as for a linear layer. ``emulate_bf16_logits`` rounds
    the logits before the temperature, as an inference engine in bfloat16 does; the gradient ignores the rounding.

    A weight or bias sharded by FSDP2 (a DTensor) is gathered in the dtype of ``hidden``, and gets the mean of the
    gradients of its ranks, as under FSDP2. All its ranks must call this function, also those without tokens.

    Raises ValueError for shapes, dtypes and devices that do not match, targets that are not int64, a temperature <= 0,
    and on a CPU for a target outside the vocabulary. On a GPU, where this check would synchronize, the results of such
    a target are NaN.
    """
    hidden, weight, bias = checked(hidden, weight, bias, targets, temperature)
    impl = choose(impl, "linear_logprob", hidden, cpp=(torch.float32,))
    return _linear_op(hidden, weight, bias, targets, scalar(temperature), emulate_bf16_logits, impl)[:2]


def token_logprob(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, impl: str = "auto") -> Both:
    """Log-probability of ``targets`` (T,) and entropy (T,) from logits (T, V): `linear_logprob` without the product.

    A logit of -inf is a token of probability 0; it adds nothing to the entropy. Raises ValueError as `linear_logprob`.
    """
    if logits.ndim != 2:
        raise ValueError(f"expected logits (T, V), got {shape(logits)}; flatten the leading dimensions first.")
    if not logits.shape[1]:
        raise ValueError(f"expected logits (T, V) with V >= 1, got {shape(logits)}.")
    check_targets(targets, logits, temperature)
    impl = choose(impl, "token_logprob", logits, cpp=(torch.float32,))
    return _token_op(logits, targets, scalar(temperature), impl)[:2]


def _results(like: Tensor) -> Statistics:
    """Return zeros for the results of an epilogue's ``statistics``, for every row of ``like``."""
    T, dtype = like.shape[0], torch.promote_types(like.dtype, torch.float32)
    logprob, entropy, kept = (like.new_zeros(size, dtype=dtype) for size in (T, T, (2, T)))
    return logprob, entropy, kept


def _fill(results: Statistics, rows: slice | Tensor, parts: Statistics) -> None:
    for result, part in zip(results, parts, strict=True):
        result[..., rows] = part


# --- from logits ------------------------------------------------------------------------------------------------------


def _token_blocks(logits: Tensor, targets: Tensor, impl: str) -> Iterable[slice | Tensor]:
    """Return the blocks of tokens: a single one for Triton, whose kernels widen on load and skip ignored tokens."""
    return [slice(None)] if impl == "triton" else blocks(targets, logits.shape[1], 4)


@torch.library.custom_op("nlgrpo::token_logprob", mutates_args=())
def _token_op(logits: Tensor, targets: Tensor, temperature: Tensor, impl: str) -> Statistics:
    results, epilogue = _results(logits), implementation("epilogue", impl)
    for rows in _token_blocks(logits, targets, impl):
        parts = epilogue.statistics(logits[rows], targets[rows], temperature.item())
        _fill(results, rows, parts)
    return results


@torch.library.custom_op("nlgrpo::token_logprob_backward", mutates_args=())
def _token_backward_op(
    logits: Tensor,
    targets: Tensor,
    kept: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: Tensor,
    impl: str,
) -> Tensor:
    new = torch.empty_like if impl == "triton" else torch.zeros_like  # Triton's kernel writes every row
    grad, epilogue = new(logits, memory_format=torch.contiguous_format), implementation("epilogue", impl)
    for rows in _token_blocks(logits, targets, impl):
        out = grad[rows]
        epilogue.gradient(
            logits[rows], targets[rows], kept[:, rows], entropy[rows],
            grad_logprob[rows], None if grad_entropy is None else grad_entropy[rows], temperature.item(), out,
        )  # fmt: skip
        if isinstance(rows, Tensor):
            grad[rows] = out
    return grad


@_token_op.register_fake
def _(logits: Tensor, targets: Tensor, temperature: Tensor, impl: str) -> Statistics:
    return _results(logits)


@_token_backward_op.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _token_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, temperature, ctx.impl = inputs
    ctx.set_materialize_grads(False)  # an unused entropy needs no gradient computation
    ctx.save_for_backward(logits, targets, output[2], output[1], temperature)


def _token_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    *saved, entropy, temperature = ctx.saved_tensors
    grad_logprob = torch.zeros_like(entropy) if grad_logprob is None else grad_logprob
    grad = _token_backward_op(*saved, entropy, grad_logprob, grad_entropy, temperature, ctx.impl)
    return grad, None, None, None


_token_op.register_autograd(_token_backward, setup_context=_token_setup)


# --- from hidden states -----------------------------------------------------------------------------------------------


@torch.library.custom_op("nlgrpo::linear_logprob", mutates_args=())
def _linear_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    emulate_bf16: bool,
    impl: str,
) -> Statistics:
    results, epilogue = _results(hidden), implementation("epilogue", impl)
    for rows in blocks(targets, len(weight), hidden.itemsize):
        logits = block_logits(hidden[rows], weight, bias, emulate_bf16)
        parts = epilogue.statistics(logits, targets[rows], temperature.item())
        _fill(results, rows, parts)
    return results


@torch.library.custom_op("nlgrpo::linear_logprob_backward", mutates_args=())
def _linear_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: Tensor,
    emulate_bf16: bool,
    impl: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias; empty tensors for those not ``wanted``."""
    parts = blocks(targets, len(weight), hidden.itemsize)
    sums, epilogue = Gradients(hidden, weight, wanted, len(parts)), implementation("epilogue", impl)
    for rows in parts:
        logits = block_logits(hidden[rows], weight, bias, emulate_bf16)
        epilogue.gradient(
            logits, targets[rows], kept[:, rows], entropy[rows],
            grad_logprob[rows], None if grad_entropy is None else grad_entropy[rows], temperature.item(), logits,
        )  # fmt: skip
        sums.add(rows, logits, hidden[rows], weight)
    return sums.results()


@_linear_op.register_fake
def _(hidden: Tensor, *_: object) -> Statistics:
    return _results(hidden)


@_linear_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return Gradients(hidden, weight, rest[-1]).results()


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, temperature, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, output[2], output[1], temperature)


def _linear_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    *saved, entropy, temperature = ctx.saved_tensors
    grad_logprob = torch.zeros_like(entropy) if grad_logprob is None else grad_logprob
    grads = _linear_backward_op(*saved, entropy, grad_logprob, grad_entropy, temperature, *ctx.options, wanted)
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None, None, None, None


_linear_op.register_autograd(_linear_backward, setup_context=_linear_setup)
