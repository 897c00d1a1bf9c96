"""KL divergence to the reference policy: estimates from samples, and the controller that keeps it near a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from nlgrpo.kernels import reference


def estimate(logprob: Tensor, ref_logprob: Tensor, kind: str = "k3") -> Tensor:
    """Estimate of KL(pi || pi_ref) at each token, in nats, same shape as the inputs; d = log pi_ref - log pi.

        "k1"  -d             unbiased, of either sign
        "k2"  d^2 / 2        biased, >= 0; its gradient is that of the KL while the samples are the policy's own
        "k3"  e^d - d - 1    unbiased, >= 0 (d is cut at 20)

    Unbiased means for samples of pi itself; for those of an older policy the loss has "k3_iw", see
    `nlgrpo.kernels.policy_loss`. Raises ValueError for another ``kind`` and for different shapes.
    """
    if kind not in ("k1", "k2", "k3"):
        raise ValueError(f"kind={kind!r} is not known; expected 'k1', 'k2' or 'k3'.")
    if logprob.shape != ref_logprob.shape:
        raise ValueError(f"expected two of one shape, got {tuple(logprob.shape)} and {tuple(ref_logprob.shape)}.")
    return reference.kl_penalty(reference.widen(logprob), reference.widen(ref_logprob), kind)


@dataclass
class AdaptiveBeta:
    """Coefficient of the KL penalty that follows a target (IAMA, App. I; Ziegler et al. 2019).

        e = clip(KL / target - 1, -clip, clip),      beta <- beta (1 + gain e)

    ``beta`` is the whole state. ``target`` is in nats, in the same units as the KL given to `step` (per token or per
    sequence). Raises ValueError for beta < 0, for a target, gain or clip that is not > 0, and for gain * clip >= 1.
    """

    beta: float
    target: float
    gain: float = 0.1
    clip: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"AdaptiveBeta(beta={self.beta}): expected a finite number >= 0.")
        for name in ("target", "gain", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"AdaptiveBeta({name}={getattr(self, name)}): expected a finite number > 0.")
        if self.gain * self.clip >= 1:
            raise ValueError(
                f"AdaptiveBeta(gain={self.gain}, clip={self.clip}): expected gain * clip < 1, or beta hits 0."
            )

    def step(self, kl: float) -> float:
        """The coefficient after a batch whose KL was ``kl``, over all ranks. Raises ValueError for a NaN."""
        if math.isnan(kl):
            raise ValueError("the KL divergence is NaN; a log-probability of the policy or of the reference is broken.")
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self.beta *= 1 + self.gain * error
        return self.beta
