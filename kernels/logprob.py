"""Log-probabilities of tokens, from logits or from hidden states, without a second array of the vocabulary's size.

Forward keeps a few numbers a token, and backward computes the softmax again from them. From hidden states the logits
exist for one block of tokens at a time, in both directions, so that the memory beyond the arguments and their gradients
does not grow with T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose, epilogue, scalar

IGNORE = -100
# Of a block of logits: 32 MiB, and on a GPU 1.25 GiB, which are 4,096 tokens of a vocabulary of 150,000 in bfloat16.
BLOCK_BYTES = {"cpu": 2**25, "cuda": 5 * 2**28}

Both = tuple[Tensor, Tensor]
Statistics = tuple[Tensor, Tensor, Tensor, Tensor]  # log-probability, entropy, and the two parts of the log-sum-exp


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

    Equals

        logits = (hidden @ weight.T + bias).float() / temperature
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], Categorical(logits=logits).entropy()

    hidden (T, D), weight (V, D), bias (V,) of one type; targets (T,) int64 in [0, V), or -100 where a token does not
    count: it then costs nothing, both results are 0, and so is its gradient. Both results are (T,) in nats, float32, or
    float64 for float64 inputs; T may be 0. Differentiable in hidden, weight and bias; the product is computed again in
    the backward, for one block of tokens at a time. Under autocast the inputs take its type, as those of a linear layer
    do. ``emulate_bf16_logits`` rounds the logits, before the temperature,
    as an engine in bfloat16 does; the gradient is that of the logits that were not rounded.

    Raises ValueError for a sharded weight, shapes and types that do not fit, targets that are not int64, and a
    temperature <= 0.
    """
    hidden, weight, bias = _whole(hidden, weight, bias)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, D) and weight (V, D), got {_shape(hidden)} and {_shape(weight)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},), one per row of weight, got {_shape(bias)}.")
    types = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(types) > 1:
        raise ValueError(f"expected hidden, weight and bias of one type, got {', '.join(sorted(map(str, types)))}.")
    _check_targets(targets, hidden, temperature)
    impl = choose(impl, "linear_logprob", hidden)
    return _linear_op(hidden, weight, bias, targets, scalar(temperature), emulate_bf16_logits, impl)[:2]


def token_logprob(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, impl: str = "auto") -> Both:
    """Log-probability of ``targets`` (T,) and entropy (T,) from logits (T, V): `linear_logprob` without the product.

    A logit of -inf is a token that cannot be drawn; it adds nothing to the entropy. Raises as `linear_logprob`.
    """
    if logits.ndim != 2:
        raise ValueError(f"expected logits (T, V), got {_shape(logits)}; flatten the leading dimensions first.")
    _check_targets(targets, logits, temperature)
    impl = choose(impl, "token_logprob", logits)
    return _token_op(logits, targets, scalar(temperature), impl)[:2]


