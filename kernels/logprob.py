"""Log-probabilities of tokens."""

from __future__ import annotations

from torch import Tensor, int64

from . import reference
from .dispatch import choose


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` and entropy of the next-token distribution, from hidden states.

    Equals

        logits = (hidden @ weight.T + bias).float() / temperature
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], Categorical(logits=logits).entropy()

    hidden (T, D), weight (V, D), bias (V,) of one dtype; targets (T,) int64 in [0, V). Both results are (T,) in nats,
    float32, or float64 for float64 inputs; T may be 0. Differentiable in hidden, weight and bias.

    Raises ValueError for shapes that do not fit, targets that are not int64, and temperature <= 0.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (T, D) and weight (V, D), got {_shape(hidden)} and {_shape(weight)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},), one per row of weight, got {_shape(bias)}.")
    _check_targets(targets, hidden, temperature)
    choose(impl, "linear_logprob")
    return reference.linear_logprob(hidden, weight, targets, temperature=temperature, bias=bias)


def token_logprob(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` (T,) and entropy (T,) from logits (T, V): `linear_logprob` without the product.

    A logit of -inf is a token that cannot be drawn; it adds nothing to the entropy. Raises as `linear_logprob`.
    """
    if logits.ndim != 2:
        raise ValueError(f"expected logits (T, V), got {_shape(logits)}; flatten the leading dimensions first.")
    _check_targets(targets, logits, temperature)
    choose(impl, "token_logprob")
    return reference.token_logprob(logits, targets, temperature=temperature)


def _check_targets(targets: Tensor, rows: Tensor, temperature: float) -> None:
    if targets.shape != rows.shape[:1]:
        raise ValueError(f"expected targets ({rows.shape[0]},), one per row of {_shape(rows)}, got {_shape(targets)}.")
    if targets.dtype != int64:
        raise ValueError(f"expected targets of dtype torch.int64, got {targets.dtype}; call targets.long().")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number > 0.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
