"""Generation with a KV cache: M completions per prompt, from token ids to token ids.

Each prompt is prefilled and stored once, its M rows read it, and finished rows leave the batch. The noise of a token
depends only on (seed, prompt, sample, position), not on the batch or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nlgrpo.engine import decoding_memory
from nlgrpo.engine.kv_cache import KVCache
from nlgrpo.engine.sampling import Sampling, next_tokens, uniform_noise
from nlgrpo.errors import UserError
from nlgrpo.kernels import BlockWeights, Segments, linear, rotate_queries_and_keys
from nlgrpo.kernels.dispatch import HAS_TRITON
from nlgrpo.model.attention import PackedAttention, Rope
from nlgrpo.model.decoder import Decoder, Head
from nlgrpo.runtime.device import free_memory

FIRST_COLUMNS = 32  # of the cache of a row; it doubles when it is full, because most rows finish before the limit


@dataclass(frozen=True)
class RolloutRequest:
    """What an engine samples: M completions for each of P prompts. It returns them as a `Rollout`."""

    prompts: Sequence[Sequence[int]]
    """Token ids of the P prompts."""
    samples: int
    """M, the number of completions of each prompt."""
    sampling: Sampling
    _: KW_ONLY
    seed: int = 0
    """Of the noise. The same seed and ``index`` give the same completions."""
    index: Sequence[int] | None = None
    """A number for each prompt, (P,), which seeds its noise. None: its position in ``prompts``."""
    max_rows: int | None = None
    """Limit of the completions that are decoded together, and thus of the cache. None: the engine's own choice.

    An engine that schedules by itself may ignore it. The samples of one prompt are never divided by nlgrpo's engine.
    """
    first_sample: int | Sequence[int] = 0
    """Number of the first completion, of all prompts or of each, (P,): from 2, M = 3 samples are those 2, 3 and 4."""
    on_progress: Callable[[int], None] | None = None
    """Called with the number of completions that are finished, of P M; vLLM in this process calls it at the end."""

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each prompt for its noise, (P,)."""
        return range(len(self.prompts)) if self.index is None else self.index

    @property
    def first_samples(self) -> list[int]:
        """The number of the first completion of each prompt, (P,)."""
        if isinstance(self.first_sample, int):
            return [self.first_sample] * len(self.prompts)
        return list(self.first_sample)

    def part(self, start: int, stop: int) -> RolloutRequest:
        """Return the request of the prompts from ``start`` to before ``stop``, with the same noise."""
        return replace(
            self,
            prompts=self.prompts[start:stop],
            index=self.numbers[start:stop],
            first_sample=self.first_samples[start:stop],
        )

    def report(self, finished: int) -> None:
        if self.on_progress is not None:
            self.on_progress(finished)

    def check(self, limits: ModelLimits) -> None:
        """Raise UserError for ``samples`` below 1, and as `check_prompts`."""
        if self.samples < 1:
            raise UserError(f"samples = {self.samples}: expected at least 1")
        check_prompts(limits, self.prompts, self.sampling)


@dataclass(frozen=True)
class Conversation:
    """What an environment made of a completion of several turns."""

    messages: list[dict[str, Any]]
    """The messages after the prompt: those of the assistant, the user and tools."""
    outcome: dict[str, Any]
    """``reward``, ``metrics`` (by name), and ``error``, a text or None."""
    inserted: dict[int, list[int]] = field(default_factory=dict)
    """{k: tokens that come before the sampled token k}, which are read but not trained on."""


