"""What happens to a block of logits, in plain PyTorch: the same two functions as `epilogue_triton`.

A block is (n, V) logits of n tokens; z = logits / temperature. Rows whose target is `IGNORE` must have left before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import widen

# exp(-10^4) is 0 in every type: a logit of -inf stands this far below the largest, so that p log p is 0 and not NaN.
FLOOR = -1e4


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log p(target), entropy, max z and log sum e^(z - max z), each (n,) in float32 (float64 for float64).

    The last two are kept apart: their sum would lose what the largest logit has in front of the point.
    """
    z = widen(logits)
    if temperature != 1.0:
        z = z / temperature
    top = z.amax(-1, keepdim=True)
    picked = (z.gather(-1, targets[:, None]) - top)[:, 0]
    below = (z - top).clamp_(min=FLOOR)
    share = below.exp()
    total = share.sum(-1)
    log_total = total.log()
    entropy = log_total - share.mul_(below).sum(-1) / total
    return picked - log_total, entropy, top[:, 0], log_total


def gradient(
    logits: Tensor,
    targets: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    out: Tensor,
) -> None:
    """Gradient with respect to ``logits`` into ``out``, of their shape and type; it may be ``logits`` itself.

    dl/dlogit_v = (g (1[v = target] - p_v) - h p_v (log p_v + H)) / temperature,   g, h the upstream gradients (n,)
    """
    z = widen(logits)
    if temperature != 1.0:
        z = z / temperature
    logp = (z - top[:, None]).sub_(log_total[:, None]).clamp_(min=FLOOR)
    p = torch.exp(logp, out=out if out.dtype == logp.dtype else None)
    g = grad_logprob.to(p) / temperature
    if grad_entropy is None:
        p.mul_(-g[:, None])
    else:
        h = grad_entropy.to(p) / temperature
        p.mul_(logp.mul_(-h[:, None]).sub_((g + h * entropy)[:, None]))
    p.scatter_add_(-1, targets[:, None], g[:, None])
    if p is not out:
        out.copy_(p)
