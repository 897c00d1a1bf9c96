"""CARDS, cascade reward sampling (Li et al. 2024): a response grows by segments that its reward accepts or rejects.

    y <- ""
    while y is incomplete:
        s        <- a segment sampled from the model after y; it ends where the model's next token is uncertain
        tau      <- min(r*, tau_0 + |y s| (r* - tau_0) / H),   tau_0 = (1 - alpha) r(x) + alpha r*
        with probability min(1, exp((r(x, y s) - tau) / beta)):  y <- y s
        after N segments at the same place:                      y <- y followed by the best of them

The reward is defined for complete responses; a segment ends where its text is likely to be a unit of meaning, so that
the reward says something about it. P prompts, H the most tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nlgrpo.engine.generation import CachedDecoder, check_prompts, is_stop, not_finite, stop_tensor
from nlgrpo.engine.guided_search import CHOICE, Candidate, Cost
from nlgrpo.engine.sampling import Sampling, next_tokens, uniform_noise
from nlgrpo.errors import UserError
from nlgrpo.model.decoder import Decoder

Rewards = Callable[[Sequence[int], Sequence[Sequence[int]]], Tensor]
"""Rewards (R,) of responses (or their beginnings) to the prompts with these numbers."""


@dataclass(frozen=True)
class Cascade:
    """Options of CARDS; the defaults are those of the paper, apart from the goal.

    ``goal``: r*, the reward that a complete response should have. ``temperature``: beta of the acceptance. ``entropy``:
    a segment ends before a token whose distribution has at least this entropy, in nats. ``tries``: N, segments sampled
    at one place before the best one is taken. ``alpha``: share of the goal that is expected of the first segment.
    ``shortest``, ``longest``: tokens of a segment. Raises UserError for a value out of range.
    """

    goal: float
    temperature: float = 0.7
    entropy: float = 3.0
    tries: int = 20
    alpha: float = 0.5
    shortest: int = 4
    longest: int = 64

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("goal", math.isfinite(self.goal), "a finite number"),
            ("temperature", self.temperature > 0 and math.isfinite(1 / self.temperature), "a finite number > 0"),
            ("entropy", self.entropy >= 0, "a number >= 0"),
            ("tries", self.tries >= 1, "a whole number >= 1"),
            ("alpha", 0 <= self.alpha <= 1, "a number in [0, 1]"),
            ("shortest", 1 <= self.shortest <= self.longest, f"1 to longest = {self.longest}"),
        ):
            if not good:
                raise UserError(f"{name} = {getattr(self, name)!r}: expected {allowed}")

    def threshold(self, start: float, share: float) -> float:
        """tau of a response with ``share`` = |y| / H of the most tokens, where ``start`` is r(x)."""
        first = (1 - self.alpha) * start + self.alpha * self.goal
        return min(self.goal, first + share * (self.goal - first))


@dataclass
class _Response:
    """Response to a prompt while it grows, with what is known of the segments at its end."""

    prompt: int
    start: float = math.nan
    """r(x), the reward of the empty response."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    value: float = math.nan
    drawn: int = 0
    """Segments sampled so far, at all places."""
    rejected: list[tuple[float, Segment]] = field(default_factory=list)
    """Segments that were rejected at this place, with their rewards."""


@dataclass(frozen=True)
class Segment:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@torch.inference_mode()
def sample(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    how: Cascade,
    sampling: Sampling,
    rewards: Rewards,
    *,
    seed: int = 0,
    index: Sequence[int] | None = None,
    max_rows: int = 256,
) -> tuple[list[Candidate], Cost]:
    """Sample a response to each prompt. Returns the responses and the cost; its queries are those of the reward.

    ``rewards`` also scores empty responses, for r(x). The prefix is read again for each segment, because the segments
    of a batch have different lengths. Raises UserError for a reward that is not finite, and the errors of
    `engine.generate`.
    """
    check_prompts(model.shape, prompts, sampling)
    growth = _Growth(
        model=model,
        prompts=prompts,
        how=how,
        sampling=sampling,
        rewards=rewards,
        seed=seed,
        index=range(len(prompts)) if index is None else index,
    )
    responses = [_Response(p) for p in range(len(prompts))]
    starts = growth.score(responses, [()] * len(prompts))
    for response, start in zip(responses, starts, strict=True):
        response.start = start
    for i in range(0, len(prompts), max_rows):
        growth.grow(responses[i : i + max_rows])
    candidates = []
    for response in responses:
        finished = response.tokens[-1] in sampling.stop_ids
        candidates.append(Candidate(response.tokens, finished, response.value, response.logprobs))
    return candidates, growth.cost


