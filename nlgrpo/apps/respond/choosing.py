"""Scores of candidates, by which a response is chosen: a value, votes for the final answer, or a reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from nlgrpo.apps.respond.options import MAJORITY, VALUE
from nlgrpo.data.conversations import Prompt
from nlgrpo.data.encoding import as_answer
from nlgrpo.engine.guided_search import Candidate
from nlgrpo.errors import UserError
from nlgrpo.rewards import reward_functions, specs
from nlgrpo.rewards.builtin import vote
from nlgrpo.rewards.reward_functions import Reward


@dataclass(frozen=True)
class Chooser:
    """Scores the candidates of a prompt, and chooses the one with the largest score. The first of ties wins.

    ``how``: "value", the V of a guided search; "majority", the share of candidates with the same final answer
    (extracted by ``extract``, such as the content of ``\\boxed{}``; a candidate without an answer has 0); or a
    reward, written as in a configuration. Raises UserError for a reward that does not exist.
    """

    how: str
    reward: Reward | None = None
    extract: Callable[[str], Hashable | None] = vote
    """Final answer of a text, for "majority"; None does not vote."""

    @classmethod
    def of(
        cls, how: str, device: str | torch.device = "cpu", *, timeout: float = 600.0, process: bool = False
    ) -> Chooser:
        """Build a chooser; ``device``, ``timeout`` and ``process`` are those of the reward."""
        if how in (VALUE, MAJORITY):
            return cls(how)
        reward = specs.load_reward("choose", how, device=device, timeout=timeout, process=process)
        return cls(how, replace(reward, name=how))  # which its errors name

    @classmethod
    def by_votes(cls, how: str | None = None, *, timeout: float = 600.0, process: bool = False) -> Chooser:
        """Build a chooser by majority. ``how``: a reward whose method ``answer`` extracts the answers, as in training.

        Raises UserError for a reward that extracts none.
        """
        if how is None or how == MAJORITY:
            return cls(MAJORITY)
        reward = specs.load_reward("choose", how, timeout=timeout, process=process)
        if not hasattr(reward.function, "answer"):
            raise UserError(f"{how} extracts no final answers; omit it, or give its class a method answer(text)")
        return cls(MAJORITY, extract=partial(_extracted, replace(reward, name=how)))

    def scores(
        self,
        prompts: Sequence[Prompt],
        candidates: Sequence[Sequence[Candidate]],
        texts: Sequence[Sequence[str]],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[list[float]]:
        """Return the score of each candidate; NaN where the reward abstains.

        ``candidates`` and ``texts`` have a list for each of the P prompts, of any length. ``columns``: columns of the
        data for the reward, P values each. A reward is called once for all candidates. Raises UserError if it fails.
        """
        if self.reward is not None:
            return _rewards(self.reward, prompts, candidates, texts, columns or {})
        if self.how == MAJORITY:
            return [
                _votes([self.extract(text) for text in own_texts], [one.places for one in own])
                for own, own_texts in zip(candidates, texts, strict=True)
            ]
        return [[one.value for one in own] for own in candidates]

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], texts: Sequence[str]) -> tuple[int, float]:
        """Return the index of the candidate with the largest score, and the score.

        Raises UserError if the reward fails, or is NaN or None for all candidates.
        """
        [scores] = self.scores([prompt], [candidates], [texts])
        scored = [i for i, score in enumerate(scores) if not math.isnan(score)]
        if not scored:
            raise UserError(f"{self.how} is NaN for all candidates of the prompt {prompt!r}")
        best = max(scored, key=lambda i: scores[i])
        return best, scores[best]


def _extracted(reward: Reward, text: str) -> Hashable | None:
    """Return the final answer of a text. Raises UserError if the reward fails, or exceeds its timeout."""
    return reward_functions.answer_of(reward, text)


def majority(answers: Sequence[Hashable | None], weights: Sequence[float]) -> tuple[int, float]:
    """Weighted majority vote (self-consistency, Wang et al. 2023).

    Returns the index of the first candidate with the winning answer, and the answer's share of the total weight. The
    first of tied answers wins. ``None`` does not vote; if all answers are None, returns (0, 0.0).
    """
    shares = _votes(answers, weights)
    best = max(range(len(shares)), key=shares.__getitem__)
    return best, shares[best]


def _votes(answers: Sequence[Hashable | None], weights: Sequence[float]) -> list[float]:
    """Return for each candidate its answer's share of the total weight; 0 for None."""
    votes: Counter[Hashable] = Counter()
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            votes[answer] += weight  # type: ignore[assignment]
    total = sum(votes.values())
    return [0.0 if answer is None else votes[answer] / total for answer in answers]


def _rewards(
    reward: Reward,
    prompts: Sequence[Prompt],
    candidates: Sequence[Sequence[Candidate]],
    texts: Sequence[Sequence[str]],
    columns: Mapping[str, Sequence[Any]],
) -> list[list[float]]:
    """Call the reward with all candidates, as groups of one, because prompts can have different numbers of them."""
    repeat = [p for p, own in enumerate(candidates) for _ in own]
    scored = reward_functions.score(
        [reward],
        prompts=[prompts[p] for p in repeat],
        completions=[as_answer(p, text) for p, own in zip(prompts, texts, strict=True) for text in own],
        completion_ids=[list(one.tokens) for own in candidates for one in own],
        columns={name: [values[p] for p in repeat] for name, values in columns.items()},
        samples=1,
        step=0,
        total_steps=0,
    )
    values = iter(scored.values[reward.name].flatten().tolist())
    return [list(islice(values, len(own))) for own in candidates]
