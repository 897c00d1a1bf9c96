"""Token trees whose values and policies are exact: A tokens at each of H steps, and a reward for each of A^H leaves.

Shapes: a policy is one tensor (..., A^h, A) of probabilities per step h = 0 .. H - 1, a row per prefix of h tokens.
Values V_h are (..., A^h) for h = 0 .. H, V_H being the rewards. Prefixes are numbers of h digits in base A.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Policy = list[Tensor]


def random_policy(A: int, H: int, sharpness: float, seed: int) -> Policy:
    """Policy with logits ``sharpness`` times normal; 0 is the uniform policy."""
    generator = torch.Generator().manual_seed(seed)
    policy = []
    for h in range(H):
        logits = sharpness * torch.randn(A**h, A, generator=generator, dtype=torch.float64)
        policy.append(logits.softmax(-1))
    return policy


def values(policy: Policy, rewards: Tensor) -> list[Tensor]:
    """V^pi of all prefixes by backward induction, V_h(s) = sum_a pi(a|s) V_{h+1}(s a), from ``rewards`` (..., A^H)."""
    found = [rewards]
    for step in reversed(policy):
        after = found[-1].unflatten(-1, step.shape[-2:])
        found.append((step * after).sum(-1))
    return found[::-1]


def best_values(policy: Policy, rewards: Tensor) -> list[Tensor]:
    """V*: the largest reward that can still be reached from each prefix."""
    found = [rewards]
    for step in reversed(policy):
        after = found[-1].unflatten(-1, step.shape[-2:])
        found.append(after.amax(-1))
    return found[::-1]


def reweighted(policy: Policy, of: Sequence[Tensor], beta: Tensor | float) -> Policy:
    """pi(a|s) e^{V(s a) / beta} / Z(s): one update of IRO (Eq. 5). ``beta`` may be (..., 1, 1)."""
    updated = []
    for step, V in zip(policy, of[1:], strict=True):
        after = V.unflatten(-1, step.shape[-2:])
        updated.append((step.log() + after / beta).softmax(-1))
    return updated


def leaf_probs(policy: Policy) -> Tensor:
    """Probability of each of the A^H leaves, (..., A^H)."""
    reached = policy[0].flatten(-2)
    for step in policy[1:]:
        reached = (reached[..., None] * step).flatten(-2)
    return reached


def concentrability(policy: Policy, rewards: Tensor) -> float:
    """C_ST of IRO's Assumption 2: the largest d^{pi*}(s, a) / d^{pi}(s, a). pi* is deterministic: 1 / P(best leaf)."""
    best = rewards.argmax()
    return 1 / leaf_probs(policy)[best].item()


def number(tokens: Sequence[int], A: int) -> int:
    """Index of a prefix among those of its length."""
    index = 0
    for token in tokens:
        index = index * A + token
    return index
