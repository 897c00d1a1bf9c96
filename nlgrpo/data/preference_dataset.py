"""Preference pairs: read the rows of a source and tokenize their chosen and rejected texts.

Layouts, detected per row:

    texts           ``chosen`` and ``rejected`` are full dialogues, as in hh-rlhf; their common beginning up to its last
                    "\\n\\nAssistant:" is the prompt (without one, the prompt is empty)
    prompt, texts   ``prompt`` precedes both texts
    conversations   lists of ``{"role": .., "content": ..}``, complete or after a ``prompt`` that is a list too; the
                    tokenizer's chat template is applied
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from nlgrpo.data.conversations import brief, text_of
from nlgrpo.data.encoding import ids_to_score
from nlgrpo.data.sources import Row, nearest, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "\n\nAssistant:"  # the end of a prompt of hh-rlhf


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as stored in the source."""

    prompt: str | list[Any]
    chosen: str | list[Any]
    rejected: str | list[Any]
    margin: float = 0.0


@dataclass(frozen=True)
class PairSet:
    """Tokenised pairs in the order of the source, with counts of dropped and truncated ones."""

    chosen: list[list[int]]
    """Token ids of prompt and chosen answer."""
    rejected: list[list[int]]
    """Token ids of prompt and rejected answer."""
    margins: list[float]
    """How much better the chosen answer is; 0 if the data have no margin."""
    prompts: list[str]
    """Prompts as texts, to compare them."""
    lost: list[int]
    """Truncation of each pair: 0 none, 1 the beginning of its prompt, 2 also the beginning of an answer."""
    ties: int = 0
    """Number of pairs dropped because both answers are equal."""
    shared: int = 0
    """Number of pairs dropped because their prompt is also in the held-out set."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        text = f"{len(self):,} pair{'s' * (len(self) != 1)}, {self.tokens:,} tokens"
        notes = [
            (self.truncated, "truncated at the beginning"),
            (self.cut, "of them within an answer"),
            (self.ties, "ties dropped"),
            (self.shared, "dropped with a held-out prompt"),
        ]
        return "; ".join([text, *(f"{count:,} {note}" for count, note in notes if count)])

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.chosen)) + sum(map(len, self.rejected))

    @property
    def truncated(self) -> int:
        """Number of pairs with a text that was longer than the limit and lost its beginning."""
        return sum(part > 0 for part in self.lost)

    @property
    def cut(self) -> int:
        """Number of truncated pairs with an answer that is too long by itself: it lost its prompt and its beginning."""
        return sum(part > 1 for part in self.lost)

    def split(self, count: int) -> tuple[PairSet, PairSet]:
        """Split off the last ``count`` pairs, at most half; return the rest and them."""
        cut = len(self) - min(count, len(self) // 2)
        held_out = replace(self._subset(range(cut, len(self))), ties=0)
        return self._subset(range(cut)), held_out

    def without(self, prompts: Collection[str]) -> PairSet:
        """Drop the pairs with one of these prompts and count them in ``shared``. Empty prompts are never dropped."""
        known = set(prompts) - {""}
        kept = [i for i, prompt in enumerate(self.prompts) if prompt not in known]
        return replace(self._subset(kept), shared=len(self) - len(kept))

    def _subset(self, rows: Sequence[int]) -> PairSet:
        return replace(
            self,
            chosen=[self.chosen[i] for i in rows],
            rejected=[self.rejected[i] for i in rows],
            margins=[self.margins[i] for i in rows],
            prompts=[self.prompts[i] for i in rows],
            lost=[self.lost[i] for i in rows],
        )


def load(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    split: str = "train",
    prompt_column: str = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    margin_column: str | None = None,
    limit: int | None = None,
) -> PairSet:
    """Load the pairs of ``source`` (see `sources.py`) and tokenise them, each text to at most ``max_length`` tokens.

    Texts are tokenised as the reward ``classifier`` does it: EOS at the end, and a text that is too long loses its
    beginning. The prompt column is optional. ``limit``: maximum number of rows to read.

    Raises ValueError for an unreadable or empty source, a missing column (the message has the nearest names), a value
    that is neither a text nor a conversation, a conversation without a chat template, and if all pairs are ties.
    """
    if max_length < 2:
        raise ValueError(f"max_length = {max_length}; expected 2 or more")
    rows = list(islice(read(source, split), limit))
    if not rows:
        raise ValueError(f"{source} is empty: it has no pair.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for column in (chosen_column, rejected_column, margin_column):
        if column is not None and column not in names:
            raise ValueError(f"{source} has no column {column!r}. It has {', '.join(names)}.{nearest(column, names)}")
    columns = (prompt_column, chosen_column, rejected_column, margin_column)
    pairs = [pair_of(row, columns, f"{source}, example {number}") for number, row in enumerate(rows, 1)]
    encoder = _Encoder(tokenizer, max_length, source)
    return encoder.encode(pairs)


def pair_of(row: Row, columns: tuple[str, str, str, str | None], where: str) -> Pair:
    """Return the pair of a row. ``columns``: names of the prompt, chosen, rejected and margin column.

    ``where`` names the row in messages. Raises ValueError for values of the wrong type.
    """
    prompt_column, chosen_column, rejected_column, margin_column = columns
    prompt = row.get(prompt_column)
    chosen, rejected = (_answer(row.get(name), name, where) for name in (chosen_column, rejected_column))
    margin = 0.0 if margin_column is None else _margin(row.get(margin_column), margin_column, where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{where}: one of chosen and rejected is a text and the other a conversation.")
    if prompt is None:
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
        return Pair(prompt, chosen, rejected, margin)
    prompt = _answer(prompt, prompt_column, where)
    if isinstance(prompt, str) != isinstance(chosen, str):
        raise ValueError(
            f"{where}: the prompt is {brief(prompt)}, but the answers are of another type. Use texts in all columns, "
            "or conversations; if the conversations include the prompt already, name another prompt_column."
        )
    return Pair(prompt, chosen, rejected, margin)


def _answer(value: Any, column: str, where: str) -> str | list[Any]:
    if isinstance(value, str):
        return value
    messages = list(value) if isinstance(value, list | tuple) else []
    if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        expected = "a text or a list of {'role': .., 'content': ..}"
        raise ValueError(f"{where}: column {column!r} holds {brief(value)} instead of {expected}.")
    return messages


def _margin(value: Any, column: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: column {column!r} holds {brief(value)} instead of a finite number.")
    return float(value)


def _split_prompt(chosen: str | list[Any], rejected: str | list[Any]) -> tuple[Any, Any, Any]:
    """Split two full dialogues into their common prompt and two answers."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        at = chosen.rfind(ANSWER, 0, same)
        same = 0 if at < 0 else at + len(ANSWER)
    return chosen[:same], chosen[same:], rejected[same:]


