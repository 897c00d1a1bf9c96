"""Next-token sampling: filters on the distribution, and noise that does not depend on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.errors import UserError
from nlgrpo.kernels import sample_tokens
from nlgrpo.kernels.reference import draw, running_sums


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    The logits are divided by ``temperature`` (0: greedy). Then ``top_k`` (0: off), ``top_p`` and
    ``min_p`` filter the tokens in this order, as in transformers, and the probabilities of the rest are renormalised.
    Raises UserError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k >= 0, ">= 0 (0 switches it off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
        ):
            if not good:
                raise UserError(f"{name} = {getattr(self, name)}: expected a value {allowed}")

    @property
    def filtered(self) -> bool:
        """Whether the sampling distribution differs from the model's own at this temperature."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probabilities (R, V) of the sampling distribution; -inf for tokens that a filter removes."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        largest, best = logits.max(-1, keepdim=True)
        # Adding 0 times the largest logit gives NaN if it is not finite.
        return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0) + 0.0 * largest
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if not sampling.filtered:
        return logits.log_softmax(-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1)
        unlikely = running_sums(ordered.softmax(-1)) <= 1 - sampling.top_p
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(-1, index, unlikely), -torch.inf)
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.log_softmax(-1)


def next_tokens(
    logits: Tensor, noise: Tensor, sampling: Sampling, ranks: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens and their log-probs, (R,), under ``sampling``: drawn with ``noise`` (R,), or those of ``ranks``.

    Rank 0 is the most likely token; ties are ordered by token id. If fewer tokens are possible, the log-prob is -inf.
    """
    if ranks is None and not sampling.filtered:
        return sample_tokens(logits, noise, temperature=sampling.temperature)
    logp = log_distribution(logits, sampling)
    if ranks is None:
        tokens = draw(logp, noise)[:, None]
        return tokens[:, 0], logp.gather(1, tokens)[:, 0]
    rank = torch.tensor(ranks, device=logp.device)[:, None]
    tokens = logp.argsort(dim=-1, descending=True, stable=True).gather(1, rank.clamp(max=logp.shape[1] - 1))
    return tokens[:, 0], logp.gather(1, tokens).masked_fill(rank >= logp.shape[1], -torch.inf)[:, 0]


_MASK = 0x7FFFFFFFFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014). int64 products wrap around like those of uint64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & (_MASK >> (shift - 1)))) * factor
    return x ^ ((x >> 31) & (_MASK >> 30))


def uniform_noise(seed: int, prompts: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Noise (R, L), float64 in [0, 1): a hash of (seed, prompt, sample, position) only.

    ``prompts (R,)``, ``samples (R,)`` and ``positions (L,)`` are int64. Not for cryptography.
    """
    golden = -0x61C8864680B583EB
    key = _mix(torch.tensor(seed, device=prompts.device) + golden)
    key = _mix((key ^ prompts) + golden)
    key = _mix((key ^ samples) + golden)
    bits = _mix((key[:, None] ^ positions) + golden)
    return ((bits >> 11) & (_MASK >> 10)).double() * 2.0**-53
