"""Preference pairs: read the rows of a source and tokenize their chosen and rejected texts.

Layouts, detected per row:

    texts           ``chosen`` and ``rejected`` are full dialogues, as in hh-rlhf; their common beginning up to its last
                    "\\n\\nAssistant:" is the prompt (without one, the prompt is empty)
    prompt, texts   ``prompt`` precedes both texts
    conversations   lists of ``{"role": .., "content": ..}``, complete or after a ``prompt`` that is a list too; the
                    tokenizer's chat template is applied

A prompt with which both answers begin is taken once: the answers are full dialogues then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from nlgrpo.data.conversations import ChatOptions, answered, brief, messages_in, messages_of, text_of
from nlgrpo.data.encoding import ids_to_score
from nlgrpo.data.sources import Row, read_rows
from nlgrpo.errors import UserError, did_you_mean, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "\n\nAssistant:"  # the end of a prompt of hh-rlhf
REPEATED = 3  # words of a prompt that no answer repeats at its beginning by chance
OPTIONS = ("tools", "chat_template_kwargs")  # columns that prompts of a policy have for the chat template


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as stored in the source."""

    prompt: str | list[Any]
    chosen: str | list[Any]
    rejected: str | list[Any]
    margin: float = 0.0
    repeated: bool = False  # its answers began with the prompt, which was taken off them


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
    repeated: int = 0
    """Number of pairs of the source whose answers were full dialogues besides a prompt."""
    unasked: int = 0
    """Number of pairs of the source without a prompt."""
    options: int = 0
    """Number of conversations of the source with tools or arguments for the chat template, which are not used."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        text = f"{len(self):,} pair{'s' * (len(self) != 1)}, {self.tokens:,} tokens"
        notes = [
            (self.truncated, "truncated at the beginning"),
            (self.cut, "of them within an answer"),
            (self.ties, "ties dropped"),
            (self.shared, "dropped with a held-out prompt"),
            (self.repeated, "of the source with the prompt in both answers, read once"),
            (self.unasked, "of the source without a prompt"),
            (self.options, "of the source with tools or chat_template_kwargs, which reward models do not read"),
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
        held_out = replace(self._subset(range(cut, len(self))), ties=0, repeated=0, unasked=0, options=0)
        return self._subset(range(cut)), held_out

    def without(self, prompts: Collection[str], pairs: Iterable[tuple[list[int], list[int]]] = ()) -> PairSet:
        """Drop the pairs with one of these prompts, or with these two texts, and count them in ``shared``.

        Pairs with an empty prompt are dropped only for their texts.
        """
        known = set(prompts) - {""}
        texts = {_texts(*pair) for pair in pairs}
        own = [_texts(*pair) for pair in zip(self.chosen, self.rejected, strict=True)]
        kept = [i for i, prompt in enumerate(self.prompts) if prompt not in known and own[i] not in texts]
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


def _texts(chosen: list[int], rejected: list[int]) -> frozenset[tuple[int, ...]]:
    return frozenset((tuple(chosen), tuple(rejected)))


def load_preferences(
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
    beginning. A source may have no column ``prompt``; another ``prompt_column`` must be there, and "" uses none.
    ``limit``: maximum number of rows to read.

    Raises UserError for an unreadable or empty source, a missing column (the message has the nearest names), a value
    that is neither a text nor a conversation, a conversation without a chat template, and if all pairs are ties.
    """
    if max_length < 2:
        raise UserError(f"max_length = {max_length}; expected 2 or more")
    rows = list(islice(read_rows(source, split), limit))
    if not rows:
        raise UserError(f"{source} is empty: it has no pair.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    _check_columns(source, names, prompt_column, (chosen_column, rejected_column, margin_column))
    columns = (prompt_column, chosen_column, rejected_column, margin_column)
    pairs = [pair_of(row, columns, f"{source}, example {number}") for number, row in enumerate(rows, 1)]
    if prompt_column in names:
        for number, (row, pair) in enumerate(zip(rows, pairs, strict=True), 1):
            if row.get(prompt_column) is None and not pair.prompt:
                raise UserError(
                    f"{source}, example {number}: column {prompt_column!r} is empty, and the answers share no prompt. "
                    "Give the prompt, remove the example, or set prompt_column = ''."
                )
    options = 0
    for row, pair in zip(rows, pairs, strict=True):
        if not isinstance(pair.chosen, str) and any(row.get(name) for name in OPTIONS):
            options += 1
    return replace(_encode(tokenizer, _once(pairs), max_length, source), options=options)


def _check_columns(source: str, names: list[str], prompt_column: str, others: Sequence[str | None]) -> None:
    """Raise UserError for a named column that does not exist, and for one that is almost the default prompt column."""
    needed = list(others) + ([] if prompt_column in ("prompt", "") else [prompt_column])
    for column in needed:
        if column is not None and column not in names:
            hint = did_you_mean(nearest(column, names))
            raise UserError(f"{source} has no column {column!r}{hint} It has {', '.join(names)}.")
    questions = [name for name in names if not name.endswith("id")]  # prompt_id is none
    if prompt_column == "prompt" and "prompt" not in names and (close := nearest("prompt", questions)):
        raise UserError(
            f"{source} has no column 'prompt', and the answers would have no question{did_you_mean(close)} It has "
            f"{', '.join(names)}. Name it with prompt_column, or set prompt_column = '' for answers that are full "
            "dialogues."
        )


def pair_of(row: Row, columns: tuple[str, str, str, str | None], where: str) -> Pair:
    """Return the pair of a row. ``columns``: names of the prompt, chosen, rejected and margin column.

    ``where`` names the row in messages. Raises UserError for values of the wrong type.
    """
    prompt_column, chosen_column, rejected_column, margin_column = columns
    prompt = row.get(prompt_column)
    chosen: Any = _answer(row.get(chosen_column), chosen_column, where)
    rejected: Any = _answer(row.get(rejected_column), rejected_column, where)
    margin = 0.0 if margin_column is None else _margin(row.get(margin_column), margin_column, where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(f"{where}: one of chosen and rejected is a text and the other a conversation.")
    if prompt is not None:
        prompt = _answer(prompt, prompt_column, where)
    given = isinstance(prompt, str) and not isinstance(chosen, str) and _is_asked(prompt, chosen, rejected)
    if prompt is None or given:
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
        return Pair(prompt, chosen, rejected, margin)
    if isinstance(prompt, str) != isinstance(chosen, str):
        raise UserError(
            f"{where}: the prompt is {brief(prompt)}, but the answers are of another type. Use texts in all columns, "
            "or conversations; if the conversations include the prompt already, set prompt_column = ''."
        )
    if not isinstance(prompt, str) and not _begin_with(prompt, chosen, rejected):
        for name, answer in ((chosen_column, chosen), (rejected_column, rejected)):
            if answer[0]["role"] not in ("assistant", "tool"):
                raise UserError(
                    f"{where}: column {name!r} begins with a message of the role {answer[0]['role']!r} other than the "
                    f"prompt's. Expected an answer of the assistant, or a conversation that begins with the prompt."
                )
    return Pair(prompt, chosen, rejected, margin)


def _is_asked(prompt: str, *answers: Any) -> bool:
    """Whether conversations include a prompt that is a text, as their first message of the user."""
    asked = [next((m["content"] for m in answer if m["role"] == "user"), None) for answer in answers]
    return all(content is not None and content.strip() == prompt.strip() for content in asked)


def _begin_with(prompt: str | list[Any], *answers: Any) -> bool:
    """Whether all answers begin with the prompt, apart from white space at its end; False for an empty prompt."""
    begun = prompt.rstrip() if isinstance(prompt, str) else prompt
    return len(begun) > 0 and all(answer[: len(begun)] == begun for answer in answers)


def _once(pairs: list[Pair]) -> list[Pair]:
    """Take the prompt off answers that begin with it, because they are full dialogues.

    Answers that are texts may repeat a short prompt, such as "Hello", by chance: it is then taken off only if all
    answers of the source begin with their prompts.
    """
    asked = [pair for pair in pairs if pair.prompt]
    always = all(_begin_with(pair.prompt, pair.chosen, pair.rejected) for pair in asked)
    found = []
    for pair in pairs:
        long = not isinstance(pair.prompt, str) or len(pair.prompt.split()) >= REPEATED
        if (always or long) and _begin_with(pair.prompt, pair.chosen, pair.rejected):
            begun = pair.prompt.rstrip() if isinstance(pair.prompt, str) else pair.prompt
            cut = len(begun)
            chosen = pair.chosen[cut:]
            rejected = pair.rejected[cut:]
            found.append(replace(pair, prompt=begun, chosen=chosen, rejected=rejected, repeated=True))
        else:
            found.append(pair)
    return found


def _answer(value: Any, column: str, where: str) -> str | list[Any]:
    """Return a text, a number as a text, or the messages of a conversation."""
    if isinstance(value, str):
        value = messages_in(value, f"{where}: column {column!r}")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple) and value and all(isinstance(message, Mapping) for message in value):
        return messages_of(value, f"{where}: column {column!r}")
    expected = "a text or a list of {'role': .., 'content': ..}"
    raise UserError(f"{where}: column {column!r} holds {brief(value)} instead of {expected}.")


def _margin(value: Any, column: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: column {column!r} holds {brief(value)} instead of a finite number.")
    return float(value)


def _split_prompt(chosen: str | list[Any], rejected: str | list[Any]) -> tuple[Any, Any, Any]:
    """Split two full dialogues into their common prompt and two answers."""
    same = _common(chosen, rejected)
    if isinstance(chosen, str):
        at = chosen.rfind(ANSWER, 0, same)
        same = 0 if at < 0 else at + len(ANSWER)
    return chosen[:same], chosen[same:], rejected[same:]


def _common(one: str | list[Any], other: str | list[Any]) -> int:
    """Return the length of the common beginning of two texts or conversations."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _compared(pair: Pair) -> str:
    """Return the prompt of a pair as a text by which pairs are compared; "" if it has none.

    Without a prompt, it is the common beginning of both answers up to its last line break, or without one up to its
    last space if it has three words.
    """
    if not isinstance(pair.prompt, str):
        return json.dumps(pair.prompt) if pair.prompt else ""
    if pair.prompt or not (isinstance(pair.chosen, str) and isinstance(pair.rejected, str)):
        return pair.prompt
    begun = pair.chosen[: _common(pair.chosen, pair.rejected)]
    lines, newline, _ = begun.rpartition("\n")
    if lines.strip():
        return lines + newline
    words, space, _ = begun.rpartition(" ")
    return words + space if len(words.split()) >= 3 else ""


def _encode(tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], max_length: int, source: str) -> PairSet:
    """Tokenise pairs, and count ties and truncated texts."""
    tokenizer.truncation_side = "left"
    found = PairSet([], [], [], [], [])
    ties = 0
    for number, pair in enumerate(pairs, 1):
        where = f"{source}, example {number}"
        chosen, lost_of_chosen = _side(tokenizer, pair.prompt, pair.chosen, max_length, where)
        rejected, lost_of_rejected = _side(tokenizer, pair.prompt, pair.rejected, max_length, where)
        if pair.chosen == pair.rejected or chosen == rejected:
            ties += 1
            continue
        found.chosen.append(chosen)
        found.rejected.append(rejected)
        found.margins.append(pair.margin)
        found.prompts.append(_compared(pair))
        found.lost.append(max(lost_of_chosen, lost_of_rejected))
    if not found.chosen:
        raise UserError(f"{source}: chosen and rejected are equal in all {len(pairs):,} pairs.")
    repeated = sum(pair.repeated for pair in pairs)
    unasked = sum(not pair.prompt for pair in pairs)
    return replace(found, ties=ties, repeated=repeated, unasked=unasked)


def _side(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, answer: Any, max_length: int, where: str
) -> tuple[list[int], int]:
    """Return the ids of prompt and answer, and their truncation (see `PairSet.lost`)."""
    templated = not isinstance(prompt, str)
    if templated:
        text = ChatOptions().text(tokenizer, answered(prompt, answer), where, whole=True)
    else:
        text = text_of(prompt) + text_of(answer)
    ids = ids_to_score(tokenizer, text, None, templated=templated)
    if not ids:
        raise UserError(f"{where}: the text {text!r} has no tokens, and the tokenizer has no EOS to add.")
    if len(ids) <= max_length:
        return ids, 0
    alone = ids_to_score(tokenizer, text_of(answer), None, templated=templated)
    ids = ids_to_score(tokenizer, text, max_length, templated=templated)
    return ids, 2 if len(alone) > max_length else 1
