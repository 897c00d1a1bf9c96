"""Value-guided decoding of a frozen model: beam search over chunks, scored by value models (IRO, SPI).

    candidates  <- K B chunks of L tokens, sampled from the model after the prompt
    while any candidate is incomplete:
        V(y)        = sum_i V_i(x, y) / beta_i
        beams       <- the K candidates with the largest V, duplicates last                              (IRO, Alg. 5)
        candidates  <- the finished beams; each other beam extended by B sampled chunks of L tokens      (IRO, Alg. 4)

The caller then chooses the response among the candidates: by value, reward or majority. P prompts, K beams,
B successors, U = K B candidates per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from nlgrpo.engine.chunked_decoding import Chunk, ImplicitReward, ModelValue, Policy, TransformersPolicy, policy_of
from nlgrpo.engine.generation import check_prompts
from nlgrpo.engine.sampling import Sampling, uniform_noise
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.errors import UserError
from nlgrpo.model.decoder import Decoder


@dataclass(frozen=True)
class Search:
    """Options of the search: K ``beams``, B ``successors`` per beam, ``chunk`` length L in tokens.

    ``temperature``: 0 keeps the K best candidates; above 0, K are sampled without replacement with probabilities
    proportional to e^(V / temperature) (SPI, Sec. 4). ``diverse``: duplicates are ranked after distinct candidates.
    ``likeliest``: instead of sampling, extend each beam by its B most likely next tokens (fewer if a filter leaves
    fewer), and add log-probs to V. With one beam and chunks of one token this is ARGS (Khanov et al. 2024, "greedy").
    ``softmax``: the sum of all values but the last one is replaced by its softmax over the candidates of the prompt,

        V(y) = softmax_y(sum_{i < t} V_i / beta_i) + V_t / beta_t                                       (SPI, Eq. 14)

    where log pi_base is left out, because the candidates are samples of it (IRO, H.1.5). One value: no difference.
    Raises UserError for a value out of range.
    """

    beams: int = 4
    successors: int = 4
    chunk: int = 16
    temperature: float = 0.0
    diverse: bool = True
    likeliest: bool = False
    softmax: bool = False

    def __post_init__(self) -> None:
        for name in ("beams", "successors", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} = {value!r}: expected a whole number >= 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature = {self.temperature!r}: expected a finite number >= 0")
        if self.likeliest and self.softmax:
            raise UserError("softmax = True: a search for the likeliest tokens adds log-probs to V; expected False")
        if self.likeliest and self.chunk > 1:
            raise UserError(f"chunk = {self.chunk}: the most likely successors are single tokens; expected 1")

    @property
    def candidates(self) -> int:
        return self.beams * self.successors

    def settings(self) -> dict[str, Any]:
        """Fields for digests: options that an older version did not have are left out at their defaults."""
        return {name: value for name, value in asdict(self).items() if name != "softmax" or value}


@dataclass(frozen=True)
class Candidate:
    """Candidate response to a prompt."""

    tokens: tuple[int, ...]
    finished: bool
    """Whether it ends with a stop id."""
    value: float = math.nan
    """V at its last scoring; NaN if it was never scored."""
    logprobs: tuple[float, ...] = ()
    """Log-probs of its tokens under the sampling distribution, in nats."""
    places: int = 1
    """How many of the U candidates it replaces: B for a beam that finished before the last chunk, else 1."""

    @property
    def logprob(self) -> float:
        return math.fsum(self.logprobs)


@dataclass
class Cost:
    """Cost of a search, in the units of IRO's Proposition 1."""

    tokens: int = 0
    """Tokens sampled from the model, up to the stop id."""
    queries: int = 0
    """Number of candidates that value models scored."""
    cache_bytes: int = 0
    """Peak size of all KV caches (model and value models), measured at the ends of chunks.

    Temporary copies while a cache branches are not counted.
    """


CHOICE = 1 << 60  # flips a bit of the seed, so that the noise for choosing beams differs from that of tokens


