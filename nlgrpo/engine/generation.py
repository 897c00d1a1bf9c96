"""Generation with a KV cache: M completions per prompt, from token ids to token ids.

Each prompt is prefilled once, its keys and values are copied to its M rows, and finished rows leave the batch. The
noise of a token depends only on (seed, prompt, sample, position), not on the batch or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nlgrpo.engine.sampling import Sampling, draw, log_distribution, uniform_noise
from nlgrpo.kernels import decode_attention, split_and_rotate
from nlgrpo.model.attention import PackedAttention, Rope
from nlgrpo.model.decoder import Attend, Decoder, Head
from nlgrpo.model.segments import Segments


@dataclass(frozen=True)
class Rollout:
    """M completions for each of P prompts, padded with 0 to the longest. A completion includes its stop id."""

    prompt_ids: list[list[int]]
    tokens: Tensor  # (P, M, L) int64
    logprobs: Tensor  # (P, M, L), of the sampling distribution
    lengths: Tensor  # (P, M) int64
    finished: Tensor  # (P, M) bool: ended by a stop id, not by max_new_tokens

    def completion_ids(self) -> list[list[int]]:
        """Token ids of the P*M completions, prompt by prompt."""
        flat, lengths = self.tokens.flatten(0, 1).tolist(), self.lengths.flatten().tolist()
        return [ids[:n] for ids, n in zip(flat, lengths, strict=True)]

    def finish_reasons(self) -> list[str]:
        return ["stop" if stopped else "length" for stopped in self.finished.flatten().tolist()]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    index: Sequence[int] | None = None,
    max_rows: int = 256,
) -> Rollout:
    """Sample ``samples`` completions of each prompt.

    ``index`` seeds the noise of each prompt (default: its position in ``prompts``); the same seed and index give the
    same completions. ``max_rows`` limits the rows that are decoded together, and thus the size of the cache; the
    samples of one prompt are never divided. The model must not be sharded (see ``fsdp.gathered``).

    Raises ValueError for an empty prompt, a token id outside the vocabulary, or a prompt that leaves no room for
    ``sampling.max_new_tokens`` in the model's context.
    """
    if samples < 1:
        raise ValueError(f"samples = {samples}: expected at least 1")
    check_prompts(model.shape, prompts, sampling)
    index = range(len(prompts)) if index is None else index
    chunk = max(1, max_rows // samples)
    with torch.inference_mode():
        parts = [
            _decode(model, prompts[i : i + chunk], samples, sampling, seed, index[i : i + chunk])
            for i in range(0, len(prompts), chunk)
        ]
    return rollout_of(prompts, parts, samples, sampling, model.head_weight.device)


class Limits(Protocol):
    """Context length and vocabulary size of a model, in tokens."""

    @property
    def context(self) -> int: ...

    @property
    def vocab(self) -> int: ...


def check_prompts(limits: Limits, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raise ValueError for a prompt that the model cannot continue by ``sampling.max_new_tokens`` tokens."""
    room = limits.context - sampling.max_new_tokens
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; it needs at least one token, such as the tokenizer's BOS")
        if len(prompt) > room:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens = {sampling.max_new_tokens} this exceeds "
                f"the model's context of {limits.context}; shorten the prompt or lower max_new_tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < limits.vocab:
            raise ValueError(f"prompt {i} has a token id outside [0, {limits.vocab}), the model's vocabulary")


def not_finite(sampling: Sampling) -> str:
    return (
        f"the model's logits, at temperature = {sampling.temperature:g}, are not finite: its weights have NaN or too "
        "large values, or the temperature is too close to 0"
    )


