"""Statistics and gradient of a block of logits in C++: one pass over each row for both, while it is in the cache.

The same two functions as `epilogue_torch`, for float32 on a CPU. Sums over the vocabulary are in float64.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `epilogue_torch.statistics`. Saved are the largest logit and log of the sum relative to it, separately."""
    found = torch.ops.nlgrpo.logits_statistics(logits, targets, temperature)
    return cast(tuple[Tensor, Tensor, Tensor], found)


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
    """See `epilogue_torch.gradient`. ``out`` is contiguous."""
    torch.ops.nlgrpo.logits_gradient(logits, targets, kept, entropy, grad_logprob, grad_entropy, temperature, out)
