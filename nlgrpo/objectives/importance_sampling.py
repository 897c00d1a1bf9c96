"""Importance weights of completions that another distribution q than the policy pi sampled.

q is what an inference engine computes, an earlier version of the policy, or the policy with top-k, top-p or min-p.
Legend: R completions, L tokens of the longest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nlgrpo.kernels.reference import MAX_LOG_RATIO

Level = Literal["token", "sequence"]


class Ratios(NamedTuple):
    """Importance weights, and what was weighted: tokens or completions."""

    tokens: Tensor
    """Weight in the loss of each token, (R, L); 0 past the end of a completion."""
    completions: Tensor | None
    """Weight of each completion, (R,); None at the token level."""
    weights: Tensor
    """All weights of the level, (n,): of n tokens, or of n completions."""
    uncut: Tensor
    """The same before the correction cuts them."""


@dataclass(frozen=True)
class Correction:
    """Truncated or masked importance sampling (TIS, MIS).

        w = pi(y) / q(y)       "sequence": of the whole completion;  "token": of each token, given those before it

        tis    min(w, high)
        mis    w if low <= w <= high, else 0

    At the sequence level without a cut ("tis:inf") the expected gradient is exact. At the token level it is biased and
    has less variance: the tokens before and after one are weighted as if the policy had sampled them. A cut bounds the
    variance, with a bias of its own. TRL: vllm_importance_sampling_mode with "truncate" and "mask"; verl:
    rollout_correction.

    Log-ratios are limited to 20, e^20 = 4.9e8. Raises ValueError for bounds that are not 0 <= low < high.
    """

    kind: Literal["tis", "mis"]
    low: float
    high: float
    level: Level = "sequence"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"correction {self}: expected bounds 0 <= LOW < HIGH.")

    def __str__(self) -> str:
        bounds = (self.high,) if self.kind == "tis" else (self.low, self.high)
        return ":".join([self.kind, *(f"{bound:g}" for bound in bounds)])

    def cut(self, ratio: Tensor) -> Tensor:
        """Truncate or mask ratios of any shape."""
        if self.kind == "tis":
            return ratio.clamp(max=self.high)
        return ratio.where((ratio >= self.low) & (ratio <= self.high), 0.0)

    def ratios(self, policy: Tensor, sampler: Tensor, lengths: Tensor) -> Ratios:
        """Compute the weights from log-probs (R, L) under the policy and the sampler; ``lengths`` (R,) in tokens.

        Raises ValueError for log-probs of the sampler that are not finite: it cannot have sampled such a token.
        """
        inside = torch.arange(policy.shape[1], device=policy.device) < lengths[:, None]
        if not sampler.where(inside, 0.0).isfinite().all():
            raise ValueError("a log-prob of the sampler is not finite for a token that it sampled")
        log_ratio = torch.where(inside, policy.double() - sampler.double(), 0.0)
        if self.level == "sequence":
            uncut = log_ratio.sum(-1).clamp(max=MAX_LOG_RATIO).exp()
            completions = self.cut(uncut)
            return Ratios(completions[:, None] * inside, completions, completions, uncut)
        each = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        tokens = self.cut(each) * inside
        return Ratios(tokens, None, tokens[inside], each[inside])


def parse_correction(text: str, level: Level = "sequence") -> Correction | None:
    """Parse "none" (None), "tis:C" or "mis:LOW:HIGH". C and HIGH may be "inf".

    Raises ValueError for another text.
    """
    kind, *bounds = text.strip().split(":")
    if text.strip() == "none":
        return None
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError:
        numbers = []
    if any(map(math.isnan, numbers)) or (kind, len(numbers)) not in (("tis", 1), ("mis", 2)):
        raise ValueError(f"correction {text!r} is not known; expected 'none', 'tis:C' or 'mis:LOW:HIGH'.")
    low, high = numbers if kind == "mis" else (0.0, *numbers)
    return Correction("mis" if kind == "mis" else "tis", low, high, level)


def kl_sum(policy: Tensor, sampler: Tensor, lengths: Tensor) -> Tensor:
    """Sum over tokens of the k3 estimate of KL(q || pi) in nats, a scalar: w - 1 - log w, with w of each token.

    It is >= 0 and unbiased for tokens that q sampled. Arguments as in `Correction.ratios`.
    """
    inside = torch.arange(policy.shape[1], device=policy.device) < lengths[:, None]
    log_ratio = (policy.double() - sampler.double())[inside].clamp(max=MAX_LOG_RATIO)
    return (log_ratio.expm1() - log_ratio).sum()
