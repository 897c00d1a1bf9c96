"""KL divergence to the reference policy: estimators, and a controller of the penalty that keeps it near a target."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from nlgrpo.kernels import reference


def estimate(logprob: Tensor, ref_logprob: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(pi || pi_ref) at each token, in nats, same shape as the inputs; d = log pi_ref - log pi.

        "k1"  -d             unbiased, of either sign
        "k2"  d^2 / 2        biased, >= 0; for samples of pi its gradient is that of the KL
        "k3"  e^d - d - 1    unbiased, >= 0 (d is clamped at 20)

    "Unbiased" holds for samples of pi itself. For samples of an older policy the loss has "k3_iw", see
    `nlgrpo.kernels.policy_loss`. Raises ValueError for another ``kind`` and for different shapes.
    """
    if kind not in ("k1", "k2", "k3"):
        raise ValueError(f"kind={kind!r} is not known; expected 'k1', 'k2' or 'k3'.")
    if logprob.shape != ref_logprob.shape:
        raise ValueError(
            f"expected logprob and ref_logprob of one shape, got {tuple(logprob.shape)} and {tuple(ref_logprob.shape)}."
        )
    return reference.kl_penalty(reference.widen(logprob), reference.widen(ref_logprob), kind)


@dataclass
class AdaptiveBeta:
    """Adaptive coefficient of the KL penalty that keeps the KL near a target (IAMA, App. I; Ziegler et al. 2019).

        e = clip(KL / target - 1, -clip, clip),      beta <- beta (1 + gain e)

    ``beta`` is the only state. ``target`` is in nats, per token or per sequence like the KL passed to `step`. Raises
    ValueError for beta < 0, for a target, gain or clip that is not > 0, and for gain * clip >= 1.
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
                f"AdaptiveBeta(gain={self.gain}, clip={self.clip}): expected gain * clip < 1, or beta reaches 0."
            )

    def step(self, kl: float) -> float:
        """Update and return ``beta`` after a batch whose KL over all ranks is ``kl``. Raises ValueError for NaN."""
        if math.isnan(kl):
            raise ValueError("the KL divergence is NaN; check the log-probabilities of the policy and the reference.")
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self.beta *= 1 + self.gain * error
        return self.beta
