"""Policies over a handful of responses, where every group can be listed and every update be made exactly.

Legend: A atoms (the responses there are), M samples a group, G groups. Probabilities are float64.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def all_groups(probs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """Every group that M draws from ``probs`` (A,) can be: atoms (G, M) in int64, and their chances (G,); G = A^M."""
    atoms = torch.tensor(list(itertools.product(range(len(probs)), repeat=M)))
    return atoms, probs[atoms].prod(-1)


def all_counts(probs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """As `all_groups`, one for all that hold each atom equally often: G = C(M + A - 1, A - 1), multinomial chances.

    It serves whatever does not look at the order of a group, and reaches a hundred samples of three atoms.
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
    """What an objective sees of groups (G, M): rewards (A,) -> (G, M), or a kernel matrix (A, A) -> (G, M, M)."""
    return values[atoms] if values.ndim == 1 else values[atoms[:, :, None], atoms[:, None, :]]


def expected_gradient(atoms: Tensor, chance: Tensor, advantages: Tensor, probs: Tensor) -> Tensor:
    """E (1/M) sum_j A_j d log pi(y_j) / d logits over groups (G, M) of a softmax policy, (A,): the trainer's step.

    d log pi(y) / d logits = onehot(y) - pi.
    """
    each = chance[:, None] * advantages / atoms.shape[1]
    drawn = torch.stack([torch.where(atoms == a, each, 0.0).sum() for a in range(len(probs))])  # pairwise sums
    return drawn - each.sum() * probs


def cells(K: int) -> Tensor:
    """Midpoints of K equal cells of [0, 1], (K,)."""
    return (torch.arange(K, dtype=torch.float64) + 0.5) / K


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL[p | q] of the last dimension; an atom without mass under p adds 0."""
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(-1)


def proximal_step(log_pi: Tensor, linear: Tensor, log_ref: Tensor, *, L: float, beta: Tensor | float) -> Tensor:
    """log of argmax_pi <linear, pi> - beta KL[pi | ref] - L KL[pi | pi_t], exactly: the update of IAMA, Algorithm 1.

        pi_{t+1} ~ (pi_t^L ref^beta e^linear)^{1 / (L + beta)}

    of shape (..., A); ``beta`` may be (..., 1). The step size is 1/L.
    """
    return ((L * log_pi + beta * log_ref + linear) / (L + beta)).log_softmax(-1)


def budget_step(log_pi: Tensor, linear: Tensor, log_ref: Tensor, *, L: float, budget: float) -> Tensor:
    """log of argmax_pi <linear, pi> - L KL[pi | pi_t] within KL[pi | ref] <= ``budget``, (P, A).

    The multiplier of the budget, a beta of its own in each row, is found by bisection of its logarithm; 0 where the
    budget is not reached. The kept end of the bracket is the one that stays within.
    """
    free = proximal_step(log_pi, linear, log_ref, L=L, beta=0.0)
    low, high = torch.full_like(linear[:, :1], -20.0), torch.full_like(linear[:, :1], 20.0)
    for _ in range(50):
        middle = (low + high) / 2
        over = kl(proximal_step(log_pi, linear, log_ref, L=L, beta=middle.exp()), log_ref)[:, None] > budget
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    bound = proximal_step(log_pi, linear, log_ref, L=L, beta=high.exp())
    return torch.where(kl(free, log_ref)[:, None] > budget, bound, free)
