"""Corrects a step for the difference between the policy and the distribution that its completions were sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.engine.generation import Rollout
from nlgrpo.objectives import importance_sampling
from nlgrpo.objectives.importance_sampling import Correction, Ratios
from nlgrpo.runtime.distributed import Ranks


@dataclass(frozen=True)
class Corrected:
    """Importance weights of this rank's R = P M completions of at most L tokens."""

    policy: Tensor
    """Log-probs (R, L) under the policy before its update."""
    tokens: Tensor
    """Weight in the loss of each token, (R, L)."""
    completions: Tensor | None
    """Weight of each completion in the objectives, (P, M); None at the token level."""
    metrics: dict[str, float]
    """The same on all ranks."""


def correct(correction: Correction, policy: Tensor, rollout: Rollout, ranks: Ranks) -> Corrected:
    """Compute the weights of a rollout, whose log-probs are those of its sampler; collective.

    ``policy``: log-probs (R, L) of the same tokens under the policy.
    """
    sampler, lengths = rollout.logprobs.flatten(0, 1), rollout.lengths.flatten()
    ratios = correction.ratios(policy, sampler, lengths)
    kl = importance_sampling.kl_sum(policy, sampler, lengths)
    completions = None if ratios.completions is None else ratios.completions.view(rollout.lengths.shape)
    return Corrected(policy, ratios.tokens, completions, _metrics(ratios, kl, lengths.sum(), ranks))


def _metrics(ratios: Ratios, kl: Tensor, tokens: Tensor, ranks: Ranks) -> dict[str, float]:
    """Metrics of the ratios over all ranks, under TRL's names where it has them."""
    weights, uncut = ratios.weights, ratios.uncut
    sums = torch.stack([
        weights.new_tensor(len(weights)), weights.sum(), weights.square().sum(), (weights != uncut).double().sum(), kl,
        tokens.double(),
    ])  # fmt: skip
    count, total, squares, cut, kl_total, token_count = ranks.sum(sums).tolist()
    none = weights.new_tensor([-torch.inf, -torch.inf])
    extremes = torch.stack([weights.max(), -weights.min()]) if len(weights) else none
    largest, smallest = ranks.max(extremes).tolist()
    count, name = max(count, 1.0), "sampling/importance_sampling_ratio"
    return {
        f"{name}/mean": total / count,
        f"{name}/min": -smallest,
        f"{name}/max": largest,
        f"{name}/cut": cut / count,
        f"{name}/ess": total**2 / (squares * count) if squares > 0 else 0.0,
        "sampling/kl": kl_total / max(token_count, 1.0),
    }
