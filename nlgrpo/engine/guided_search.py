"""Value-guided decoding of a frozen model: beams of chunks, kept by what value models think of them (IRO, SPI).

    candidates  <- K B chunks of L tokens, drawn from the model behind the prompt
    while one of them is incomplete:
        V(y)        = sum_i V_i(x, y) / beta_i
        beams       <- K of the candidates: one of each different text by V, then the rest by V          (IRO, Alg. 5)
        candidates  <- the finished beams, and B chunks of L tokens behind each of the others            (IRO, Alg. 4)

What answers is then chosen among the candidates, by a reward or by majority. Legend: P prompts, K beams, B successors,
U = K B candidates of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from nlgrpo.engine.chunked_decoding import ModelValue, Policy, TransformersPolicy, policy_of
from nlgrpo.engine.generation import check_prompts
from nlgrpo.engine.sampling import Sampling, uniform_noise
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.model.decoder import Decoder


@dataclass(frozen=True)
class Search:
    """How wide and how fine a search is.

    ``temperature`` 0 keeps the K best candidates; above it, K are drawn without replacement with probabilities in
    proportion to e^(V / temperature) (SPI, Sec. 4). ``diverse``: identical candidates come after different ones.
    ``likeliest``: the successors of a beam are its B most likely next tokens instead of draws, fewer where fewer are
    possible, and their log-prob counts beside V; with one beam and chunks of one token that is ARGS (Khanov et al.
    2024, "greedy").
    Raises ValueError for a value out of range.
    """

    beams: int = 4
    successors: int = 4
    chunk: int = 16
    temperature: float = 0.0
    diverse: bool = True
    likeliest: bool = False

    def __post_init__(self) -> None:
        for name in ("beams", "successors", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}: expected a whole number >= 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature = {self.temperature!r}: expected a finite number >= 0")
        if self.likeliest and self.chunk > 1:
            raise ValueError(f"chunk = {self.chunk}: the most likely successors are single tokens; expected 1")

    @property
    def candidates(self) -> int:
        return self.beams * self.successors


@dataclass(frozen=True)
class Candidate:
    """A response, or the beginning of one."""

    tokens: tuple[int, ...]
    finished: bool
    """Ended by a stop id."""
    value: float = math.nan
    """V when it was last looked at; NaN where it never was."""
    logprobs: tuple[float, ...] = ()
    """Of its tokens under the distributions that they were drawn from, in nats."""
    places: int = 1
    """How many of the U candidates it stands for: 1, or B for a beam that had ended before the last chunk."""

    @property
    def logprob(self) -> float:
        return math.fsum(self.logprobs)


@dataclass
class Cost:
    """What a search has used, in the units of IRO's Proposition 1."""

    tokens: int = 0
    """Drawn from the model, those behind a stop id not counted."""
    queries: int = 0
    """Values of a candidate that a value model was asked for."""
    cache_bytes: int = 0
    """Most that all caches, of the model and of value models, held at the end of a chunk.

    While a cache branches, its old rows stand beside the new ones; that is not counted.
    """


CHOICE = 1 << 60  # in the seed of the noise that chooses beams: that of the tokens is another


