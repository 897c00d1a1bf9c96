"""Corrects a step for the difference between the policy and the distribution that its completions were sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.objectives import importance_sampling
from nlgrpo.objectives.importance_sampling import Correction


@dataclass(frozen=True)
class Corrected:
    """Importance weights of R = P M completions of at most L tokens."""

    policy: Tensor
    """Log-probs (R, L) under the policy before its update."""
    tokens: Tensor
    """Weight in the loss of each token, (R, L)."""
    completions: Tensor | None
    """Weight of each completion in the objectives, (P, M); None at the token level."""
    sums: Tensor
    """To be added over ranks, (6,) float64: of weights their number, sum, sum of squares and how many were cut; the KL
    of all tokens, and their number."""
    extremes: Tensor
    """To be maximised over ranks, (2,): the largest weight, and minus the smallest one."""


def correct(correction: Correction, policy: Tensor, sampler: Tensor, lengths: Tensor) -> Corrected:
    """Compute the weights of completions.

    ``policy`` (R, L) and ``sampler`` (P, M, L): log-probs of the same tokens. ``lengths`` (P, M): in tokens. Raises
    ValueError as `Correction.ratios`.
    """
    flat = sampler.flatten(0, 1)
    rows = lengths.flatten()
    ratios = correction.ratios(policy, flat, rows)
    weights = ratios.weights
    uncut = ratios.uncut
    kl = importance_sampling.kl_sum(policy, flat, rows)
    cut = (weights != uncut).double().sum()
    counts = weights.new_tensor(len(weights)), rows.sum().double()
    return Corrected(
        policy=policy,
        tokens=ratios.tokens,
        completions=None if ratios.completions is None else ratios.completions.view(lengths.shape),
        sums=torch.stack([counts[0], weights.sum(), weights.square().sum(), cut, kl, counts[1]]),
        extremes=torch.stack([weights.max(), -weights.min()]) if len(weights) else weights.new_full((2,), -torch.inf),
    )


def metrics(sums: Tensor, extremes: Tensor) -> dict[str, float]:
    """Metrics of the weights, under TRL's names where it has them, from the `Corrected` of all ranks."""
    number, total, squares, cut, kl, tokens = sums.tolist()
    largest, smallest = extremes.tolist()
    number = max(number, 1.0)
    name = "sampling/importance_sampling_ratio"
    return {
        f"{name}/mean": total / number,
        f"{name}/min": -smallest,
        f"{name}/max": largest,
        f"{name}/cut": cut / number,
        f"{name}/ess": total**2 / (squares * number) if squares > 0 else 0.0,
        "sampling/kl": kl / max(tokens, 1.0),
    }
