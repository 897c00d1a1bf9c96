"""How far the expected gradient of an estimator in groups of M is from the objective's own gradient.

Two populations of rewards stand for all others: 0 and 1, where the expectation is a sum over the number of successes,
and a normal distribution, where it is an average over many groups. A factor that is the same everywhere acts like
another learning rate. One that depends on the success probability, or a cosine below 1, is another objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.objectives.advantages import Baseline
from nlgrpo.objectives.base import Objective

PROBABILITIES = (0.02, 0.1, 0.3, 0.6, 0.8)  # of success: from prompts that are hard to prompts that are solved
GROUPS = 16_384
ATOMS = 4_096  # equally likely rewards in place of a normal distribution
MOST_SAMPLES = 2**21  # in all simulated groups
STRATA = 64  # of equally many atoms, in each of which the advantages are averaged


def gain_for_binary(
    objective: Objective, M: int, probabilities: Sequence[float] = PROBABILITIES, baseline: Baseline = "mean"
) -> Tensor:
    """Expected over exact gradient for rewards of 0 and 1, one number for each success probability p, float64.

        sum_c C(M, c) p^c (1-p)^(M-c)  1/M [c A_1(c) / p - (M - c) A_0(c) / (1 - p)]   over   dR/dp

    A_1(c) and A_0(c) are the advantages of a success and a failure in a group of M with c successes, and 1/p and
    -1/(1-p) are the derivatives of log p and log(1 - p). 1: the estimator is unbiased. NaN where dR/dp is 0, as for the
    worst 10% of a prompt that is solved in more than 90% of its samples.

    Raises ValueError as `Objective.advantage`, and for probabilities that are not in (0, 1).
    """
    p = torch.tensor(list(probabilities), dtype=torch.float64)
    if not ((p > 0) & (p < 1)).all():
        raise ValueError(f"expected probabilities in (0, 1), got {list(probabilities)}.")
    successes = torch.arange(M + 1, dtype=torch.float64)
    rewards = (torch.arange(M) < successes[:, None]).double()  # (M + 1, M): one group for each number of successes
    advantages = objective.advantage(rewards, baseline)
    of_success = (advantages * rewards).sum(-1) / M
    of_failure = (advantages * (1 - rewards)).sum(-1) / M
    ways = math.lgamma(M + 1) - torch.lgamma(successes + 1) - torch.lgamma(M - successes + 1)
    drawn = (ways + successes * p[:, None].log() + (M - successes) * (1 - p[:, None]).log()).exp()  # (len(p), M + 1)
    expected = (drawn * (of_success / p[:, None] - of_failure / (1 - p[:, None]))).sum(-1)
    atoms = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(len(p), 2)
    at_failure, at_success = objective.linearize(atoms, torch.stack([1 - p, p], -1)).unbind(-1)
    exact = at_success - at_failure
    return torch.where(exact.abs() > 1e-12, expected / exact, torch.nan)


@dataclass(frozen=True)
class ContinuousGain:
    """The expected advantage of a sample, as a function of its reward, beside the exact first variation."""

    size: float
    """Its projection on the exact first variation, over the exact one's norm."""
    cosine: float
    """Cosine between both. 1: the same direction in every model."""


def gain_for_normal(
    objective: Objective, M: int, baseline: Baseline = "mean", *, groups: int = GROUPS, seed: int = 0
) -> ContinuousGain:
    """Compare both for standard normal rewards, by simulated groups: with 16,384 of them the third digit is noise.

    Rank-based objectives have the same result for any mean and scale. Soft best-of-N and entropic risk do not, and if
    they tilt the distribution beyond its simulated ends, at 3.7 standard deviations, the result means nothing.

    Raises ValueError as `Objective.advantage`.
    """
    groups = min(groups, max(STRATA, MOST_SAMPLES // M))
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.special.ndtri((torch.arange(ATOMS, dtype=torch.float64) + 0.5) / ATOMS)
    exact = objective.linearize(atoms[None], torch.full((ATOMS,), 1 / ATOMS, dtype=torch.float64))[0]
    exact = exact - exact.mean()
    drawn = torch.randint(ATOMS, (groups, M), generator=generator)
    advantages = objective.advantage(atoms[drawn], baseline).flatten()
    stratum = drawn.flatten() * STRATA // ATOMS
    totals = torch.zeros(2, STRATA, dtype=torch.float64)
    totals.index_add_(1, stratum, torch.stack([advantages, torch.ones_like(advantages)]))
    expected = totals[0] / totals[1]
    target = exact.view(STRATA, -1).mean(-1)
    inner = expected @ target
    return ContinuousGain(
        size=float(inner / target.square().sum()),
        cosine=float(inner / (expected.norm() * target.norm())),
    )
