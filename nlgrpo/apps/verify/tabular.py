"""Policies over a few responses, for which all groups can be enumerated and updates are exact.

Shapes: A atoms (the possible responses), M samples per group, G groups. Probabilities are float64.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from nlgrpo.apps.verify import exact


def all_groups(probs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """All G = A^M groups of M draws from ``probs`` (A,): atoms (G, M), int64, and probabilities (G,)."""
    atoms = exact.all_draws(len(probs), M)
    return atoms, probs[atoms].prod(-1)


def all_counts(probs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """Like `all_groups`, with groups that differ only in order merged: G = C(M + A - 1, A - 1), multinomial.

    For functions that do not depend on the order of a group. Feasible up to about 100 samples of three atoms.
    """
    A = len(probs)
    # stars and bars: the counts are the gaps between A - 1 bars at M + A - 1 places
    places = M + A - 1
    bars = torch.tensor(list(itertools.combinations(range(places), A - 1)))
    before = torch.full((len(bars), 1), -1)
    after = torch.full((len(bars), 1), places)
    counts = torch.cat((before, bars, after), 1).diff(dim=1) - 1
    atoms = torch.arange(A).repeat(len(counts)).repeat_interleave(counts.flatten()).view(-1, M)

    # M! / (c_1! .. c_A!) p_1^c_1 .. p_A^c_A
    c = counts.double()
    log_orders = torch.lgamma(torch.tensor(M + 1.0, dtype=torch.float64)) - torch.lgamma(c + 1).sum(1)
    log_chance = torch.special.xlogy(c, probs.double()).sum(1)
    return atoms, (log_orders + log_chance).exp()


def seen(values: Tensor, atoms: Tensor) -> Tensor:
    """Values of groups ``atoms`` (G, M): rewards (A,) -> (G, M), or a kernel matrix (A, A) -> (G, M, M)."""
    if values.ndim == 1:
        return values[atoms]
    return values[atoms[:, :, None], atoms[:, None, :]]


def similarity(places: Tensor) -> Tensor:
    """Gaussian similarities e^{-(x - x')^2} of atoms with coordinates (A,): a kernel matrix (A, A)."""
    distance = places[:, None] - places[None, :]
    return (-distance.square()).exp()


def expected_gradient(atoms: Tensor, chance: Tensor, advantages: Tensor, probs: Tensor) -> Tensor:
    """Expected gradient of a softmax policy, E (1/M) sum_j A_j d log pi(y_j) / d logits over groups (G, M): (A,).

    d log pi(y) / d logits = onehot(y) - pi.
    """
    weights = chance[:, None] * advantages / atoms.shape[1]
    per_atom = []
    for a in range(len(probs)):
        # not index_add: `sum` adds pairwise, with smaller rounding errors
        per_atom.append(torch.where(atoms == a, weights, 0.0).sum())
    return torch.stack(per_atom) - weights.sum() * probs


def cells(K: int) -> Tensor:
    """Midpoints of K equal cells of [0, 1], (K,)."""
    return (torch.arange(K, dtype=torch.float64) + 0.5) / K


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL[p | q] over the last dimension; atoms with p = 0 contribute 0."""
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -torch.inf, 0.0, terms).sum(-1)


def reference_and_start(K: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Log-probabilities of two random policies over K cells, (1, K) each."""
    reference, start = torch.randn(2, 1, K, generator=generator, dtype=torch.float64).log_softmax(-1)
    return reference, start


def proximal_step(log_pi: Tensor, linear: Tensor, log_ref: Tensor, *, L: float, beta: Tensor | float) -> Tensor:
    """log of argmax_pi <linear, pi> - beta KL[pi | ref] - L KL[pi | pi_t]: the exact update of IAMA, Algorithm 1.

        pi_{t+1} ~ (pi_t^L ref^beta e^linear)^{1 / (L + beta)}

    Shapes: (..., A); ``beta`` may be (..., 1). The step size is 1/L.
    """
    exponent = L * log_pi + beta * log_ref + linear
    return (exponent / (L + beta)).log_softmax(-1)


def budget_step(log_pi: Tensor, linear: Tensor, log_ref: Tensor, *, L: float, budget: float) -> Tensor:
    """log of argmax_pi <linear, pi> - L KL[pi | pi_t] subject to KL[pi | ref] <= ``budget``, (P, A).

    The multiplier of the constraint, one beta per row, is found by bisection of its logarithm; it is 0 if the
    constraint is inactive. The returned end of the bracket satisfies the constraint.
    """

    def step(beta: Tensor | float) -> tuple[Tensor, Tensor]:
        """The update with this multiplier, and which rows exceed the budget, (P, 1)."""
        log_p = proximal_step(log_pi, linear, log_ref, L=L, beta=beta)
        return log_p, kl(log_p, log_ref)[:, None] > budget

    # bounds of log beta
    low = torch.full_like(linear[:, :1], -20.0)
    high = torch.full_like(linear[:, :1], 20.0)
    for _ in range(50):
        middle = (low + high) / 2
        _, over = step(middle.exp())
        low = torch.where(over, middle, low)
        high = torch.where(over, high, middle)
    bound, _ = step(high.exp())
    free, active = step(0.0)
    return torch.where(active, bound, free)
