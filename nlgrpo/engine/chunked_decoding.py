"""Chunked decoding for guided search: a policy samples the next chunk of each row, a value model scores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nlgrpo.engine.generation import CachedDecoder, is_stop, not_finite, stop_tensor
from nlgrpo.engine.sampling import Sampling, next_tokens, uniform_noise
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.errors import UserError
from nlgrpo.kernels import linear_logprob
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.reward_model import score as score_head
from nlgrpo.model.value_model import as_values, kind_of


class ModelValue:
    """Value model that shares the policy's tokenizer: a decoder with one output, whose KV cache follows the search.

    Values are at least float32, whatever the dtype of the model: in bfloat16 too many of them would be equal.
    """

    def __init__(self, name: str, model: Decoder, room: int) -> None:
        self.name = name
        self.model = model
        self.rows = CachedDecoder(model, score_head)
        self.room = room

    @property
    def models(self) -> list[Decoder]:
        return [self.model]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.rows.cache.nbytes

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        _check_context(self.name, self.model, prompts, self.room)
        _check_tokens(self.name, self.model, prompts)
        self.rows.begin(prompts)

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        _check_tokens(self.name, self.model, chunks)
        tokens, last = _padded(chunks, self.model.head_weight.device)
        self.rows.branch(rows, tokens.shape[1])
        return as_values(self.rows.read(tokens, last)[:, 0], kind_of(self.model))

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.branch(rows, 0)


class ImplicitReward:
    """Difference of the log-probs of two models, as a value of prefixes y of a response to x:

        V(x, y) = log pi_tuned(y | x) - log pi_untuned(y | x)                  (Rafailov et al. 2024, Zhou et al. 2024)

    For a model that DPO has tuned, beta V is the reward that it has learned, up to a constant per prompt. Both models
    share the policy's tokenizer, and their KV caches follow the search. Log-probs are those at temperature 1.
    """

    def __init__(self, name: str, tuned: Decoder, untuned: Decoder, room: int) -> None:
        self.name = name
        self.models = [tuned, untuned]
        self.room = room
        self.sides = [CachedDecoder(model, _hidden) for model in self.models]

    @property
    def nbytes(self) -> int:
        """Bytes of both caches."""
        return sum(side.cache.nbytes for side in self.sides)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for model in self.models:
            _check_context(self.name, model, prompts, self.room)
            _check_tokens(self.name, model, prompts)
        self.last = [side.begin(prompts) for side in self.sides]  # hidden states (R, D), which predict the next token
        self.values = torch.zeros(len(prompts), dtype=torch.float64, device=self.last[0].device)

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        for model in self.models:
            _check_tokens(self.name, model, chunks)
        tokens, last = _padded(chunks, self.values.device)
        source = torch.tensor(rows, device=tokens.device)
        place = torch.arange(len(chunks), device=tokens.device)
        inside = torch.arange(tokens.shape[1], device=tokens.device) <= last[:, None]
        sums = []
        for i, (model, side) in enumerate(zip(self.models, self.sides, strict=True)):
            side.branch(rows, tokens.shape[1])
            after = side.read(tokens).view(*tokens.shape, -1)
            before = torch.cat([self.last[i][source][:, None], after[:, :-1]], 1)
            logprob, _ = model.apply_head(before.flatten(0, 1), partial(linear_logprob, targets=tokens.flatten()))
            sums.append(logprob.double().view(tokens.shape).masked_fill(~inside, 0.0).sum(1))
            self.last[i] = after[place, last]
        self.values = self.values[source] + sums[0] - sums[1]
        return self.values

    def keep(self, rows: Sequence[int]) -> None:
        source = torch.tensor(rows, device=self.values.device)
        for side in self.sides:
            side.branch(rows, 0)
        self.last = [hidden[source] for hidden in self.last]
        self.values = self.values[source]


def _hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Head that returns the hidden states themselves."""
    return hidden


