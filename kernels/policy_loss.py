"""The clipped policy-gradient loss of PPO and GRPO, per token."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .dispatch import choose

KL_KINDS = ("k1", "k2", "k3", "k3_iw")


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    *,
    log_ratio: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    mask: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta: float = 0.0,
    kl: str = "k3",
    impl: str = "auto",
) -> Tensor:
    """Loss of each token, to be minimised; how tokens are averaged is left to the caller.

        rho  = exp(logprob - old_logprob)
        loss = -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) + beta KL(logprob, ref_logprob)

    All tensors have one shape, usually (T,). ``log_ratio`` stands in for the difference logprob - old_logprob, with its
    own gradient, where the ratio is not the token's (GSPO). ``kl`` is the estimator, with d = ref_logprob - logprob:
    "k1" -d, "k2" d^2/2, "k3" e^d - d - 1, "k3_iw" rho (e^d - d - 1). Only the importance-weighted k3_iw estimates the
    KL, and its gradient, once the policy has moved off the one that sampled. Log-ratios, and d in k3, are cut at 20:
    past it the value stays and the gradient is 0.

    Where ``mask`` is false (or 0) the loss and its gradient are 0, whatever the inputs hold there. The result is
    float32, or float64 for float64 inputs. With logprob == old_logprob the gradient is that of -A logprob.

    Raises ValueError for shapes that do not fit, eps < 0, eps_low > 1, an unknown ``kl``, and beta without ref_logprob.
    """
    others = {"old_logprob": old_logprob, "advantages": advantages, "log_ratio": log_ratio}
    for name, x in {**others, "ref_logprob": ref_logprob, "mask": mask}.items():
        if x is not None and x.shape != logprob.shape:
            raise ValueError(f"expected {name} of the shape of logprob {tuple(logprob.shape)}, got {tuple(x.shape)}.")
    if not (0 <= eps_low <= 1 and eps_high >= 0):
        raise ValueError(f"eps_low={eps_low}, eps_high={eps_high}: expected 0 <= eps_low <= 1 and eps_high >= 0.")
    if kl not in KL_KINDS:
        raise ValueError(f"kl={kl!r} is not known; expected one of {', '.join(KL_KINDS)}.")
    if beta != 0.0 and ref_logprob is None:
        raise ValueError(f"beta={beta} needs ref_logprob, the log-probabilities of the reference policy; got None.")
    choose(impl, "policy_loss")
    return reference.policy_loss(
        logprob, old_logprob, advantages, log_ratio=log_ratio, ref_logprob=ref_logprob, mask=mask,
        eps_low=eps_low, eps_high=eps_high, beta=beta, kl=kl,
    )  # fmt: skip
