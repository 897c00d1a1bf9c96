"""Linearised rewards: the first variation of a rank-based objective on groups of rewards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .dispatch import choose

LARGEST = 4096  # maximum number of samples per group for the Triton kernel


def linearize(rewards: Tensor, weights: Tensor, *, impl: str = "auto") -> Tensor:
    """Linearised rewards of every group (IAMA, Prop. 4.2 and Alg. 3), up to a constant per group.

        r~_(i) = -sum_{k=i}^{M-1} w_k (r_(k+1) - r_(k)),      r_(1) <= .. <= r_(M) the group, sorted

    rewards (P, M), any strides, P may be 0; weights (M,), w_k for the k-th smallest reward (the last one is unused).
    The result is in the order of ``rewards``; the best sample has 0. Weights of 1 give r - max r. Equal rewards get
    equal values, also equal infinities: their gap counts 0, and so does any gap of weight 0. Other gaps next to an
    infinity are infinite.

    float32 and float64 keep their dtype; others are computed and returned in float32. Differentiable in both inputs.
    ``impl``: "cpp" is the compiled op for a CPU; "triton" takes M up to 4,096; "auto" is the one for the device if it
    can run, also under ``torch.compile``, and otherwise "torch".

    Raises ValueError for shapes that do not match and for a NaN reward, naming the first. The NaN check reads the data
    and is skipped inside ``torch.compile``, where NaN is sorted last and spreads over its group.
    """
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"expected rewards (P, M) with M >= 1, got {tuple(rewards.shape)}.")
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"expected weights ({rewards.shape[1]},), one per rank, got {tuple(weights.shape)}.")
    if rewards.numel() and not torch.compiler.is_compiling() and rewards.amax().isnan():  # amax propagates NaN
        group, sample = rewards.isnan().nonzero()[0].tolist()
        raise ValueError(f"reward of group {group}, sample {sample} is NaN; drop the sample or the group first.")
    rewards = reference.widen(rewards)
    weights = weights.to(rewards)
    limit = ("M", rewards.shape[1], LARGEST)
    chosen = choose(impl, "linearize", rewards, limit=limit, float64=True, cpp=(torch.float32, torch.float64))
    if chosen == "torch":
        return reference.linearize(rewards, weights)
    return _linearize_op(rewards, weights, chosen)


@torch.library.custom_op("nlgrpo::linearize", mutates_args=())
def _linearize_op(rewards: Tensor, weights: Tensor, impl: str) -> Tensor:
    if impl == "cpp":
        return torch.ops.nlgrpo.linearize_rows(rewards.contiguous(), weights.contiguous())
    from . import linearize_triton

    return linearize_triton.linearize(rewards, weights)


@torch.library.custom_op("nlgrpo::linearize_backward", mutates_args=())
def _linearize_backward_op(rewards: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by rewards and by weights, equal to autograd through `reference.linearize`.

    With G_k the sum of ``grad`` over the samples up to rank k, sum(grad * out) = -sum_k w_k (r_(k+1) - r_(k)) G_k.
    """
    ordered, order = rewards.sort(dim=-1, stable=True)
    w, gap = weights[:-1], ordered.diff(dim=-1)
    counts = (gap != 0) & (w != 0) & gap.isfinite()
    up_to = grad.gather(-1, order).cumsum(-1)[:, :-1].where(counts, 0.0)
    by_gap = -w * up_to
    by_sorted = F.pad(by_gap, (1, 0)) - F.pad(by_gap, (0, 1))
    by_weights = -(gap.where(counts, 0.0) * up_to).sum(0)
    return torch.zeros_like(rewards).scatter(-1, order, by_sorted), F.pad(by_weights, (0, 1))


@_linearize_op.register_fake
def _(rewards: Tensor, weights: Tensor, impl: str) -> Tensor:
    return torch.empty_like(rewards, memory_format=torch.contiguous_format)


@_linearize_backward_op.register_fake
def _(rewards: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(weights)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_linearize_backward_op(*ctx.saved_tensors, grad), None


_linearize_op.register_autograd(_backward, setup_context=_setup)