def _padded(chunks: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the chunks as (R, n), padded with 0, and the place (R,) of the last token of each."""
    longest = max(map(len, chunks))
    rows = []
    for chunk in chunks:
        padding = [0] * (longest - len(chunk))
        rows.append([*chunk, *padding])
    last = [len(chunk) - 1 for chunk in chunks]
    return torch.tensor(rows, device=device), torch.tensor(last, device=device)


def _check_context(name: str, model: Decoder, prompts: Sequence[Sequence[int]], room: int) -> None:
    """Raise UserError if a candidate can be longer than the model's context."""
    longest = max(map(len, prompts)) + room
    context = model.shape.context
    if longest > context:
        raise UserError(f"{name} has a context of {context} tokens, but candidates have up to {longest}")


def _check_tokens(name: str, model: Decoder, tokens: Sequence[Sequence[int]]) -> None:
    """Raise UserError for a token id outside the vocabulary: that of the policy can be larger."""
    largest = max(map(max, tokens))
    known = model.shape.vocab
    if largest >= known:
        raise UserError(f"{name} has a vocabulary of {known:,}, but a candidate has the token id {largest:,}")


class Prefixes:
    """Rows of a search without a KV cache: per row, the index of its prompt and the tokens sampled after it."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.rows: list[tuple[int, tuple[int, ...]]] = [(p, ()) for p in range(len(prompts))]

    def grow(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        """Make row i a copy of row ``rows[i]`` followed by ``chunks[i]``."""
        grown = []
        for row, chunk in zip(rows, chunks, strict=True):
            prompt, tokens = self.rows[row]
            grown.append((prompt, (*tokens, *chunk)))
        self.rows = grown

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class Policy:
    """Samples chunks of tokens from the frozen model, with a KV cache."""

    def __init__(self, model: Decoder, sampling: Sampling, seed: int) -> None:
        self.rows = CachedDecoder(model)
        self.sampling = sampling
        self.seed = seed
        self.stops = stop_tensor(sampling, model.head_weight.device)

    def begin(self, prompts: Sequence[Sequence[int]], index: Sequence[int]) -> None:
        self.logits = self.rows.begin(prompts)
        self.index = torch.tensor(list(index), device=self.logits.device)

    def keep(self, rows: Sequence[int], last: Sequence[int]) -> None:
        """Replace the rows by copies of ``rows``, and read their ``last`` tokens, which `expand` only sampled."""
        self.rows.branch(rows, 1)
        tokens = torch.tensor(last, device=self.stops.device)
        self.logits = self.rows.read(tokens[:, None], torch.zeros_like(tokens))

    def expand(
        self, rows: Sequence[int], places: Sequence[int], tokens: int, likely: Sequence[int] | None = None
    ) -> list[Chunk]:
        """Sample a chunk after each row ``rows[i]``: ``tokens`` tokens, or fewer if it ends with a stop id.

        Afterwards row i is ``rows[i]`` followed by its chunk, without the last token: `keep` reads that one. The noise
        depends only on the seed, the prompt, ``places[i]`` and the position. With ``likely``, take the token of rank
        ``likely[i]`` by probability instead of sampling; its log-prob is -inf if fewer tokens are possible.
        """
        cache = self.rows.cache
        source = torch.tensor(rows, device=self.stops.device)
        self.rows.branch(rows, tokens - 1)
        logits = self.logits[source]
        done = torch.zeros_like(source, dtype=torch.bool)
        sampled = list[Tensor]()
        logprobs = list[Tensor]()
        positions = torch.arange(cache.column, cache.column + tokens, device=source.device)
        place = torch.tensor(places, device=source.device)
        noise = uniform_noise(self.seed, self.index[cache.prompt], place, positions)
        for t in range(tokens):
            token, logprob = next_tokens(logits, noise[:, t], self.sampling, likely)
            sampled.append(token)
            logprobs.append(logprob)
            done |= is_stop(token, self.stops)
            if t + 1 == tokens or bool(done.all()):
                break
            logits = self.rows.read(token[:, None], torch.zeros_like(token))
        return _chunks(torch.stack(sampled, 1), torch.stack(logprobs, 1), self.sampling)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.rows.cache.nbytes


class TransformersPolicy:
    """`Policy` for a `TransformersModel`. It has no cache between chunks: each chunk reads whole candidates again."""

    nbytes = 0  # its caches do not outlive a chunk

    def __init__(self, model: TransformersModel, sampling: Sampling, seed: int) -> None:
        self.model = model
        self.sampling = sampling
        self.seed = seed
        self.prefixes = Prefixes()

    def begin(self, prompts: Sequence[Sequence[int]], index: Sequence[int]) -> None:
        self.prefixes.begin(prompts)
        self.index = torch.tensor(list(index), device=self.model.device)
        self.column = 0

    def keep(self, rows: Sequence[int], last: Sequence[int]) -> None:
        self.prefixes.keep(rows)

    def expand(
        self, rows: Sequence[int], places: Sequence[int], tokens: int, likely: Sequence[int] | None = None
    ) -> list[Chunk]:
        device = self.model.device
        prompts = self.prefixes.prompts
        self.prefixes.keep(rows)
        prompt = torch.tensor([p for p, _ in self.prefixes.rows], device=device)
        positions = torch.arange(self.column, self.column + tokens, device=device)
        noise = uniform_noise(self.seed, self.index[prompt], torch.tensor(places, device=device), positions)
        sequences = [[*prompts[p], *sampled] for p, sampled in self.prefixes.rows]
        sampled_tokens, logprobs = self.model.extend(sequences, noise, self.sampling, likely)
        chunks = _chunks(sampled_tokens, logprobs, self.sampling)
        self.prefixes.grow(range(len(rows)), [chunk.tokens for chunk in chunks])
        self.column += tokens
        return chunks


@dataclass(frozen=True)
class Chunk:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool
    """Whether the chunk ends with a stop id."""


def _chunks(tokens: Tensor, logprobs: Tensor, sampling: Sampling) -> list[Chunk]:
    """Cut each row of ``tokens`` (R, n) after its first stop id. Raises UserError for a log-prob that is NaN."""
    chunks = []
    for row, logp in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        stops = [i for i, token in enumerate(row) if token in sampling.stop_ids]
        end = stops[0] + 1 if stops else len(row)
        if any(map(math.isnan, logp[:end])):
            raise UserError(not_finite(sampling))
        chunks.append(Chunk(tuple(row[:end]), tuple(logp[:end]), ended=bool(stops)))
    return chunks


def policy_of(model: Decoder | TransformersModel, sampling: Sampling, seed: int) -> Policy | TransformersPolicy:
    if isinstance(model, TransformersModel):
        return TransformersPolicy(model, sampling, seed)
    return Policy(model, sampling, seed)
