"""Chunked decoding for guided search: a policy samples the next chunk of each row, a value model scores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlgrpo.engine.generation import CachedDecoder, is_stop, not_finite, stop_tensor
from nlgrpo.engine.sampling import Sampling, next_tokens, uniform_noise
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model.decoder import Decoder
from nlgrpo.model.reward_model import score as score_head
from nlgrpo.model.value_model import as_values, kind_of


class ModelValue:
    """Value model that shares the policy's tokenizer: a decoder with one output, whose KV cache follows the search.

    Values are at least float32, whatever the dtype of the model: in bfloat16 too many of them would be equal.
    """

    def __init__(self, name: str, model: Decoder, room: int) -> None:
        self.name, self.model, self.rows, self.room = name, model, CachedDecoder(model, score_head), room

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        longest, context = max(map(len, prompts)) + self.room, self.model.shape.context
        if longest > context:
            raise ValueError(f"{self.name} has a context of {context} tokens, but candidates have up to {longest}")
        self._check(prompts)
        self.rows.begin(prompts)

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        self._check(chunks)
        device, longest = self.model.head_weight.device, max(map(len, chunks))
        self.rows.branch(rows, longest)
        tokens = torch.tensor([[*chunk, *[0] * (longest - len(chunk))] for chunk in chunks], device=device)
        last = torch.tensor([len(chunk) - 1 for chunk in chunks], device=device)
        return as_values(self.rows.read(tokens, last)[:, 0], kind_of(self.model))

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.branch(rows, 0)

    def _check(self, tokens: Sequence[Sequence[int]]) -> None:
        """Raise ValueError for a token id outside the vocabulary: that of the policy can be larger."""
        largest, known = max(map(max, tokens)), self.model.shape.vocab
        if largest >= known:
            raise ValueError(f"{self.name} has a vocabulary of {known:,}, but a candidate has the token id {largest:,}")


class Prefixes:
    """Rows of a search without a KV cache: per row, the index of its prompt and the tokens sampled after it."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.rows: list[tuple[int, tuple[int, ...]]] = [(p, ()) for p in range(len(prompts))]

    def grow(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        """Make row i a copy of row ``rows[i]`` followed by ``chunks[i]``."""
        self.rows = [(self.rows[r][0], (*self.rows[r][1], *chunk)) for r, chunk in zip(rows, chunks, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class Policy:
    """Samples chunks of tokens from the frozen model, with a KV cache."""

    def __init__(self, model: Decoder, sampling: Sampling, seed: int) -> None:
        self.rows, self.sampling, self.seed = CachedDecoder(model), sampling, seed
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
        cache, source = self.rows.cache, torch.tensor(rows, device=self.stops.device)
        self.rows.branch(rows, tokens - 1)
        logits, done = self.logits[source], torch.zeros_like(source, dtype=torch.bool)
        sampled, logprobs = list[Tensor](), list[Tensor]()
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
        self.model, self.sampling, self.seed, self.prefixes = model, sampling, seed, Prefixes()

    def begin(self, prompts: Sequence[Sequence[int]], index: Sequence[int]) -> None:
        self.prefixes.begin(prompts)
        self.index, self.column = torch.tensor(list(index), device=self.model.device), 0

    def keep(self, rows: Sequence[int], last: Sequence[int]) -> None:
        self.prefixes.keep(rows)

    def expand(
        self, rows: Sequence[int], places: Sequence[int], tokens: int, likely: Sequence[int] | None = None
    ) -> list[Chunk]:
        device, prompts = self.model.device, self.prefixes.prompts
        self.prefixes.keep(rows)
        prompt = torch.tensor([p for p, _ in self.prefixes.rows], device=device)
        positions = torch.arange(self.column, self.column + tokens, device=device)
        noise = uniform_noise(self.seed, self.index[prompt], torch.tensor(places, device=device), positions)
        sequences = [[*prompts[p], *sampled] for p, sampled in self.prefixes.rows]
        chunks = _chunks(*self.model.extend(sequences, noise, self.sampling, likely), self.sampling)
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
    """Cut each row of ``tokens`` (R, n) after its first stop id. Raises ValueError for a log-prob that is NaN."""
    chunks = []
    for row, logp in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in sampling.stop_ids), None)
        if any(map(math.isnan, logp[:end])):
            raise ValueError(not_finite(sampling))
        chunks.append(Chunk(tuple(row[:end]), tuple(logp[:end]), end is not None))
    return chunks


def policy_of(model: Decoder | TransformersModel, sampling: Sampling, seed: int) -> Policy | TransformersPolicy:
    return (
        TransformersPolicy(model, sampling, seed)
        if isinstance(model, TransformersModel)
        else Policy(model, sampling, seed)
    )
