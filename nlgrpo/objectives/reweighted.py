"""Estimates for a policy pi from samples of another policy q, by importance weights w = pi / q.

Legend: P prompts, M samples per prompt; S a subset of n of the M samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Subsets(NamedTuple):
    """An estimate that is a mean over the subsets S of ``size`` = n samples of a group, as a function of their weights.

    ``means(w)``, for w (P, M) in float64: the means over all S of prod_S w v(S), with v(S) the value of S, and of
    prod_S w, (P,) each. Both are differentiable, and linear in each w_j. ``few(w)``: baseline (P, M) of a sample beside
    which fewer than n others have a weight; NaN, and without ``few``, for an advantage of 0.
    """

    size: int
    means: Callable[[Tensor], tuple[Tensor, Tensor]]
    few: Callable[[Tensor], Tensor] | None = None


def normalized(weights: Tensor) -> Tensor:
    """Return w_j / sum_l w_l, (P, M); 1/M each in a group without any weight."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 1 / weights.shape[-1])


def ratio(of_values: Tensor, of_ones: Tensor) -> Tensor:
    """Return the self-normalised mean, ``of_values`` / ``of_ones``; NaN where no subset has a weight."""
    return torch.where(of_ones > 0, of_values / of_ones, torch.nan)


def advantages(subsets: Subsets, weights: Tensor) -> Tensor:
    """Return the advantages (P, M) of an estimate over subsets.

        A_j = n E_T[prod_T w  v(T + j)]  -  n E_T[prod_T w] b_j,      b_j = E_S[prod_S w  v(S)] / E_S[prod_S w]

    T runs over the subsets of n - 1 of the other samples, and S over those of n of them: the baseline b_j is the
    self-normalised estimate without sample j. w_j A_j has the policy gradient as its expectation, because E_q[w] = 1,
    and E_q[w_j grad log pi(y_j)] = 0 for any factor that does not depend on y_j.

    The derivatives of `Subsets.means` are the sums over T, and what remains of them at w_j = 0 those over the others.
    """
    parts = _split(subsets, weights)
    few = torch.nan if subsets.few is None else subsets.few(weights)
    enough = parts.weight_without > 0
    baseline = torch.where(enough, parts.value_without / parts.weight_without.where(enough, 1.0), few)
    return torch.where(baseline.isnan(), 0.0, parts.value_with - parts.weight_with * baseline)


def uncentred(subsets: Subsets, weights: Tensor) -> Tensor:
    """Return n E_T[prod_T w v(T + j)], the advantages of `advantages` without their baseline."""
    return _split(subsets, weights).value_with


class _Parts(NamedTuple):
    """Means over subsets, (P, M) each: n times those over T, and the parts of those over S without sample j.

    ``weight_without`` is exactly 0 where fewer than n others have a weight.
    """

    value_with: Tensor
    weight_with: Tensor
    value_without: Tensor
    weight_without: Tensor


def _split(subsets: Subsets, weights: Tensor) -> _Parts:
    with torch.inference_mode(False), torch.enable_grad():
        w = weights.detach().double().clone().requires_grad_()
        value, weight = subsets.means(w)
        (value_slope,) = torch.autograd.grad(value.sum(), w, retain_graph=True)
        (weight_slope,) = torch.autograd.grad(weight.sum(), w)
    w = w.detach()
    M = w.shape[1]
    present = w != 0
    others = present.sum(-1, keepdim=True) - present.long()
    # linear in w_j: the value at w_j = 0
    value_without = value.detach()[:, None] - w * value_slope
    weight_without = weight.detach()[:, None] - w * weight_slope
    return _Parts(
        value_with=M * value_slope,
        weight_with=M * weight_slope,
        value_without=value_without,
        weight_without=torch.where(others >= subsets.size, weight_without, 0.0),
    )


def best_of_subsets(rewards: Tensor, weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the means over all subsets S of ``size`` = n samples of prod_S w max_S r, and of prod_S w, (P,).

    With the rewards in ascending order, E_d(k) the mean of prod w over the subsets of d of the first k samples, and
    V(k) that of prod w max r over the subsets of n:

        E_d(k) = (1 - d/k) E_d(k-1) + d/k w_k E_{d-1}(k-1);      V(k) = (1 - n/k) V(k-1) + n/k w_k r_k E_{n-1}(k-1)
    """
    ordered, order = rewards.double().sort(dim=-1, stable=True)
    weights = weights.gather(-1, order)
    d = torch.arange(size + 1, dtype=weights.dtype, device=weights.device)
    # E_0 .. E_n and V of no samples
    E = (d == 0).to(weights).expand(len(weights), -1)
    V = torch.zeros_like(weights[:, 0])
    for k in range(1, weights.shape[1] + 1):
        share = d / k
        # w_k E_{d-1}(k-1)
        with_newest = weights[:, k - 1 : k] * torch.nn.functional.pad(E[:, :-1], (1, 0))
        V = (1 - share[-1]) * V + share[-1] * with_newest[:, -1] * ordered[:, k - 1]
        E = (1 - share) * E + share * with_newest
    return V, E[:, -1]
