"""Policies over a few responses, for which all groups can be enumerated and updates are exact.

Shapes: A atoms (the possible responses), M samples per group, G groups. Probabilities are float64.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def all_groups(probs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """All G = A^M groups of M draws from ``probs`` (A,): atoms (G, M), int64, and probabilities (G,)."""
    atoms = torch.tensor(list(itertools.product(range(len(probs)), repeat=M)))
    return atoms, probs[atoms].prod(-1)


def all_counts(probs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """Like `all_groups`, with groups that differ only in order merged: G = C(M + A - 1, A - 1), multinomial.

    For functions that do not depend on the order of a group. Feasible up to about 100 samples of three atoms.
    """
    bars = list(itertools.combinations(range(M + len(probs) - 1), len(probs) - 1))
    ends = torch.tensor([(-1, *bar, M + len(probs) - 1) for bar in bars])
    counts = ends.diff(dim=1) - 1
    counted = counts.double()
    arrangements = torch.lgamma(torch.tensor(M + 1.0, dtype=torch.float64)) - torch.lgamma(counted + 1).sum(1)
    chance = (arrangements + torch.special.xlogy(counted, probs.double()).sum(1)).exp()
    atoms = torch.arange(len(probs)).repeat(len(counts)).repeat_interleave(counts.flatten())
    return atoms.view(-1, M), chance


def seen(values: Tensor, atoms: Tensor) -> Tensor:
    """Values of groups ``atoms`` (G, M): rewards (A,) -> (G, M), or a kernel matrix (A, A) -> (G, M, M)."""
    return values[atoms] if values.ndim == 1 else values[atoms[:, :, None], atoms[:, None, :]]


def expected_gradient(atoms: Tensor, chance: Tensor, advantages: Tensor, probs: Tensor) -> Tensor:
    """Expected gradient of a softmax policy, E (1/M) sum_j A_j d log pi(y_j) / d logits over groups (G, M): (A,).

    d log pi(y) / d logits = onehot(y) - pi.
    """
    weights = chance[:, None] * advantages / atoms.shape[1]
    per_atom = torch.stack([torch.where(atoms == a, weights, 0.0).sum() for a in range(len(probs))])  # pairwise sums
    return per_atom - weights.sum() * probs


def cells(K: int) -> Tensor:
    """Midpoints of K equal cells of [0, 1], (K,)."""
    return (torch.arange(K, dtype=torch.float64) + 0.5) / K


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL[p | q] over the last dimension; atoms with p = 0 contribute 0."""
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)


def proximal_step(log_pi: Tensor, linear: Tensor, log_ref: Tensor, *, L: float, beta: Tensor | float) -> Tensor:
    """log of argmax_pi <linear, pi> - beta KL[pi | ref] - L KL[pi | pi_t]: the exact update of IAMA, Algorithm 1.

        pi_{t+1} ~ (pi_t^L ref^beta e^linear)^{1 / (L + beta)}

    Shapes: (..., A); ``beta`` may be (..., 1). The step size is 1/L.
    """
    return ((L * log_pi + beta * log_ref + linear) / (L + beta)).log_softmax(-1)


def budget_step(log_pi: Tensor, linear: Tensor, log_ref: Tensor, *, L: float, budget: float) -> Tensor:
    """log of argmax_pi <linear, pi> - L KL[pi | pi_t] subject to KL[pi | ref] <= ``budget``, (P, A).

    The multiplier of the constraint, one beta per row, is found by bisection of its logarithm; it is 0 if the
    constraint is inactive. The returned end of the bracket satisfies the constraint.
    """
    free = proximal_step(log_pi, linear, log_ref, L=L, beta=0.0)
    low = torch.full_like(linear[:, :1], -20.0)
    high = torch.full_like(linear[:, :1], 20.0)
    for _ in range(50):
        middle = (low + high) / 2
        over = kl(proximal_step(log_pi, linear, log_ref, L=L, beta=middle.exp()), log_ref)[:, None] > budget
        low = torch.where(over, middle, low)
        high = torch.where(over, high, middle)
    bound = proximal_step(log_pi, linear, log_ref, L=L, beta=high.exp())
    return torch.where(kl(free, log_ref)[:, None] > budget, bound, free)
