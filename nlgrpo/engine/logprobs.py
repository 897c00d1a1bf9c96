"""Log-probabilities of given completions under a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from nlgrpo.engine.generation import Rollout
from nlgrpo.kernels import linear_logprob
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.packing import MicroBatch


def logprobs(model: Decoder, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return differentiable log-probs and entropies, (S,), of the targets in ``batch``."""
    head = partial(linear_logprob, targets=batch.targets, temperature=temperature)
    return model(batch.tokens, batch.segments, batch.select, head)


@torch.no_grad()
def next_token_logprobs(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Return the log-probs (V,), in float32, of the token after ``ids``."""
    tokens = torch.tensor(list(ids), device=model.embed.weight.device)
    logits: Tensor = model(tokens, [len(ids)], torch.tensor([len(ids) - 1], device=tokens.device), linear)
    return logits[0].float().log_softmax(0)


@torch.no_grad()
def completion_logprobs(model: Decoder, rollout: Rollout, batches: Sequence[MicroBatch], temperature: float) -> Tensor:
    """Return log-probs (R, L) of the R = P * M completions, packed in ``batches``; 0 after their ends."""
    dtype = torch.float64 if model.embed.weight.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(rollout.logprobs.flatten(0, 1), dtype=dtype)
    for batch in batches:
        logprob, _ = logprobs(model, batch, temperature)
        out[batch.row, batch.offset] = logprob.to(out)
    return out