@dataclass
class _Growth:
    """What all steps of `sample` need, under the names of its arguments, and the cost so far."""

    model: Decoder
    prompts: Sequence[Sequence[int]]
    how: Cascade
    sampling: Sampling
    rewards: Rewards
    seed: int
    index: Sequence[int]
    cost: Cost = field(default_factory=Cost)

    def grow(self, responses: Sequence[_Response]) -> None:
        """Sample segments of the responses until all are complete."""
        limit = self.sampling.max_new_tokens
        growing = list(responses)
        while growing:
            segments = self.segments(growing)
            grown = [(*r.tokens, *s.tokens) for r, s in zip(growing, segments, strict=True)]
            scored = self.score(growing, grown)
            for response, segment, value in zip(growing, segments, scored, strict=True):
                self.decide(response, segment, value)
            growing = [r for r in growing if len(r.tokens) < limit and not self._ended(r)]

    def _ended(self, response: _Response) -> bool:
        return bool(response.tokens) and response.tokens[-1] in self.sampling.stop_ids

    def score(self, responses: Sequence[_Response], tokens: Sequence[Sequence[int]]) -> list[float]:
        """Return the rewards of beginnings of the responses. Raises UserError for one that is not finite."""
        values: list[float] = self.rewards([r.prompt for r in responses], tokens).double().tolist()
        for value, response in zip(values, responses, strict=True):
            if not math.isfinite(value):
                raise UserError(
                    f"the reward of a beginning of the response to prompt {self.index[response.prompt]} is {value}; "
                    "CARDS needs rewards that score beginnings too, and expected a finite number"
                )
        self.cost.queries += len(values)
        return values

    def decide(self, response: _Response, segment: Segment, value: float) -> None:
        """Append the segment, with the reward ``value``, if it is accepted; or the best of N rejected ones."""
        length = len(response.tokens) + len(segment.tokens)
        threshold = self.how.threshold(response.start, length / self.sampling.max_new_tokens)
        noise = self.noise(response)
        response.drawn += 1
        accepted = noise < math.exp(min(0.0, (value - threshold) / self.how.temperature))
        if not accepted:
            response.rejected.append((value, segment))
            if len(response.rejected) < self.how.tries:
                return
            value, segment = max(response.rejected, key=lambda pair: pair[0])  # the first of ties
        response.tokens = (*response.tokens, *segment.tokens)
        response.logprobs = (*response.logprobs, *segment.logprobs)
        response.value = value
        response.rejected.clear()

    def noise(self, response: _Response) -> float:
        """Noise in [0, 1) that decides about the newest segment of a response."""
        prompt = torch.tensor([self.index[response.prompt]])
        number = torch.tensor([response.drawn])
        return float(uniform_noise(self.seed ^ CHOICE, prompt, number, torch.tensor([0])))

    def segments(self, responses: Sequence[_Response]) -> list[Segment]:
        """Sample the next segment of each response.

        A segment ends with a stop id or with the last token of a response, else before the first token, after
        ``shortest``, whose distribution under the model (at temperature 1, without filters) has an entropy of
        ``how.entropy`` or more.
        """
        device = self.model.head_weight.device
        cached = CachedDecoder(self.model)
        logits = cached.begin([[*self.prompts[r.prompt], *r.tokens] for r in responses])
        room = torch.tensor([self.sampling.max_new_tokens - len(r.tokens) for r in responses], device=device)
        steps = min(self.how.longest, int(room.max()))
        cached.branch(torch.arange(len(responses), device=device), steps)
        prompt = torch.tensor([self.index[r.prompt] for r in responses], device=device)
        drawn = torch.tensor([r.drawn for r in responses], device=device)
        noise = uniform_noise(self.seed, prompt, drawn, torch.arange(steps, device=device))
        stops = stop_tensor(self.sampling, device)
        done = torch.zeros(len(responses), dtype=torch.bool, device=device)
        lengths = torch.zeros_like(room)
        tokens = list[Tensor]()
        logprobs = list[Tensor]()
        for t in range(steps):
            if t >= self.how.shortest:
                entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
                done = done | (entropy >= self.how.entropy)
            if bool(done.all()):
                break
            token, logprob = next_tokens(logits, noise[:, t], self.sampling)
            tokens.append(token)
            logprobs.append(logprob)
            lengths += ~done
            done = done | is_stop(token, stops) | (lengths == room)
            logits = cached.read(token[:, None])
        self.cost.cache_bytes = max(self.cost.cache_bytes, cached.cache.nbytes)
        rows = torch.stack(tokens, 1).tolist()
        logprobs_of_rows = torch.stack(logprobs, 1).tolist()
        found = []
        for ids, logp, length in zip(rows, logprobs_of_rows, lengths.tolist(), strict=True):
            if any(map(math.isnan, logp[:length])):
                raise UserError(not_finite(self.sampling))
            found.append(Segment(tuple(ids[:length]), tuple(logp[:length])))
        self.cost.tokens += sum(len(segment.tokens) for segment in found)
        return found
