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
    index = range(len(prompts)) if index is None else index
    cost = Cost()
    responses = [_Response(p) for p in range(len(prompts))]
    starts = _finite(rewards([r.prompt for r in responses], [()] * len(prompts)), responses, index)
    cost.queries += len(prompts)
    stops = frozenset(sampling.stop_ids)
    for i in range(0, len(prompts), max_rows):
        growing = responses[i : i + max_rows]
        while growing:
            rows = [(prompts[r.prompt], index[r.prompt], r) for r in growing]
            segments = _segments(model, rows, how, sampling, seed, cost)
            grown = [(*r.tokens, *s.tokens) for r, s in zip(growing, segments, strict=True)]
            scored = _finite(rewards([r.prompt for r in growing], grown), growing, index)
            cost.queries += len(growing)
            cost.tokens += sum(len(segment.tokens) for segment in segments)
            for response, segment, value in zip(growing, segments, scored, strict=True):
                share = (len(response.tokens) + len(segment.tokens)) / sampling.max_new_tokens
                tau = how.threshold(starts[response.prompt], share)
                _decide(response, segment, value, tau, how, _uniform(seed, index[response.prompt], response.drawn))
            limit = sampling.max_new_tokens
            growing = [r for r in growing if len(r.tokens) < limit and not (r.tokens and r.tokens[-1] in stops)]
    return [Candidate(r.tokens, r.tokens[-1] in stops, r.value, r.logprobs) for r in responses], cost


def _decide(response: _Response, segment: Segment, value: float, tau: float, how: Cascade, noise: float) -> None:
    """Append the segment if it is accepted, or the best of ``how.tries`` rejected ones."""
    response.drawn += 1
    accepted = noise < math.exp(min(0.0, (value - tau) / how.temperature))
    if not accepted:
        response.rejected.append((value, segment))
        if len(response.rejected) < how.tries:
            return
        value, segment = max(response.rejected, key=lambda pair: pair[0])  # the first of ties
    response.tokens = (*response.tokens, *segment.tokens)
    response.logprobs = (*response.logprobs, *segment.logprobs)
    response.value = value
    response.rejected.clear()


def _uniform(seed: int, prompt: int, number: int) -> float:
    """Noise in [0, 1) that decides about a segment."""
    one = torch.tensor([number])
    return float(uniform_noise(seed ^ CHOICE, torch.tensor([prompt]), one, torch.tensor([0])))


def _finite(rewards: Tensor, responses: Sequence[_Response], index: Sequence[int]) -> list[float]:
    """Return the rewards as numbers. Raises UserError for one that is not finite."""
    values: list[float] = rewards.double().tolist()
    for value, response in zip(values, responses, strict=True):
        if not math.isfinite(value):
            raise UserError(
                f"the reward of a beginning of the response to prompt {index[response.prompt]} is {value}; CARDS needs "
                "rewards that score beginnings too, and expected a finite number"
            )
    return values


def _segments(
    model: Decoder,
    rows: Sequence[tuple[Sequence[int], int, _Response]],
    how: Cascade,
    sampling: Sampling,
    seed: int,
    cost: Cost,
) -> list[Segment]:
    """Sample the next segment of each row (prompt, its number for the noise, response).

    A segment ends with a stop id or with the last token of a response, else before the first token, after ``shortest``,
    whose distribution under the model (at temperature 1, without filters) has an entropy of ``how.entropy`` or more.
    """
    cached = CachedDecoder(model)
    device = model.head_weight.device
    logits = cached.begin([[*prompt, *response.tokens] for prompt, _, response in rows])
    room = torch.tensor([sampling.max_new_tokens - len(response.tokens) for _, _, response in rows], device=device)
    steps = min(how.longest, int(room.max()))
    cached.branch(torch.arange(len(rows), device=device), steps)
    prompt, drawn = (
        torch.tensor(x, device=device) for x in ([n for _, n, _ in rows], [response.drawn for _, _, response in rows])
    )
    noise = uniform_noise(seed, prompt, drawn, torch.arange(steps, device=device))
    stops = stop_tensor(sampling, device)
    done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    lengths = torch.zeros_like(room)
    tokens = list[Tensor]()
    logprobs = list[Tensor]()
    for t in range(steps):
        if t >= how.shortest:
            done = done | (torch.distributions.Categorical(logits=logits.double()).entropy() >= how.entropy)
        if bool(done.all()):
            break
        token, logprob = next_tokens(logits, noise[:, t], sampling)
        tokens.append(token)
        logprobs.append(logprob)
        lengths += ~done
        done = done | is_stop(token, stops) | (lengths == room)
        logits = cached.read(token[:, None])
    cost.cache_bytes = max(cost.cache_bytes, cached.cache.nbytes)
    found = []
    for ids, logp, length in zip(
        torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), lengths.tolist(), strict=True
    ):
        if any(map(math.isnan, logp[:length])):
            raise UserError(not_finite(sampling))
        found.append(Segment(tuple(ids[:length]), tuple(logp[:length])))
    return found
