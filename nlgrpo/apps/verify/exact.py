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


def expectation(rewards: Tensor, probs: Tensor) -> Tensor:
    """E r."""
    return (probs * rewards).sum(-1)


def best_of(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """E max of n draws, over all A^n draws."""
    draws = _draws(rewards, n)
    return (probs[draws].prod(-1) * rewards[draws].amax(-1)).sum()


def worst_of(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """E min of n draws, over all A^n draws."""
    draws = _draws(rewards, n)
    return (probs[draws].prod(-1) * rewards[draws].amin(-1)).sum()


def best_of_cells(rewards: Tensor, probs: Tensor, n: int) -> Tensor:
    """E max of n draws from P(max <= r) = C(r)^n: r_max - int C(r)^n dr (IAMA, H.3). ``probs`` (..., A)."""
    order = rewards.argsort()
    at_most = probs[..., order].cumsum(-1)[..., :-1]
    return rewards[order[-1]] - (at_most**n * rewards[order].diff()).sum(-1)


def best_of_poisson(rewards: Tensor, probs: Tensor, rate: float, most: int = 80) -> Tensor:
    """E max of K draws, K ~ Poisson(rate), 0 if K = 0: the first ``most`` terms of the series."""
    chances = [math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) for k in range(1, most)]
    return torch.stack([chance * best_of_cells(rewards, probs, k) for k, chance in enumerate(chances, 1)]).sum()


def lower_tail(rewards: Tensor, probs: Tensor, alpha: float) -> Tensor:
    """Mean of the lowest share alpha: max_t t - E (t - r)_+ / alpha, reached at an atom (Rockafellar and Uryasev)."""
    return torch.stack([t - (probs * (t - rewards).clamp(min=0)).sum() / alpha for t in rewards]).max()


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
    return -(probs[:, None] * probs[None, :] * kernel).sum()


def log_volume(kernel: Tensor, probs: Tensor, n: int, eps: float) -> Tensor:
    """E log det(K + eps I) of n draws, over all A^n draws."""
    draws = _draws(kernel, n)
    minors = kernel[draws[:, :, None], draws[:, None, :]] + eps * torch.eye(n, dtype=kernel.dtype)
    return (probs[draws].prod(-1) * torch.logdet(minors)).sum()


# --- the response that best-of-N and worst-of-N choose ----------------------------------------------------------------


def chosen(order: Tensor, probs: Tensor, n: int) -> Tensor:
    """P(the highest of n draws is a) for each atom a, over all A^n draws. ``order`` (A,) has no ties."""
    draws = _draws(order, n)
    highest = draws.gather(1, order[draws].argmax(-1, keepdim=True))[:, 0]
    return torch.zeros_like(probs).index_add(0, highest, probs[draws].prod(-1))


def best_of_masses(at_most: Tensor, n: int) -> Tensor:
    """P(the best of n is a) of ordered atoms from their CDF (..., A): C(a)^n minus that of the atom below."""
    powers = at_most**n
    return powers.diff(dim=-1, prepend=torch.zeros_like(powers[..., :1]))


def divergence(probs: Tensor, reference: Tensor) -> Tensor:
    """KL of each policy (P, A) from the reference (A,)."""
    return torch.special.xlogy(probs, probs / reference).sum(-1)


def win_rate(rewards: Tensor, probs: Tensor, reference: Tensor, n: int, *, worst: bool = False) -> Tensor:
    """P(best of n of ``probs`` beats best of n of ``reference``), ties counting 1/2, over all A^n by A^n draws.

    InfAlign, Definition 4; ``worst``: worst of n against worst of n.
    """
    draws = _draws(rewards, n)
    of_each = rewards[draws].amin(-1) if worst else rewards[draws].amax(-1)
    wins = (of_each[:, None] > of_each[None]).double() + (of_each[:, None] == of_each[None]).double() / 2
    return (probs[draws].prod(-1)[:, None] * reference[draws].prod(-1)[None] * wins).sum()


def _draws(atoms: Tensor, n: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(len(atoms)), repeat=n)))
