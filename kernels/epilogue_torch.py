"""Statistics and gradient of a block of logits in plain PyTorch, as in `epilogue_triton`.

A block is (n, V) logits of n tokens; z = logits / temperature. Rows with the target `IGNORE` must be removed before.
Each PyTorch operation passes over all its data, so on a CPU a block is processed in chunks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .reference import widen

CHUNK = 2**18  # logits, 1 MiB of float32
# exp(-10^4) is 0 in every dtype. Replaces -inf, so that p log p is 0 and not NaN.
FLOOR = -1e4


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(target) and entropy, (n,) in float32 (float64 for float64), and values saved for `gradient`, (2, n).

    Saved are max z and log sum e^(z - max z), separately, because their sum would lose digits when the largest logit is
    large. The sums use `torch.sum`, which adds pairwise; `torch.log_softmax` adds one by one, and its error is ten
    times larger for a vocabulary of 150,000.
    """
    n, dtype = len(logits), torch.promote_types(logits.dtype, torch.float32)
    logprob, entropy, kept = (logits.new_empty(size, dtype=dtype) for size in (n, n, (2, n)))
    for rows in _chunks(logits):
        z = _scaled(logits[rows], temperature)
        top = z.amax(-1, keepdim=True)
        picked = z.gather(-1, targets[rows, None]) - top
        below = (z - top).clamp_(min=FLOOR)
        weight = below.exp()
        total = weight.sum(-1)
        log_total = total.log()
        logprob[rows] = picked[:, 0] - log_total
        entropy[rows] = log_total - weight.mul_(below).sum(-1) / total
        kept[0, rows], kept[1, rows] = top[:, 0], log_total
    return logprob, entropy, kept


def gradient(
    logits: Tensor,
    targets: Tensor,
    kept: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    out: Tensor,
) -> None:
    """Write the gradient with respect to ``logits`` to ``out``, of their shape and dtype, possibly ``logits`` itself.

    dl/dlogit_v = (g (1[v = target] - p_v) - h p_v (log p_v + H)) / temperature,   g, h the upstream gradients (n,)
    """
    for rows in _chunks(logits):
        z = _scaled(logits[rows], temperature)
        logp = (z - kept[0, rows, None]).sub_(kept[1, rows, None])
        g = (grad_logprob[rows].to(logp) / temperature)[:, None]
        if grad_entropy is None:
            slope = logp.exp_().mul_(-g)
        else:
            h = (grad_entropy[rows].to(logp) / temperature)[:, None]
            p = logp.clamp_(min=FLOOR).exp()
            slope = p.mul_(logp.mul_(-h).sub_(g + h * entropy[rows, None]))
        out[rows] = slope.scatter_add_(-1, targets[rows, None], g)


def _chunks(logits: Tensor) -> Iterator[slice]:
    n, V = logits.shape
    size = max(1, CHUNK // max(1, V)) if logits.is_cpu else max(1, n)
    for start in range(0, n, size):
        yield slice(start, start + size)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = widen(logits)
    return z if temperature == 1.0 else z / temperature