@dataclass(frozen=True)
class Rollout:
    """M completions for each of P prompts, padded with 0 to the longest. A completion includes its stop id."""

    prompt_ids: list[list[int]]
    tokens: Tensor  # (P, M, L) int64
    logprobs: Tensor  # (P, M, L), of the sampling distribution
    lengths: Tensor  # (P, M) int64
    finished: Tensor  # (P, M) bool: ended by a stop id, not by max_new_tokens
    version: int | None = None  # of the policy's weights: training steps finished; None for a frozen model
    conversations: list[Conversation] | None = None  # P*M, of an environment; ``tokens`` are those of the policy

    @property
    def inserted(self) -> list[dict[int, list[int]]] | None:
        """Tokens of an environment between those of the policy, for each of the P*M completions."""
        return None if self.conversations is None else [c.inserted for c in self.conversations]

    @property
    def inserted_tokens(self) -> int:
        """Number of tokens of an environment."""
        return sum(len(ids) for part in self.inserted or () for ids in part.values())

    def completion_ids(self) -> list[list[int]]:
        """Token ids of the P*M completions, prompt by prompt."""
        flat = self.tokens.flatten(0, 1).tolist()
        lengths = self.lengths.flatten().tolist()
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
    max_rows: int | None = None,
    first_sample: int | Sequence[int] = 0,
) -> Rollout:
    """Sample ``samples`` completions of each prompt. Arguments are the fields of `RolloutRequest`.

    ``max_rows=None``: see `rows_together`. A sharded model must be gathered (``fsdp.gathered``).

    Raises UserError for an empty prompt, a token id outside the vocabulary, or a prompt that leaves no room for
    ``sampling.max_new_tokens`` in the model's context, and if the rows do not fit into the memory of a GPU.
    """
    request = RolloutRequest(
        prompts, samples, sampling, seed=seed, index=index, max_rows=max_rows, first_sample=first_sample
    )
    return sample_rollout(model, request)


