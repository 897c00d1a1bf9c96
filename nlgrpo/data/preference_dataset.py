"""Preference pairs: from the rows of a source to the token ids of a preferred and of a rejected text.

Layouts, told apart by the row:

    texts           ``chosen`` and ``rejected`` are whole dialogues, as in hh-rlhf; what they share up to its last
                    "\\n\\nAssistant:" is the prompt (all of it the answer where there is none)
    prompt, texts   ``prompt`` comes before each of both
    conversations   lists of ``{"role": .., "content": ..}``, whole or behind a ``prompt`` that is one too; they go
                    through the tokenizer's chat template
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from nlgrpo.data.encoding import ids_to_score
from nlgrpo.data.prompt_dataset import brief, text_of
from nlgrpo.data.sources import Row, nearest, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "\n\nAssistant:"  # what a prompt of hh-rlhf ends in


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as the source has them."""

    prompt: str | list[Any]
    chosen: str | list[Any]
    rejected: str | list[Any]
    margin: float = 0.0


@dataclass(frozen=True)
class PairSet:
    """Tokenised pairs, in the order of the source, and what became of those that are not there or not whole."""

    chosen: list[list[int]]
    """Token ids of prompt and preferred answer."""
    rejected: list[list[int]]
    """And of prompt and other answer."""
    margins: list[float]
    """How much better the preferred answer is; 0 where the data do not say."""
    prompts: list[str]
    """What tells prompts apart."""
    lost: list[int]
    """Of each pair: 0 whole, 1 without the beginning of its prompt, 2 without that of an answer."""
    ties: int = 0
    """Pairs dropped because both answers are the same."""
    shared: int = 0
    """Pairs dropped because their prompt is also held out."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        text = f"{len(self):,} pair{'s' * (len(self) != 1)}, {self.tokens:,} tokens"
        notes = [
            (self.truncated, "too long, their beginning cut off"),
            (self.cut, "of these within an answer"),
            (self.ties, "ties dropped"),
            (self.shared, "dropped whose prompt is held out"),
        ]
        return "; ".join([text, *(f"{count:,} {what}" for count, what in notes if count)])

    @property
    def tokens(self) -> int:
        return sum(map(len, self.chosen)) + sum(map(len, self.rejected))

    @property
    def truncated(self) -> int:
        """Pairs with a text that was longer than the context, and lost its beginning."""
        return sum(part > 0 for part in self.lost)

    @property
    def cut(self) -> int:
        """Of these, pairs with an answer that alone is too long: no prompt is left, and its own beginning is lost."""
        return sum(part > 1 for part in self.lost)

    def split(self, count: int) -> tuple[PairSet, PairSet]:
        """The set without its last ``count`` pairs, at most half, and these."""
        cut = len(self) - min(count, len(self) // 2)
        held_out = replace(self._part(range(cut, len(self))), ties=0)
        return self._part(range(cut)), held_out

    def without(self, prompts: Collection[str]) -> PairSet:
        """The set without the pairs of these prompts, which are counted; an empty prompt is nobody's."""
        known = set(prompts) - {""}
        kept = [i for i, prompt in enumerate(self.prompts) if prompt not in known]
        return replace(self._part(kept), shared=len(self) - len(kept))

    def _part(self, rows: Sequence[int]) -> PairSet:
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
    """Read ``source`` (see `sources.py`) and tokenise its pairs; both texts of a pair keep ``max_length`` tokens.

    Texts are tokenised as the reward ``classifier`` does when it uses the model: closed by EOS, and without their
    beginning where they are too long. The prompt column need not be there. ``limit``: read so many rows only.

    Raises ValueError for a source that cannot be read or is empty, a column that is not there (with the nearest ones),
    a value that is no text or conversation, a conversation without a chat template, and if no pair is left.
    """
    if max_length < 2:
        raise ValueError(f"max_length = {max_length}: a text needs room for 2 tokens at least")
    rows = list(islice(read(source, split), limit))
    if not rows:
        raise ValueError(f"{source} is empty: it holds no pair.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for column in (chosen_column, rejected_column, margin_column):
        if column is not None and column not in names:
            raise ValueError(f"{source} has no column {column!r}. It has {', '.join(names)}.{nearest(column, names)}")
    columns = (prompt_column, chosen_column, rejected_column, margin_column)
    pairs = [pair_of(row, columns, f"{source}, example {number}") for number, row in enumerate(rows, 1)]
    encoder = _Encoder(tokenizer, max_length, source)
    return encoder.encode(pairs)


def pair_of(row: Row, columns: tuple[str, str, str, str | None], where: str) -> Pair:
    """The pair of a row. ``columns``: prompt, chosen, rejected, margin."""
    prompt_column, chosen_column, rejected_column, margin_column = columns
    prompt = row.get(prompt_column)
    chosen, rejected = (_answer(row.get(name), name, where) for name in (chosen_column, rejected_column))
    margin = 0.0 if margin_column is None else _margin(row.get(margin_column), margin_column, where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"{where}: of chosen and rejected one is a text and the other a conversation.")
    if prompt is None:
        prompt, chosen, rejected = _part(chosen, rejected)
        return Pair(prompt, chosen, rejected, margin)
    prompt = _answer(prompt, prompt_column, where)
    if isinstance(prompt, str) != isinstance(chosen, str):
        raise ValueError(
            f"{where}: the prompt is {brief(prompt)}, the answers are not alike. Give texts or conversations in all "
            "columns; where the conversations hold the prompt already, name another prompt_column."
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


def _part(chosen: str | list[Any], rejected: str | list[Any]) -> tuple[Any, Any, Any]:
    """Prompt and answers of two whole dialogues."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        at = chosen.rfind(ANSWER, 0, same)
        same = 0 if at < 0 else at + len(ANSWER)
    return chosen[:same], chosen[same:], rejected[same:]


class _Encoder:
    """Tokenises pairs and counts what it had to leave out or to cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, source: str) -> None:
        self.tokenizer, self.max_length, self.source = tokenizer, max_length, source
        self.tokenizer.truncation_side = "left"

    def encode(self, pairs: list[Pair]) -> PairSet:
        found = PairSet([], [], [], [], [])
        ties = 0
        for number, pair in enumerate(pairs, 1):
            where = f"{self.source}, example {number}"
            chosen, rejected = (self._side(pair.prompt, answer, where) for answer in (pair.chosen, pair.rejected))
            if pair.chosen == pair.rejected or chosen[0] == rejected[0]:
                ties += 1
                continue
            found.chosen.append(chosen[0])
            found.rejected.append(rejected[0])
            found.margins.append(pair.margin)
            found.prompts.append(pair.prompt if isinstance(pair.prompt, str) else json.dumps(pair.prompt))
            found.lost.append(max(chosen[1], rejected[1]))
        if not found.chosen:
            raise ValueError(f"{self.source}: in all of {len(pairs):,} pairs chosen and rejected are the same.")
        return replace(found, ties=ties)

    def _side(self, prompt: str | list[Any], answer: str | list[Any], where: str) -> tuple[list[int], int]:
        """Ids of prompt and answer, and what they lost; see `PairSet.lost`."""
        templated = not isinstance(prompt, str)
        text = self._conversation([*prompt, *answer], where) if templated else text_of(prompt) + text_of(answer)
        ids = ids_to_score(self.tokenizer, text, None, templated=templated)
        if not ids:
            raise ValueError(f"{where}: the text {text!r} has no token, and the tokenizer has no EOS to end it with.")
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
                "  Take the tokenizer of an instruct model, set its chat_template, or give the pairs as texts."
            )
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, ValueError) as error:
            raise ValueError(
                f"{where}: the chat template refuses the conversation {brief(messages)}: {error}"
            ) from error