class Value(Protocol):
    """A value model in a search: it scores candidates, and follows them from chunk to chunk."""

    name: str

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """New prompts, each a row."""

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """(R,) of what row ``rows[i]`` becomes with ``chunks[i]`` behind it; these are the rows from now on."""

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows."""


# --- choosing beams ---------------------------------------------------------------------------------------------------


def select(values: Sequence[float], groups: Sequence[Hashable], beams: int, *, diverse: bool = True) -> list[int]:
    """Which of the candidates go on, the best first: the best of each group by value, then the rest (IRO, Alg. 5).

    ``groups``: equal for candidates that are the same. Equal values are taken in their order. Without ``diverse`` the
    groups do not count. Raises ValueError for NaN.
    """
    if any(map(math.isnan, values)):
        raise ValueError(f"values[{[math.isnan(v) for v in values].index(True)}] is NaN")
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if not diverse:
        return order[:beams]
    first: dict[Hashable, int] = {}
    for i in order:
        first.setdefault(groups[i], i)
    chosen = list(first.values())[:beams]
    taken = set(chosen)
    return chosen + [i for i in order if i not in taken][: beams - len(chosen)]


# --- the search -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def search(
    model: Decoder | TransformersModel,
    prompts: Sequence[Sequence[int]],
    how: Search,
    sampling: Sampling,
    values: Sequence[tuple[Value, float]],
    *,
    seed: int = 0,
    index: Sequence[int] | None = None,
    max_rows: int = 256,
    valued: bool = False,
) -> tuple[list[list[Candidate]], Cost]:
    """The complete candidates of every prompt, among which its response is to be chosen, and what they have cost.

    ``model``: a decoder, or another architecture read by `transformers_backend.load` (slower: every chunk reads its
    prefix). ``values``: value models, each with its beta; the value of a candidate is the sum of V_i / beta_i. A
    candidate is complete when it has ended by a stop id or has ``sampling.max_new_tokens``. With chunks of that many
    tokens no value is queried, and the candidates are the U = K B samples that `engine.generate` draws with this seed
    and ``index``. ``max_rows`` bounds the rows of a cache, which holds at least those of one prompt. ``valued``: score
    complete candidates too, to choose one of them; this costs one query each.

    Raises ValueError for a beta that is not > 0, a value that is not a finite number, and as `engine.generate`.
    """
    for value, beta in values:
        if not (math.isfinite(beta) and beta > 0):
            raise ValueError(f"beta of {value.name} = {beta}: expected a finite number > 0")
    check_prompts(model.shape, prompts, sampling)
    index = range(len(prompts)) if index is None else index
    policy = policy_of(model, sampling, seed)
    found, cost, together = [], Cost(), max(1, max_rows // how.candidates)
    for i in range(0, len(prompts), together):
        tree = _Tree(policy, values, how, index[i : i + together], cost, valued)
        found += tree.grow(prompts[i : i + together])
    return found, cost


@dataclass
class _Beam:
    """A candidate of a prompt on its way."""

    prompt: int
    place: int
    """Among the prompt's candidates, or its beams."""
    row: int | None
    """In the policy's cache; None where it was finished and kept."""
    tokens: tuple[int, ...] = ()
    finished: bool = False
    value: float = math.nan
    logprobs: tuple[float, ...] = ()
    parent: int = 0
    """The row that it has grown from, by the tokens of ``chunk``."""
    chunk: tuple[int, ...] = ()


