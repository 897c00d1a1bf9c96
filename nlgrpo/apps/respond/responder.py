"""Responses to prompts: draw candidates, score them, and choose one by the procedure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from nlgrpo.apps.respond.choosing import Chooser
from nlgrpo.apps.respond.options import VALUE
from nlgrpo.apps.respond.procedures import Procedure
from nlgrpo.calibration.rewind import RewindAndRepeat
from nlgrpo.data.conversations import ChatOptions, Prompt, is_continued, plain_text
from nlgrpo.data.encoding import decode, encode
from nlgrpo.data.prompt_dataset import Batch
from nlgrpo.engine import guided_search
from nlgrpo.engine.backends import Engine, engine_of
from nlgrpo.engine.generation import RolloutRequest
from nlgrpo.engine.guided_search import CHOICE, Candidate, Cost, Search, Value
from nlgrpo.engine.rollouts.convert import as_candidates
from nlgrpo.engine.sampling import Sampling, uniform_noise
from nlgrpo.engine.transformers_backend import TransformersModel
from nlgrpo.errors import UserError
from nlgrpo.model.decoder import Decoder

REFERENCE = 1 << 59  # flips a bit of the seed, so that the reference's samples are independent of the candidates

Model = Decoder | TransformersModel | Engine


@dataclass(frozen=True)
class Scored:
    """Candidate response with its text and score."""

    tokens: tuple[int, ...]
    text: str
    """Continuation of the prompt without special tokens, up to the stop string."""
    score: float | None
    """The number that the choice is based on; None if it was not scored, or its reward abstained."""
    logprobs: tuple[float, ...]
    """Log-probs of the tokens under the sampling distribution, in nats."""
    finish_reason: str
    """Stop: it ends with a stop id or a stop string. Length: it has the largest number of tokens."""

    @classmethod
    def of(cls, candidate: Candidate, text: str, score: float) -> Scored:
        reason = "stop" if candidate.finished else "length"
        return cls(candidate.tokens, text, None if math.isnan(score) else score, candidate.logprobs, reason)


@dataclass(frozen=True)
class Response:
    """Response to a prompt, and the candidates among which it was chosen."""

    candidates: list[Scored]
    chosen: int
    sampled: int | None = None
    """Tokens that were sampled for it, with those that were cut off; None after a guided search."""

    @property
    def best(self) -> Scored:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    @property
    def text(self) -> str:
        return self.best.text

    @property
    def score(self) -> float | None:
        return self.best.score


@dataclass(frozen=True)
class Responder:
    """Responds to prompts with a model through an inference-time procedure.

    >>> responder = Responder(model, tokenizer, Procedure.parse("bon:4"), Chooser.of("lexicon(path='words.txt')"))
    >>> [response] = responder(["Once upon a time"])
    >>> response.text, response.score, len(response.candidates)

    ``procedure``: a `Procedure`, or the `Search` of a guided search with ``values``, pairs (V_i, beta_i). ``chooser``
    scores the candidates; None for a procedure with one candidate. ``reference`` (default: the model) and
    ``reference_samples`` give the threshold of rewind-and-repeat. ``max_rows`` limits the rows that are decoded
    together, and thus memory. ``scoring``: context in which the chooser scores; no model is used in it. ``chat`` and
    ``add_bos``: how prompts become token ids. The models must not be sharded.

    Raises UserError for a procedure and a chooser that do not fit together.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase
    procedure: Procedure | Search
    chooser: Chooser | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    values: Sequence[tuple[Value, float]] = ()
    reference: Model | None = None
    reference_samples: int = 64
    max_rows: int = 256
    scoring: Callable[[], AbstractContextManager[object]] = nullcontext
    chat: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen
    add_bos: bool | None = None

    def __post_init__(self) -> None:
        procedure = self.procedure
        chooser = self.chooser
        if isinstance(procedure, Search):
            if not isinstance(self.model, Decoder | TransformersModel):
                raise UserError("a guided search needs a model of nlgrpo or transformers, not another engine")
            if chooser is None:
                raise UserError("a guided search needs a chooser: by value, by majority, or by a reward")
            if chooser.how == VALUE and not self.values:
                raise UserError("--choose value needs a value model: set one, or choose by majority or a reward")
        elif self.values or (chooser is not None and chooser.how == VALUE):
            raise UserError(f"{procedure} has no value models; only a guided search does")
        elif chooser is None and (procedure.samples > 1 or procedure.rewind is not None):
            raise UserError(f"{procedure} needs a chooser: the reward by which the response is chosen")
        elif chooser is not None and procedure.needs_reward != (chooser.reward is not None):
            needed = "a reward" if procedure.needs_reward else "the majority of final answers"
            raise UserError(f"{procedure} chooses by {needed}, not by {chooser.how!r}")
        if self.reference_samples < 1:
            raise UserError(f"reference_samples = {self.reference_samples}: expected at least 1")

    @property
    def candidates(self) -> int:
        """Largest number of candidates per prompt."""
        return self.procedure.candidates if isinstance(self.procedure, Search) else self.procedure.samples

    def __call__(self, prompts: Sequence[Prompt], *, seed: int = 0) -> list[Response]:
        """Respond to texts or conversations. The same seed gives the same responses. Raises as `respond`."""
        responses, _ = self.respond(self.batch(prompts), seed=seed)
        return responses

    def batch(self, prompts: Sequence[Prompt], chat: ChatOptions | None = None) -> Batch:
        """Return prompts as conversations, where ``chat`` makes them, with their token ids. None: the responder's.

        Raises UserError as `prompt_encoding.encode`.
        """
        chat = self.chat if chat is None else chat
        given = [chat.conversation(prompt, f"prompt {i}") for i, prompt in enumerate(prompts, 1)]
        ids = encode(self.tokenizer, given, chat, self.add_bos)
        return Batch(list(range(len(ids))), ids, given, {})

    def respond(
        self, batch: Batch, *, seed: int = 0, sampling: Sampling | None = None, stop: Sequence[str] = ()
    ) -> tuple[list[Response], Cost]:
        """Respond to the prompts of ``batch``. Return a response to each, and the total cost.

        A response depends on (seed, ``batch.index``) and its prompt, not on the other prompts. ``sampling`` replaces
        the responder's. ``stop``: a candidate ends before the first of these strings; the tokens after it are sampled
        and cut off, before the reward sees the candidate.

        Raises UserError for a prompt that does not fit into the context, if the reward or a value fails, and if all
        candidates of a prompt have no score.
        """
        sampling = sampling or self.sampling
        if isinstance(self.procedure, Search):
            if stop and self._by == VALUE:
                raise UserError("stop: a value belongs to the whole candidate; choose by a reward or by majority")
            assert isinstance(self.model, Decoder | TransformersModel)
            found, cost = guided_search.search(
                self.model, batch.ids, self.procedure, sampling, self.values, seed=seed, index=batch.index,
                max_rows=self.max_rows, valued=self._by == VALUE,
            )  # fmt: skip
            return self._choose(batch, self._scored(batch, found, stop, self.chooser), seed), cost
        if self.procedure.rewind is not None:
            scored, sampled = self._rewind(batch, self.procedure.rewind, sampling, stop, seed)
        else:
            found = self._draw(self.model, batch, self.procedure.samples, sampling, seed)
            scored = self._scored(batch, found, stop, self.chooser)
            sampled = list(map(_tokens, found))
        responses = self._choose(batch, scored, seed)
        each = [replace(response, sampled=tokens) for response, tokens in zip(responses, sampled, strict=True)]
        return each, Cost(tokens=sum(sampled))

    def sample(self, batch: Batch, samples: int, *, seed: int = 0, stop: Sequence[str] = ()) -> list[list[Scored]]:
        """Sample completions of each prompt without choosing or scoring. Arguments and errors as in `respond`."""
        return self._scored(batch, self._draw(self.model, batch, samples, self.sampling, seed), stop, None)

    @property
    def _by(self) -> str:
        return "" if self.chooser is None else self.chooser.how

    def _draw(
        self, model: Model, batch: Batch, samples: int, sampling: Sampling, seed: int, first: int = 0
    ) -> list[list[Candidate]]:
        """Sample the candidates ``first``, ``first`` + 1, .. of each prompt."""
        request = RolloutRequest(
            batch.ids, samples, sampling, seed=seed, index=batch.index, max_rows=self.max_rows, first_sample=first
        )
        return as_candidates(engine_of(model).generate(request))

    def _rewind(
        self, batch: Batch, again: RewindAndRepeat, sampling: Sampling, stop: Sequence[str], seed: int
    ) -> tuple[list[list[Scored]], list[int]]:
        """Sample candidates one at a time until one reaches the threshold of its prompt; also count the tokens."""
        references = self._draw(self.reference or self.model, batch, self.reference_samples, sampling, seed ^ REFERENCE)
        thresholds = self._thresholds(batch, again, self._scored(batch, references, stop, self.chooser))
        sampled = list(map(_tokens, references))
        scored = [list[Scored]() for _ in batch.ids]
        waiting = list(range(len(batch.ids)))
        for draw in range(again.most):
            rest = batch.only(waiting)
            drawn = self._draw(self.model, rest, 1, sampling, seed, first=draw)
            for p, [one], own in zip(waiting, self._scored(rest, drawn, stop, self.chooser), drawn, strict=True):
                scored[p].append(one)
                sampled[p] += _tokens(own)
            waiting = [p for p in waiting if not _number(scored[p][-1]) >= thresholds[p]]
            if not waiting:
                break
        return scored, sampled

    def _thresholds(self, batch: Batch, again: RewindAndRepeat, references: Sequence[Sequence[Scored]]) -> list[float]:
        """Threshold of each prompt: the quantile of the reference's samples that have a reward.

        Raises UserError for a prompt at which the reward abstains for all of them.
        """
        found = []
        for prompt, own in zip(batch.prompts, references, strict=True):
            rewards = torch.tensor([one.score for one in own if one.score is not None], dtype=torch.float64)
            if not len(rewards):
                raise UserError(
                    f"{self._by} abstains for all {len(own)} samples of the reference for the prompt "
                    f"{plain_text(prompt)!r}, so that {again} has no threshold"
                )
            found.append(again.threshold(rewards[None]).item())
        return found

    def _scored(
        self, batch: Batch, found: Sequence[Sequence[Candidate]], stop: Sequence[str], chooser: Chooser | None
    ) -> list[list[Scored]]:
        """Decode candidates, cut them off at a stop string, and score them if there is a chooser."""
        before = [ids if is_continued(p) else [] for p, ids in zip(batch.prompts, batch.ids, strict=True)]
        starts = [ids for ids, own in zip(before, found, strict=True) for _ in own]
        texts = iter(decode(self.tokenizer, starts, [one.tokens for own in found for one in own]))
        cut = [
            [self._cut(start, one, next(texts), stop) for one in own] for start, own in zip(before, found, strict=True)
        ]
        candidates = [[one for one, _ in own] for own in cut]
        kept = [[text for _, text in own] for own in cut]
        scores = [[math.nan] * len(own) for own in found]
        if chooser is not None:
            with self.scoring():
                scores = chooser.scores(batch.prompts, candidates, kept, batch.columns)
        return [
            [Scored.of(*row) for row in zip(*of_prompt, strict=True)]
            for of_prompt in zip(candidates, kept, scores, strict=True)
        ]

    def _cut(self, start: Sequence[int], candidate: Candidate, text: str, stop: Sequence[str]) -> tuple[Candidate, str]:
        """Cut a candidate and its text off at the first stop string; its last token is the one that completes it."""
        ends = [at for at in (text.find(string) for string in stop) if at >= 0]
        if not ends:
            return candidate, text

        def stopped(count: int) -> bool:
            [part] = decode(self.tokenizer, [start], [candidate.tokens[:count]])
            return any(string in part for string in stop)

        count = bisect_left(range(len(candidate.tokens)), True, key=stopped)
        tokens = candidate.tokens[:count]
        logprobs = candidate.logprobs[:count]
        return replace(candidate, tokens=tokens, logprobs=logprobs, finished=True), text[: min(ends)]

    def _choose(self, batch: Batch, scored: Sequence[list[Scored]], seed: int) -> list[Response]:
        rule = self.procedure if isinstance(self.procedure, Procedure) else Procedure("largest", self.candidates)
        index = torch.tensor(batch.index)
        noise = uniform_noise(seed ^ CHOICE, index, torch.zeros_like(index), torch.tensor([0]))[:, 0].tolist()
        responses = []
        for prompt, own, u in zip(batch.prompts, scored, noise, strict=True):
            scores = [_number(one) for one in own]
            if self.chooser is not None and all(map(math.isnan, scores)):
                raise UserError(f"{self._by} is NaN for all candidates of the prompt {plain_text(prompt)!r}")
            responses.append(Response(own, 0 if self.chooser is None else rule.choose(scores, u)))
        return responses


def _number(one: Scored) -> float:
    return math.nan if one.score is None else one.score


def _tokens(candidates: Sequence[Candidate]) -> int:
    return sum(len(one.tokens) for one in candidates)