def rollout_of(
    prompts: Sequence[Sequence[int]],
    parts: Sequence[tuple[Tensor, Tensor]],
    samples: int,
    sampling: Sampling,
    device: torch.device,
) -> Rollout:
    """Build a `Rollout` from tokens and log-probs (r, l) of consecutive rows; zeros replace what follows a stop id.

    Raises ValueError if a log-prob is not finite.
    """
    longest = max((tokens.shape[1] for tokens, _ in parts), default=0)
    empty = torch.zeros(0, longest, dtype=torch.int64, device=device)
    tokens = torch.cat([empty, *(F.pad(t, (0, longest - t.shape[1])) for t, _ in parts)])
    logprobs = torch.cat([empty.float(), *(F.pad(p, (0, longest - p.shape[1])) for _, p in parts)])
    rows = len(tokens)
    stopped = is_stop(tokens, stop_tensor(sampling, tokens.device))
    finished = stopped.any(-1)
    first = stopped.int().argmax(-1) if longest else torch.zeros_like(finished, dtype=torch.int64)
    lengths = torch.where(finished, first + 1, min(longest, sampling.max_new_tokens))
    inside = torch.arange(longest, device=tokens.device) < lengths[:, None]
    if not torch.where(inside, logprobs, 0.0).isfinite().all():
        raise ValueError(not_finite(sampling))
    shape = (rows // samples, samples)
    return Rollout(
        prompt_ids=[list(p) for p in prompts],
        tokens=torch.where(inside, tokens, 0).view(*shape, longest),
        logprobs=torch.where(inside, logprobs, 0.0).view(*shape, longest),
        lengths=lengths.view(shape),
        finished=finished.view(shape),
    )


class Prefill:
    """Packed attention over prompts that stores the keys and values of each layer in ``kv``."""

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.attend = PackedAttention(lengths, device, dtype)
        self.kv: list[Tensor] = []  # per layer (T, 2 Hk, d)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        q, k, v = split_and_rotate(qkv, rope, heads)
        self.kv.append(torch.cat((k, v), dim=1))
        return self.attend.attend(q, k, v, scale, window)


class _Cache:
    """Keys and values of R rows. Prompts are padded on the left, so all rows write the same column.

    ``kv (layers, R, 2 Hk, columns, d)``; ``first (R,)`` is the first column of each row's prompt, None if all are 0.
    Because all rows share the column, each step writes one slice, and an attention window is a slice as well.
    """

    def __init__(self, kv: list[Tensor], lengths: list[int], samples: int, new_tokens: int) -> None:
        self.column = max(lengths)  # where the next token goes
        _, heads, d = kv[0].shape
        rows = len(lengths) * samples
        self.kv = kv[0].new_zeros(len(kv), rows, heads, self.column + new_tokens, d)
        start = 0
        for i, n in enumerate(lengths):
            prompt = torch.stack([x[start : start + n] for x in kv]).transpose(1, 2)  # (layers, 2 Hk, n, d)
            self.kv[:, i * samples : (i + 1) * samples, :, self.column - n : self.column] = prompt[:, None]
            start += n
        self.first = None
        if min(lengths) < self.column:
            self.first = self.column - torch.tensor(lengths, device=self.kv.device).repeat_interleave(samples)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        cache = self.kv[layer]
        return decode_attention(
            qkv, rope, cache, self.column, heads=heads, scale=scale, first=self.first, window=window
        )

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        """Copy rows ``source`` over rows ``target`` and keep the first ``rows``."""
        used = self.kv[:, :, :, : self.column]
        used[:, target] = used[:, source]
        self.kv = self.kv[:, :rows]
        if self.first is not None:
            self.first[target] = self.first[source]
            self.first = self.first[:rows]


class _Rows:
    """State of the unfinished rows: their indices among all R rows, noise, current tokens and positions."""

    def __init__(self, prompts: Sequence[Sequence[int]], samples: int, noise: Tensor) -> None:
        self.number = torch.arange(len(noise), device=noise.device)
        self.noise = noise
        self.position = torch.tensor([len(p) for p in prompts], device=noise.device).repeat_interleave(samples)
        self.token = torch.zeros_like(self.number)
        self.done = torch.zeros_like(self.number, dtype=torch.bool)

    def drop_finished(self, cache: _Cache) -> None:
        """Remove finished rows once they are 1/8 of all rows: the last unfinished rows move to their places."""
        unfinished = int((~self.done).sum())
        if unfinished > len(self.done) * 7 // 8:
            return
        target = self.done[:unfinished].nonzero()[:, 0]
        source = unfinished + (~self.done[unfinished:]).nonzero()[:, 0]
        cache.move(source, target, unfinished)
        for name, x in vars(self).items():
            x[target] = x[source]
            setattr(self, name, x[:unfinished])


def _decode(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    seed: int,
    index: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Sample tokens with their log-probs, (R, L), for the R = P * samples rows; undefined after a stop id."""
    device, limit = model.head_weight.device, sampling.max_new_tokens
    keys = torch.tensor(list(index), device=device).repeat_interleave(samples)
    sample = torch.arange(samples, device=device).repeat(len(prompts))
    rows = _Rows(prompts, samples, uniform_noise(seed, keys, sample, torch.arange(limit, device=device)))
    logits, cache = _prefill(model, prompts, samples, limit)
    tokens = torch.zeros(len(keys), limit, dtype=torch.int64, device=device)
    logprobs = torch.zeros(len(keys), limit, dtype=torch.float32, device=device)
    table, stops = model.rope(torch.arange(cache.column + limit, device=device)), stop_tensor(sampling, device)
    check_every = 1 if device.type == "cpu" else 16  # counting the finished rows synchronizes with a GPU
    for t in range(limit):
        log_probs = log_distribution(logits, sampling)
        rows.token = draw(log_probs, rows.noise[:, t])
        tokens[rows.number, t] = rows.token
        logprobs[rows.number, t] = log_probs.gather(-1, rows.token[:, None])[:, 0].float()
        rows.done |= is_stop(rows.token, stops)
        if (t + 1) % check_every == 0:
            rows.drop_finished(cache)
        if t + 1 == limit or len(rows.done) == 0:
            return tokens[:, : t + 1], logprobs[:, : t + 1]
        rope = None if table is None else (table[0][rows.position], table[1][rows.position])
        logits = run_blocks(model, rows.token, rows.position, rope, cache)
        cache.column += 1
        rows.position += 1
    raise AssertionError("the loop returns at its limit")


def _prefill(model: Decoder, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int) -> tuple[Tensor, _Cache]:
    """Run the prompts through the model. Return the logits (R, V) of the first new tokens and the cache of all rows."""
    weight, lengths = model.head_weight, [len(p) for p in prompts]
    packed = torch.tensor([token for prompt in prompts for token in prompt], device=weight.device)
    positions = Segments(lengths).positions(weight.device)
    attend = Prefill(lengths, weight.device, weight.dtype)
    last = torch.tensor(lengths, device=weight.device).cumsum(0) - 1
    logits = run_blocks(model, packed, positions, model.rope(positions), attend, last)
    return logits.repeat_interleave(samples, dim=0), _Cache(attend.kv, lengths, samples, new_tokens)


def run_blocks(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor,
    rope: Rope,
    attend: Attend,
    select: Tensor | None = None,
    head: Head = F.linear,
) -> Tensor:
    """Return the logits of the selected tokens, or the outputs of another ``head``.

    Calls ``block.forward`` instead of ``block``, so that the hooks of FSDP2 do not run.
    """
    x = model.enter(tokens, positions)
    for block in model.blocks:
        x = block.forward(x, rope, attend)
    x = model.norm(x if select is None else x[select])
    return head(x, model.head_weight)


def stop_tensor(sampling: Sampling, device: torch.device) -> Tensor:
    """Return the stop ids as a tensor, for `is_stop`."""
    return torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device)


def is_stop(tokens: Tensor, stops: Tensor) -> Tensor:
    """Return whether each token is a stop id: bool, of the shape of ``tokens``."""
    return (tokens[..., None] == stops).any(-1)