class Value(Protocol):
    """Interface of a value function in a search. Its rows follow the policy's unfinished candidates."""

    name: str

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start with one row per prompt."""

    def score(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Append ``chunks[i]`` to a copy of row ``rows[i]``. The results become the rows; return their values (R,)."""

    def keep(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of ``rows``."""


# --- choosing beams ---------------------------------------------------------------------------------------------------


def select(values: Sequence[float], groups: Sequence[Hashable], beams: int, *, diverse: bool = True) -> list[int]:
    """Return the indices of the beams: first the best candidate of each group by value, then the rest (IRO, Alg. 5).

    ``groups`` are equal for identical candidates. Ties keep their order. Without ``diverse``, groups are ignored.
    Raises UserError for NaN.
    """
    if any(map(math.isnan, values)):
        raise UserError(f"values[{[math.isnan(v) for v in values].index(True)}] is NaN")
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
    """Run the search for all prompts. Return the complete candidates of each prompt, and the cost.

    ``model``: a decoder, or another architecture loaded by `load_frozen` (slower: each chunk reads its
    prefix again). ``how``: options of the search. ``values``: pairs (V_i, beta_i); the value of a candidate is
    sum_i V_i / beta_i. A candidate is complete when it ends with a stop id or has ``sampling.max_new_tokens`` tokens.
    With chunks of that length no value is queried, and the candidates are the U = K B samples of `engine.generate`
    with the same seed and ``index``. ``max_rows`` limits the rows of a cache; the rows of one prompt are never split.
    ``valued``: also score complete candidates, one query per candidate, so that one can be chosen by value.

    Raises UserError for a beta <= 0, a value that is not finite, and the errors of `engine.generate`.
    """
    for value, beta in values:
        if not (math.isfinite(beta) and beta > 0):
            raise UserError(f"beta of {value.name} = {beta}: expected a finite number > 0")
    check_prompts(model.shape, prompts, sampling)
    index = range(len(prompts)) if index is None else index
    policy = policy_of(model, sampling, seed)
    candidates = []
    cost = Cost()
    batch = max(1, max_rows // how.candidates)
    for i in range(0, len(prompts), batch):
        part = slice(i, i + batch)
        tree = _Tree(policy=policy, values=values, how=how, index=index[part], cost=cost, valued=valued)
        candidates += tree.grow(prompts[part])
    return candidates, cost


@dataclass
class _Beam:
    """Candidate or beam during the search."""

    prompt: int
    place: int
    """Index among the candidates, or beams, of its prompt."""
    row: int | None
    """Row in the policy's cache; None for a beam that finished earlier."""
    tokens: tuple[int, ...] = ()
    finished: bool = False
    value: float = math.nan
    earlier: float = 0.0
    last: float = 0.0
    """Parts of ``value`` from all value functions but the last one, and from the last one."""
    logprobs: tuple[float, ...] = ()
    parent: int = 0
    """Row that it extends by the tokens of ``chunk``."""
    chunk: tuple[int, ...] = ()


@dataclass
class _Tree:
    """Search over a batch of prompts; all unfinished rows have the same number of new tokens."""

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
        length = 0
        limit = self.policy.sampling.max_new_tokens
        successors = self.how.candidates  # K B for the first chunk, then B
        while beams:
            tokens = min(self.how.chunk, limit - length)
            candidates = self._expand(beams, successors, tokens)
            length = length + tokens
            successors = self.how.successors
            incomplete = {beam.prompt for beam in candidates if not beam.finished and length < limit}
            growing = [beam for beam in candidates if beam.prompt in incomplete]
            complete = [beam for beam in candidates if beam.prompt not in incomplete]
            new = [beam for beam in (candidates if self.valued else growing) if beam.row is not None]
            self._score(new)
            if self.how.softmax:
                _normalize(candidates)
            self.cost.cache_bytes = max(self.cost.cache_bytes, self._bytes())
            for beam in complete:
                found[beam.prompt].append(self._candidate(beam))
            beams = self._choose(growing, new, length)
        return found

    def _candidate(self, beam: _Beam) -> Candidate:
        places = self.how.successors if beam.row is None else 1
        return Candidate(beam.tokens, beam.finished, beam.value, beam.logprobs, places)

    def _expand(self, beams: Sequence[_Beam], successors: int, tokens: int) -> list[_Beam]:
        """Extend unfinished beams by ``successors`` chunks each. Return all candidates, sorted by prompt."""
        found = []
        growing = []
        ranks = []
        for beam in beams:
            if beam.row is None:
                found.append(replace(beam, place=beam.place * successors))
                continue
            for rank in range(successors):
                growing.append(replace(beam, place=beam.place * successors + rank))
                ranks.append(rank)
        chunks = list[Chunk]()
        if growing:
            rows = [_row(beam) for beam in growing]
            places = [beam.place for beam in growing]
            chunks = self.policy.expand(rows, places, tokens, ranks if self.how.likeliest else None)
        for row, (beam, chunk) in enumerate(zip(growing, chunks, strict=True)):
            if chunk.logprobs[-1] == -math.inf:  # fewer tokens than successors are possible
                continue
            extended = _Beam(
                prompt=beam.prompt,
                place=beam.place,
                row=row,
                tokens=(*beam.tokens, *chunk.tokens),
                finished=chunk.ended,
                logprobs=(*beam.logprobs, *chunk.logprobs),
                parent=_row(beam),
                chunk=chunk.tokens,
            )
            found.append(extended)
            self.cost.tokens += len(chunk.tokens)
        return sorted(found, key=lambda beam: (beam.prompt, beam.place))  # decides ties

    def _choose(self, candidates: Sequence[_Beam], scored: Sequence[_Beam], length: int) -> list[_Beam]:
        """Choose the beams of prompts with an incomplete candidate, and cut the caches down to the unfinished beams."""
        chosen = []
        for _, group in groupby(candidates, key=lambda beam: beam.prompt):
            of_prompt = list(group)
            keys = [beam.value for beam in of_prompt]
            if self.how.temperature > 0:
                keys = self._keys(of_prompt, length)
            texts = [beam.tokens for beam in of_prompt]
            for place, i in enumerate(select(keys, texts, self.how.beams, diverse=self.how.diverse)):
                chosen.append(replace(of_prompt[i], place=place))
        growing = [beam for beam in chosen if not beam.finished]
        if growing:
            self.policy.keep([_row(beam) for beam in growing], [beam.tokens[-1] for beam in growing])
            rows_of_values = {_row(beam): i for i, beam in enumerate(scored)}
            for value, _ in self.values:
                value.keep([rows_of_values[_row(beam)] for beam in growing])
        beams = []
        row = 0
        for beam in chosen:
            if beam.finished:
                beams.append(replace(beam, row=None))
            else:
                beams.append(replace(beam, row=row))
                row += 1
        return beams

    def _score(self, new: Sequence[_Beam]) -> None:
        """Score the candidates that have a new chunk, and set their values."""
        if not new:
            return
        parents = [beam.parent for beam in new]
        chunks = [beam.chunk for beam in new]
        total = torch.zeros(len(new), dtype=torch.float64)
        terms = [total]
        for value, beta in self.values:
            scores = value.score(parents, chunks).double().cpu()
            wrong = (~scores.isfinite()).nonzero()
            if len(wrong):
                beam = new[int(wrong[0])]
                raise UserError(
                    f"{value.name} returned {scores[wrong[0]].item()} for a candidate of prompt "
                    f"{self.index[beam.prompt]} with {len(beam.tokens)} tokens; expected a finite number"
                )
            terms.append(scores / beta)
            total += terms[-1]
            self.cost.queries += len(new)
        if not total.isfinite().all():
            betas = ", ".join(f"{beta:g}" for _, beta in self.values)
            raise UserError(f"sum_i V_i / beta_i is not finite for beta = {betas}")
        for i, (beam, value_sum) in enumerate(zip(new, total.tolist(), strict=True)):
            beam.earlier = math.fsum(float(term[i]) for term in terms[1:-1])
            beam.last = float(terms[-1][i])
            beam.value = value_sum + math.fsum(beam.logprobs) if self.how.likeliest else value_sum

    def _bytes(self) -> int:
        """Bytes of all KV caches. Only model-based values have one."""
        values = [value for value, _ in self.values if isinstance(value, ModelValue | ImplicitReward)]
        return self.policy.nbytes + sum(value.nbytes for value in values)

    def _keys(self, candidates: Sequence[_Beam], length: int) -> list[float]:
        """Return V / temperature + Gumbel noise: the top K sample without replacement from e^(V / temperature)."""
        count = torch.arange(len(candidates))
        prompt = torch.full_like(count, self.index[candidates[0].prompt])
        noise = uniform_noise(self.policy.seed ^ CHOICE, prompt, count, torch.tensor([length]))[:, 0]
        gumbel = -(-noise.clamp(min=1e-300).log()).log()
        return [beam.value / self.how.temperature + g for beam, g in zip(candidates, gumbel.tolist(), strict=True)]


def _normalize(candidates: Sequence[_Beam]) -> None:
    """Set the values of the candidates of each prompt as ``Search.softmax`` says, unless some are not scored."""
    for _, group in groupby(candidates, key=lambda beam: beam.prompt):
        of_prompt = list(group)
        if not any(math.isnan(beam.value) for beam in of_prompt):
            shares = torch.tensor([beam.earlier for beam in of_prompt], dtype=torch.float64).softmax(0)
            for beam, share in zip(of_prompt, shares.tolist(), strict=True):
                beam.value = share + beam.last


def _row(beam: _Beam) -> int:
    assert beam.row is not None
    return beam.row