class _Encoder:
    """Tokenises pairs and counts ties and truncated texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, source: str) -> None:
        self.tokenizer, self.max_length, self.source = tokenizer, max_length, source
        self.tokenizer.truncation_side = "left"

    def encode(self, pairs: list[Pair]) -> PairSet:
        pair_set = PairSet([], [], [], [], [])
        ties = 0
        for number, pair in enumerate(pairs, 1):
            where = f"{self.source}, example {number}"
            chosen, rejected = (self._side(pair.prompt, answer, where) for answer in (pair.chosen, pair.rejected))
            if pair.chosen == pair.rejected or chosen[0] == rejected[0]:
                ties += 1
                continue
            pair_set.chosen.append(chosen[0])
            pair_set.rejected.append(rejected[0])
            pair_set.margins.append(pair.margin)
            pair_set.prompts.append(pair.prompt if isinstance(pair.prompt, str) else json.dumps(pair.prompt))
            pair_set.lost.append(max(chosen[1], rejected[1]))
        if not pair_set.chosen:
            raise ValueError(f"{self.source}: chosen and rejected are equal in all {len(pairs):,} pairs.")
        return replace(pair_set, ties=ties)

    def _side(self, prompt: str | list[Any], answer: str | list[Any], where: str) -> tuple[list[int], int]:
        """Return the ids of prompt and answer, and their truncation (see `PairSet.lost`)."""
        templated = not isinstance(prompt, str)
        text = self._conversation([*prompt, *answer], where) if templated else text_of(prompt) + text_of(answer)
        ids = ids_to_score(self.tokenizer, text, None, templated=templated)
        if not ids:
            raise ValueError(f"{where}: the text {text!r} has no tokens, and the tokenizer has no EOS to add.")
        if len(ids) <= self.max_length:
            return ids, 0
        alone = ids_to_score(self.tokenizer, text_of(answer), None, templated=templated)
        ids = ids_to_score(self.tokenizer, text, self.max_length, templated=templated)
        return ids, 1 + (len(alone) > self.max_length)

    def _conversation(self, messages: list[Any], where: str) -> str:
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where} is a conversation, but the tokenizer has no chat template.\n"
                "  Use the tokenizer of an instruct model, set its chat_template, or give the pairs as texts."
            )
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, ValueError) as error:
            raise ValueError(
                f"{where}: the chat template rejects the conversation {brief(messages)}: {error}"
            ) from error