@dataclass
class _Tree:
    """The search of some prompts at once; all rows have drawn equally many tokens."""

    policy: Policy | TransformersPolicy
    values: Sequence[tuple[Value, float]]
    how: Search
    index: Sequence[int]
    cost: Cost
    valued: bool

    def grow(self, prompts: Sequence[Sequence[int]]) -> list[list[Candidate]]:
        self.policy.begin(prompts, self.index)
        for value, _ in self.values:
            value.begin(prompts)
        beams = [_Beam(p, 0, p) for p in range(len(prompts))]
        found: list[list[Candidate]] = [[] for _ in prompts]
        drawn, limit, each = 0, self.policy.sampling.max_new_tokens, self.how.candidates  # K B, once, then B
        while beams:
            tokens = min(self.how.chunk, limit - drawn)
            candidates = self._expand(beams, each, tokens)
            drawn, each = drawn + tokens, self.how.successors
            incomplete = {beam.prompt for beam in candidates if not beam.finished and drawn < limit}
            new = [b for b in candidates if b.row is not None and (self.valued or b.prompt in incomplete)]
            self._look(new)
            self.cost.cache_bytes = max(self.cost.cache_bytes, self._bytes())
            for beam in candidates:
                if beam.prompt not in incomplete:
                    places = self.how.successors if beam.row is None else 1
                    one = Candidate(beam.tokens, beam.finished, beam.value, beam.logprobs, places)
                    found[beam.prompt].append(one)
            beams = self._choose([beam for beam in candidates if beam.prompt in incomplete], new, drawn)
        return found

    def _expand(self, beams: Sequence[_Beam], each: int, tokens: int) -> list[_Beam]:
        """The finished beams, and ``each`` chunks behind every other one, prompt by prompt."""
        growing = [beam for beam in beams if beam.row is not None for _ in range(each)]
        places = [beam.place * each + b % each for b, beam in enumerate(growing)]
        likely = [b % each for b in range(len(growing))] if self.how.likeliest else None
        chunks = self.policy.expand([_row(beam) for beam in growing], places, tokens, likely) if growing else []
        found = [replace(beam, place=beam.place * each) for beam in beams if beam.row is None]
        for row, (beam, place, chunk) in enumerate(zip(growing, places, chunks, strict=True)):
            if chunk.logprobs[-1] == -math.inf:  # no such token can come
                continue
            whole, logprobs = (*beam.tokens, *chunk.tokens), (*beam.logprobs, *chunk.logprobs)
            grown = _Beam(
                beam.prompt, place, row, whole, chunk.ended, logprobs=logprobs, parent=_row(beam), chunk=chunk.tokens
            )
            found.append(grown)
            self.cost.tokens += len(chunk.tokens)
        return sorted(found, key=lambda beam: (beam.prompt, beam.place))  # in which equal values are taken

    def _choose(self, candidates: Sequence[_Beam], looked_at: Sequence[_Beam], drawn: int) -> list[_Beam]:
        """The beams of every prompt that has an incomplete candidate; the caches go on with those that grow."""
        chosen = []
        for _, of_prompt in groupby(candidates, key=lambda beam: beam.prompt):
            own = list(of_prompt)
            keys = self._keys(own, drawn) if self.how.temperature > 0 else [beam.value for beam in own]
            best = select(keys, [beam.tokens for beam in own], self.how.beams, diverse=self.how.diverse)
            chosen += [replace(own[i], place=place) for place, i in enumerate(best)]
        growing = [beam for beam in chosen if not beam.finished]
        if growing:
            self.policy.keep([_row(beam) for beam in growing], [beam.tokens[-1] for beam in growing])
            seen = {_row(beam): i for i, beam in enumerate(looked_at)}
            for value, _ in self.values:
                value.keep([seen[_row(beam)] for beam in growing])
        rows = iter(range(len(growing)))
        return [replace(beam, row=None if beam.finished else next(rows)) for beam in chosen]

    def _look(self, new: Sequence[_Beam]) -> None:
        """Set the worth of candidates that have grown."""
        if not new:
            return
        total = torch.zeros(len(new), dtype=torch.float64)
        for value, beta in self.values:
            given = value.score([beam.parent for beam in new], [beam.chunk for beam in new]).double().cpu()
            wrong = (~given.isfinite()).nonzero()
            if len(wrong):
                beam = new[int(wrong[0])]
                raise ValueError(
                    f"{value.name} gave {given[wrong[0]].item()} to a candidate of prompt {self.index[beam.prompt]} "
                    f"with {len(beam.tokens)} tokens; expected a finite number"
                )
            total += given / beta
            self.cost.queries += len(new)
        if not total.isfinite().all():
            raise ValueError(f"values over betas ({', '.join(f'{beta:g}' for _, beta in self.values)}) are not finite")
        for beam, worth in zip(new, total.tolist(), strict=True):
            beam.value = worth + math.fsum(beam.logprobs) if self.how.likeliest else worth

    def _bytes(self) -> int:
        """Of the caches; a value that is no model has none."""
        values = [value for value, _ in self.values if isinstance(value, ModelValue)]
        return self.policy.nbytes + sum(value.rows.cache.nbytes for value in values)

    def _keys(self, own: Sequence[_Beam], drawn: int) -> list[float]:
        """V / temperature and Gumbel noise: the order of draws without replacement from e^(V / temperature)."""
        count = torch.arange(len(own))
        prompt = torch.full_like(count, self.index[own[0].prompt])
        noise = uniform_noise(self.policy.seed ^ CHOICE, prompt, count, torch.tensor([drawn]))[:, 0]
        gumbel = -(-noise.clamp(min=1e-300).log()).log()
        return [beam.value / self.how.temperature + g for beam, g in zip(own, gumbel.tolist(), strict=True)]


def _row(beam: _Beam) -> int:
    assert beam.row is not None  # it grows
    return beam.row
