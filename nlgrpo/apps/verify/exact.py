"""Functionals of a known distribution by their definitions: the exact values for `nlgrpo verify`.

They do not use the methods of the objectives (ranks, weight tables, suffix sums): they enumerate draws, and take sums
and maxima directly. All are differentiable in ``probs``. Shapes: A atoms, ``rewards`` (A,) and ``probs`` (A,) in
float64; ``kernel`` (A, A), the similarity of two atoms.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def all_draws(A: int, n: int) -> Tensor:
    """All A^n sequences of n draws from A atoms, (A^n, n) int64."""
    return torch.tensor(list(itertools.product(range(A), repeat=n)))


def expectation(rewards: Tensor, probs: Tensor) -> Tensor:
    """E r."""
    return (probs * rewards).sum(-1)


def best_of(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """E max of n draws, over all A^n draws."""
    draws = all_draws(len(rewards), n)
    chance = probs[draws].prod(-1)
    chosen = rewards[draws].amax(-1)
    return (chance * chosen).sum()


def worst_of(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """E min of n draws, over all A^n draws."""
    draws = all_draws(len(rewards), n)
    chance = probs[draws].prod(-1)
    chosen = rewards[draws].amin(-1)
    return (chance * chosen).sum()


def best_of_cells(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """E max of n draws from P(max <= r) = C(r)^n: r_max - int C(r)^n dr (IAMA, H.3). ``probs`` (..., A)."""
    order = rewards.argsort()
    highest = rewards[order[-1]]
    widths = rewards[order].diff()
    cdf = probs[..., order].cumsum(-1)[..., :-1]
    return highest - (cdf**n * widths).sum(-1)


def best_of_poisson(rewards: Tensor, probs: Tensor, rate: float, most: int = 80) -> Tensor:
    """E max of K draws, K ~ Poisson(rate), 0 if K = 0: the first ``most`` terms of the series."""
    terms = []
    for k in range(1, most):
        chance = math.exp(k * math.log(rate) - rate - math.lgamma(k + 1))
        terms.append(chance * best_of_cells(rewards, probs, k))
    return torch.stack(terms).sum()


def lower_tail(rewards: Tensor, probs: Tensor, alpha: float) -> Tensor:
    """Mean of the lowest share alpha: max_t t - E (t - r)_+ / alpha, reached at an atom (Rockafellar and Uryasev)."""
    candidates = []
    for t in rewards:
        shortfall = (t - rewards).clamp(min=0)
        candidates.append(t - (probs * shortfall).sum() / alpha)
    return torch.stack(candidates).max()


def tilted(rewards: Tensor, probs: Tensor, tau: float) -> Tensor:
    """E[r e^{r/tau}] / E e^{r/tau}."""
    weights = probs * (rewards / tau).exp()
    return (weights * rewards).sum() / weights.sum()


def certainty_equivalent(rewards: Tensor, probs: Tensor, beta: float) -> Tensor:
    """1/beta log E e^{beta r}."""
    return (probs * (beta * rewards).exp()).sum().log() / beta


def hump(rewards: Tensor, probs: Tensor) -> Tensor:
    """The distortion f(z) = 6 z (1 - z): 3 times best-of-2 minus 2 times best-of-3."""
    return 3 * best_of(rewards, probs, 2) - 2 * best_of(rewards, probs, 3)


def rao(kernel: Tensor, probs: Tensor) -> Tensor:
    """-E k(y, y'), over all pairs."""
    pairs = probs[:, None] * probs[None, :]
    return -(pairs * kernel).sum()


def log_volume(kernel: Tensor, probs: Tensor, n: int, eps: float) -> Tensor:
    """E log det(K + eps I) of n draws, over all A^n draws."""
    draws = all_draws(len(kernel), n)
    chance = probs[draws].prod(-1)
    minors = kernel[draws[:, :, None], draws[:, None, :]]
    volumes = torch.logdet(minors + eps * torch.eye(n, dtype=kernel.dtype))
    return (chance * volumes).sum()


# --- the response that best-of-N and worst-of-N choose ----------------------------------------------------------------


def chosen(order: Tensor, probs: Tensor, n: int) -> Tensor:
    """P(the highest of n draws is a) for each atom a, over all A^n draws. ``order`` (A,) has no ties."""
    draws = all_draws(len(order), n)
    chance = probs[draws].prod(-1)
    place = order[draws].argmax(-1, keepdim=True)
    highest = draws.gather(1, place)[:, 0]
    return torch.zeros_like(probs).index_add(0, highest, chance)


def best_of_masses(cdf: Tensor, n: int) -> Tensor:
    """P(the best of n is a) of ordered atoms from their CDF (..., A): C(a)^n minus that of the atom below."""
    cdf_of_best = cdf**n
    nothing = torch.zeros_like(cdf[..., :1])
    return cdf_of_best.diff(dim=-1, prepend=nothing)


def divergence(probs: Tensor, reference: Tensor) -> Tensor:
    """KL of each policy (P, A) from the reference (A,)."""
    return torch.special.xlogy(probs, probs / reference).sum(-1)


def wins(ours: Tensor, theirs: Tensor) -> Tensor:
    """1 where ours is larger, 1/2 where both are equal, 0 where theirs is larger."""
    return (ours > theirs).double() + (ours == theirs).double() / 2


def win_rate(rewards: Tensor, probs: Tensor, reference: Tensor, n: int, *, worst: bool = False) -> Tensor:
    """P(best of n of ``probs`` beats best of n of ``reference``), ties counting 1/2, over all A^n by A^n draws.

    InfAlign, Definition 4; ``worst``: worst of n against worst of n.
    """
    draws = all_draws(len(rewards), n)
    if worst:
        chosen = rewards[draws].amin(-1)
    else:
        chosen = rewards[draws].amax(-1)
    chance_ours = probs[draws].prod(-1)[:, None]
    chance_theirs = reference[draws].prod(-1)[None, :]
    return (chance_ours * chance_theirs * wins(chosen[:, None], chosen[None, :])).sum()
