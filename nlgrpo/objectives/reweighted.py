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
    own, others, level = _split(subsets, weights)
    few = torch.nan if subsets.few is None else subsets.few(weights)
    baseline = torch.where(level > 0, others / level.where(level > 0, 1.0), few)
    own_value, own_weight = own
    return torch.where(baseline.isnan(), 0.0, own_value - own_weight * baseline)


def uncentred(subsets: Subsets, weights: Tensor) -> Tensor:
    """Return n E_T[prod_T w v(T + j)], the advantages of `advantages` without their baseline."""
    return _split(subsets, weights)[0][0]


def _split(subsets: Subsets, weights: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return n times the means over T, (P, M) each, and the parts of the means over S without sample j, (P, M) each.

    The last one is exactly 0 where fewer than n others have a weight.
    """
    with torch.inference_mode(False), torch.enable_grad():
        w = weights.detach().double().clone().requires_grad_()
        of_values, of_ones = subsets.means(w)
        (values,) = torch.autograd.grad(of_values.sum(), w, retain_graph=True)
        (ones,) = torch.autograd.grad(of_ones.sum(), w)
    w, samples = w.detach(), w.shape[1]
    present = w != 0
    enough = present.sum(-1, keepdim=True) - present.long() >= subsets.size
    others = (of_values.detach()[:, None] - w * values, of_ones.detach()[:, None] - w * ones)
    return (samples * values, samples * ones), others[0], torch.where(enough, others[1], 0.0)


def best_of_subsets(rewards: Tensor, weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the means over all subsets S of ``size`` = n samples of prod_S w max_S r, and of prod_S w, (P,).

    With the rewards in ascending order, E_d(k) the mean of prod w over the subsets of d of the first k samples, and
    V(k) that of prod w max r over the subsets of n:

        E_d(k) = (1 - d/k) E_d(k-1) + d/k w_k E_{d-1}(k-1);      V(k) = (1 - n/k) V(k-1) + n/k w_k r_k E_{n-1}(k-1)
    """
    ordered, order = rewards.double().sort(dim=-1, stable=True)
    weights = weights.gather(-1, order)
    degree = torch.arange(size + 1, dtype=weights.dtype, device=weights.device)
    products = (degree == 0).to(weights).expand(len(weights), -1)  # E_0 .. E_n of no samples
    value = torch.zeros_like(weights[:, 0])
    for k in range(1, weights.shape[1] + 1):
        share = degree / k
        newest = weights[:, k - 1 : k]
        extended = newest * torch.nn.functional.pad(products[:, :-1], (1, 0))
        value = (1 - share[-1]) * value + share[-1] * extended[:, -1] * ordered[:, k - 1]
        products = (1 - share) * products + share * extended
    return value, products[:, -1]