def sample_rollout(model: Decoder, request: RolloutRequest) -> Rollout:
    """`generate` for a request."""
    request.check(model.shape)
    prompts = request.prompts
    samples = request.samples
    max_rows = request.max_rows
    if max_rows is None:
        longest = max(map(len, prompts), default=0)
        max_rows = rows_together(model, longest, samples, request.sampling)
    together = max(1, max_rows // samples)  # prompts
    parts = []
    with torch.inference_mode(), _out_of_memory(min(together, len(prompts)) * samples):
        for start in range(0, len(prompts), together):
            parts.append(_decode(model, request.part(start, start + together), start * samples))
    return rollout_of(request, parts, model.head_weight.device)


def rows_together(model: Decoder, prompt_tokens: int, samples: int, sampling: Sampling) -> int:
    """Return how many rows to decode together: as many as the free memory of a GPU holds, and `ROWS` on a CPU.

    ``prompt_tokens``: of the longest prompt. With deterministic algorithms it is `ROWS` on a GPU too: free memory may
    differ when a run is resumed, and the number of rows changes how products round.
    """
    weight = model.head_weight
    if weight.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return decoding_memory.ROWS
    return decoding_memory.rows_that_fit(
        model.shape,
        prompt_tokens=prompt_tokens,
        columns=sampling.max_new_tokens,
        samples=samples,
        itemsize=weight.itemsize,
        free=decoding_memory.USABLE * free_memory(weight.device),
        sampler=decoding_memory.sampler_of(
            filtered=sampling.filtered, top_p=sampling.top_p, fused=HAS_TRITON and weight.dtype != torch.float64
        ),
    )


@contextmanager
def _out_of_memory(rows: int) -> Iterator[None]:
    """Context in which an allocation that fails on a GPU raises a UserError that names the setting."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"sampling {rows} completions together needs more memory than the GPU has; set rollout.max_rows below "
            f"{rows}, or lower rollout.max_new_tokens: {error}"
        ) from error


class ModelLimits(Protocol):
    """Context length and vocabulary size of a model, in tokens."""

    @property
    def context(self) -> int: ...

    @property
    def vocab(self) -> int: ...


def check_prompts(limits: ModelLimits, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raise UserError for a prompt that the model cannot continue by ``sampling.max_new_tokens`` tokens."""
    room = limits.context - sampling.max_new_tokens
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty; it needs at least one token, such as the tokenizer's BOS")
        if len(prompt) > room:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens = {sampling.max_new_tokens} this exceeds "
                f"the model's context of {limits.context}; shorten the prompt or lower max_new_tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < limits.vocab:
            raise UserError(f"prompt {i} has a token id outside [0, {limits.vocab}), the model's vocabulary")


def not_finite(sampling: Sampling) -> str:
    return (
        f"the model's logits, at temperature = {sampling.temperature:g}, are not finite: its weights have NaN or too "
        "large values, or the temperature is too close to 0"
    )


def rollout_of(request: RolloutRequest, parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Rollout:
    """Build a `Rollout` from tokens and log-probs (r, l) of consecutive rows; zeros replace what follows a stop id.

    Raises UserError if a log-prob is not finite.
    """
    samples = request.samples
    sampling = request.sampling
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
        raise UserError(not_finite(sampling))
    shape = (rows // samples, samples)
    return Rollout(
        prompt_ids=[list(p) for p in request.prompts],
        tokens=torch.where(inside, tokens, 0).view(*shape, longest),
        logprobs=torch.where(inside, logprobs, 0.0).view(*shape, longest),
        lengths=lengths.view(shape),
        finished=finished.view(shape),
    )


class _Prefill:
    """Packed attention over P prompts, which writes the keys and values of each layer into the cache.

    ``prompts``: per layer (2, P, Hk, C, d), as in `KVCache`.
    """

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        segments = Segments(lengths)
        self.attend = PackedAttention(segments, device, dtype)
        self.positions = segments.positions(device)
        self.lengths = lengths
        self.prompts: list[Tensor] = []
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.prompt = number.to(device, non_blocking=True)

    def __call__(self, qkv: Tensor, rope: Rope, *, heads: int, layer: int, scale: float, window: int | None) -> Tensor:
        rotated = rotate_queries_and_keys(qkv, rope, heads)
        kv_heads = (rotated.shape[1] - heads) // 2
        cached = rotated.new_zeros(2, len(self.lengths), kv_heads, max(self.lengths), rotated.shape[2])
        keys, values = rotated.detach()[:, heads:].split(kv_heads, dim=1)
        by_position = cached.transpose(2, 3)
        by_position[0, self.prompt, self.positions] = keys
        by_position[1, self.prompt, self.positions] = values
        self.prompts.append(cached)
        return self.attend(rotated, None, heads=heads, layer=layer, scale=scale, window=window)


class CachedDecoder:
    """Decoder with a KV cache: its rows read new tokens, and can be copied (branched).

    Calls ``block.forward`` instead of ``block``, so that the hooks of FSDP2 do not run.
    """

    def __init__(self, model: Decoder, head: Head = linear) -> None:
        self.model = model
        self.head = head

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Start with one row per prompt. Return the outputs (P, V) of the head at their last tokens."""
        model = self.model
        lengths = [len(prompt) for prompt in prompts]
        device = model.head_weight.device
        weight = model.head_weight
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        attend = _Prefill(lengths, device, weight.dtype)
        rope = model.rope(attend.positions)
        x = model.enter(tokens, attend.positions)
        self.weights: list[BlockWeights | None] = []  # FSDP gathers a block into the same tensors each time
        for block in model.each_block():
            x = block.forward(x, rope, attend)
            self.weights.append(block.llama_weights())
        self.cache = KVCache(attend.prompts, lengths)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        return model.apply_head(model.norm(x[last]), self.head)

    def read(self, tokens: Tensor, select: Tensor | None = None, rope_table: Rope = None) -> Tensor:
        """Append n tokens (R, n) to the rows. Return the head's outputs (R, V) at each row's token ``select`` (R,).

        ``select`` is not needed for n = 1. ``rope_table``: `Decoder.rope` of the positions 0, 1, .., to save time.
        """
        model = self.model
        cache = self.cache
        n = tokens.shape[1]
        positions = cache.positions(n)
        rope = model.rope(positions) if rope_table is None else (rope_table[0][positions], rope_table[1][positions])
        x = model.enter(tokens.flatten(), positions)
        shape = model.shape
        for layer, block in enumerate(model.each_block()):
            weights = self.weights[layer]
            if weights is None:
                x = block.forward(x, rope, cache)
            else:
                x = cache.run_block(
                    x, weights, rope, heads=shape.heads, layer=layer, scale=shape.scales[layer],
                    window=shape.windows[layer], eps=shape.eps,
                )  # fmt: skip
        cache.advance(n)
        if select is not None:
            x = x[torch.arange(len(tokens), device=tokens.device) * n + select]
        return model.apply_head(model.norm(x), self.head)

    def branch(self, rows: Sequence[int] | Tensor, tokens: int) -> None:
        """Replace the rows by copies of ``rows``, and allocate cache for ``tokens`` more tokens."""
        self.cache.branch(torch.as_tensor(rows, device=self.model.head_weight.device), tokens)


class _Rows:
    """State of the unfinished rows: their indices among all R rows, their noise, and whether they have finished."""

    def __init__(self, noise: Tensor) -> None:
        self.number = torch.arange(len(noise), device=noise.device)
        self.noise = noise
        self.done = torch.zeros_like(self.number, dtype=torch.bool)

    def drop_finished(self, *others: Tensor, cache: KVCache) -> list[Tensor]:
        """Remove finished rows once they are 1/8 of all rows: the last unfinished rows move to their places.

        Returns ``others`` (R, ..) with their remaining rows.
        """
        unfinished = int((~self.done).sum())
        if unfinished > len(self.done) * 7 // 8:
            return list(others)
        target = self.done[:unfinished].nonzero()[:, 0]
        source = unfinished + (~self.done[unfinished:]).nonzero()[:, 0]
        cache.drop(source, target, unfinished)
        for x in (*vars(self).values(), *others):
            x[target] = x[source]
        for name, x in vars(self).items():
            setattr(self, name, x[:unfinished])
        return [x[:unfinished] for x in others]


def _decode(model: Decoder, request: RolloutRequest, before: int) -> tuple[Tensor, Tensor]:
    """Sample tokens and log-probs, (R, L), for R = P M rows, after ``before`` others; undefined after a stop id."""
    device = model.head_weight.device
    prompts = request.prompts
    sampling = request.sampling
    limit = sampling.max_new_tokens
    prompt = torch.arange(len(prompts), device=device).repeat_interleave(request.samples)
    keys = torch.tensor(list(request.numbers), device=device)[prompt]
    first = torch.tensor(request.first_samples, device=device)
    sample = first[:, None] + torch.arange(request.samples, device=device)
    noise = uniform_noise(request.seed, keys, sample.flatten(), torch.arange(limit, device=device))
    decoder = CachedDecoder(model)
    rows = _Rows(noise)
    logits = decoder.begin(prompts)[prompt]
    decoder.branch(prompt, min(limit, FIRST_COLUMNS))
    cache = decoder.cache
    tokens = torch.zeros(len(prompt), limit, dtype=torch.int64, device=device)
    logprobs = torch.zeros(len(prompt), limit, dtype=torch.float32, device=device)
    rope_table = model.rope(torch.arange(max(map(len, prompts)) + limit, device=device))
    stops = stop_tensor(sampling, device)
    check_every = 1 if device.type == "cpu" else 16  # counting the finished rows synchronizes with a GPU
    for t in range(limit):
        token, logprob = next_tokens(logits, rows.noise[:, t], sampling)
        tokens[rows.number, t] = token
        logprobs[rows.number, t] = logprob.float()
        rows.done |= is_stop(token, stops)
        if (t + 1) % check_every == 0:
            (token,) = rows.drop_finished(token, cache=cache)
            request.report(before + len(prompt) - len(rows.done))
        if t + 1 == limit or len(rows.done) == 0:
            request.report(before + len(prompt))
            return tokens[:, : t + 1], logprobs[:, : t + 1]
        if cache.room == 0:
            cache.grow(min(limit - t, cache.column))
        logits = decoder.read(token[:, None], rope_table=rope_table)
    raise AssertionError("the loop returns at its limit")


def stop_tensor(sampling: Sampling, device: torch.device) -> Tensor:
    """Return the stop ids as a tensor, for `is_stop`."""
    return torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device)


def is_stop(tokens: Tensor, stops: Tensor) -> Tensor:
    """Return whether each token is a stop id: bool, of the shape of ``tokens``."""
    return (tokens[..., None] == stops).any(-1)