def _whole(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inputs as plain tensors of the type that a linear layer would compute in."""
    if hasattr(weight, "full_tensor"):
        raise ValueError("weight is sharded (a DTensor); call this inside the forward of the module that FSDP gathers.")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        to = torch.get_autocast_dtype(device)
        return hidden.to(to), weight.to(to), None if bias is None else bias.to(to)
    return hidden, weight, bias


def _check_targets(targets: Tensor, rows: Tensor, temperature: float) -> None:
    if targets.shape != rows.shape[:1]:
        raise ValueError(f"expected targets ({rows.shape[0]},), one per row of {_shape(rows)}, got {_shape(targets)}.")
    if targets.dtype != torch.int64:
        raise ValueError(f"expected targets of dtype torch.int64, got {targets.dtype}; call targets.long().")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number > 0.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _blocks(targets: Tensor, vocabulary: int, itemsize: int) -> Iterator[slice | Tensor]:
    """Indices of the tokens that count, a block at a time: slices where all do."""
    kept = (targets != IGNORE).nonzero()[:, 0]
    budget = BLOCK_BYTES["cpu" if targets.is_cpu else "cuda"]
    size = max(64, budget // max(1, vocabulary * itemsize))
    for start in range(0, len(kept), size):
        yield slice(start, start + size) if len(kept) == len(targets) else kept[start : start + size]


def _results(like: Tensor) -> Statistics:
    """What an epilogue's ``statistics`` gives, for every row of ``like``; 0 where a token does not count."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    logprob, entropy, top, log_total = (like.new_zeros(like.shape[0], dtype=dtype) for _ in range(4))
    return logprob, entropy, top, log_total


def _if_any(grad: Tensor) -> Tensor | None:
    """None for zeros, as the entropy's gradient mostly is; on a CPU, where to look costs less than to compute."""
    return None if grad.is_cpu and not bool(grad.any()) else grad


# --- from logits ------------------------------------------------------------------------------------------------------


def _token_blocks(logits: Tensor, targets: Tensor, impl: str) -> Iterable[slice | Tensor]:
    """Triton's kernels widen as they read and pass over tokens that do not count: they take all at once."""
    return [slice(None)] if impl == "triton" else _blocks(targets, logits.shape[1], 4)


@torch.library.custom_op("nlgrpo::token_logprob", mutates_args=())
def _token_op(logits: Tensor, targets: Tensor, temperature: Tensor, impl: str) -> Statistics:
    results = _results(logits)
    for rows in _token_blocks(logits, targets, impl):
        parts = epilogue(impl).statistics(logits[rows], targets[rows], temperature.item())
        for result, part in zip(results, parts, strict=True):
            result[rows] = part
    return results


@torch.library.custom_op("nlgrpo::token_logprob_backward", mutates_args=())
def _token_backward_op(
    logits: Tensor,
    targets: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    temperature: Tensor,
    impl: str,
) -> Tensor:
    grad = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    upstream = _if_any(grad_entropy)
    for rows in _token_blocks(logits, targets, impl):
        out = grad[rows]
        epilogue(impl).gradient(
            logits[rows], targets[rows], top[rows], log_total[rows], entropy[rows],
            grad_logprob[rows], None if upstream is None else upstream[rows], temperature.item(), out,
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
    ctx.save_for_backward(logits, targets, *output[2:], output[1], temperature)


def _token_backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *saved, temperature = ctx.saved_tensors
    grad = _token_backward_op(*saved, grad_logprob, grad_entropy, temperature, ctx.impl)
    return grad, None, None, None


_token_op.register_autograd(_token_backward, setup_context=_token_setup)


# --- from hidden states -----------------------------------------------------------------------------------------------


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, emulate_bf16: bool) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits.bfloat16().to(logits.dtype) if emulate_bf16 else logits


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
    results = _results(hidden)
    for rows in _blocks(targets, len(weight), hidden.itemsize):
        logits = _logits(hidden[rows], weight, bias, emulate_bf16)
        parts = epilogue(impl).statistics(logits, targets[rows], temperature.item())
        for result, part in zip(results, parts, strict=True):
            result[rows] = part
    return results


@torch.library.custom_op("nlgrpo::linear_logprob_backward", mutates_args=())
def _linear_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    temperature: Tensor,
    emulate_bf16: bool,
    impl: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; of those that are not ``wanted``, an empty tensor."""
    sums = Gradients(hidden, weight, wanted)
    upstream = _if_any(grad_entropy)
    for rows in _blocks(targets, len(weight), hidden.itemsize):
        logits = _logits(hidden[rows], weight, bias, emulate_bf16)
        epilogue(impl).gradient(
            logits, targets[rows], top[rows], log_total[rows], entropy[rows],
            grad_logprob[rows], None if upstream is None else upstream[rows], temperature.item(), logits,
        )  # fmt: skip
        sums.add(rows, logits, hidden[rows], weight)
    return sums.results()


@_linear_op.register_fake
def _(hidden: Tensor, *_: object) -> Statistics:
    return _results(hidden)


@_linear_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return Gradients(hidden, weight, rest[-1]).results()


class Gradients:
    """Sums over blocks of the gradients of hidden, weight and bias; of narrow types the latter two in float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: list[bool]) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dtype, self.wanted = weight.dtype, wanted
        self.hidden = hidden.new_zeros(hidden.shape if wanted[0] else 0)
        self.weight = weight.new_zeros(weight.shape if wanted[1] else 0, dtype=wide)
        self.bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=wide)

    def add(self, rows: slice | Tensor, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """A block whose logits have the gradient ``grad (n, V)``."""
        if self.wanted[0]:
            self.hidden[rows] = grad @ weight
        if self.wanted[1] and self.weight.dtype == grad.dtype:
            self.weight.addmm_(grad.T, hidden)
        elif self.wanted[1]:
            self.weight += grad.T @ hidden
        if self.wanted[2]:
            self.bias += grad.sum(0, dtype=self.bias.dtype)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight.to(self.dtype), self.bias.to(self.dtype)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, temperature, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, targets, *output[2:], output[1], temperature)


def _linear_backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    *saved, temperature = ctx.saved_tensors
    grads = _linear_backward_op(*saved, grad_logprob, grad_entropy, temperature, *ctx.options, wanted)
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None, None, None, None


_linear_op.register_autograd(_linear_backward, setup_context=_linear_setup)
