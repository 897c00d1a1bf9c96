"""Prompts: read the rows of a source and tokenize them, in a shuffled order that one integer resumes.

Rows stay in memory as Python values, because reward functions get them; prompts are tokenized once, at the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from nlgrpo.data.sources import Row, nearest, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]  # a text, or a conversation

# Columns that reward functions do not get: names of their other arguments, and names that TRL withholds.
RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})


@dataclass(frozen=True)
class Batch:
    """Prompts of one step on one rank. All lists have length P."""

    index: list[int]
    """Number of each prompt since the start of the run (cursor + position), the key of the sampler's noise."""
    ids: list[list[int]]
    """Token ids."""
    prompts: list[Prompt]
    """Prompts for reward functions: texts or lists of messages."""
    columns: dict[str, list[Any]]
    """Other columns of the data, for reward functions."""

    def only(self, places: Sequence[int]) -> Batch:
        """Return the prompts at these indices, which may repeat."""
        ids, prompts = [self.ids[i] for i in places], [self.prompts[i] for i in places]
        columns = {name: [values[i] for i in places] for name, values in self.columns.items()}
        return Batch([self.index[i] for i in places], ids, prompts, columns)


class PromptSet:
    """Tokenised prompts with their columns, and the order in which a run visits them.

    The order is a new permutation every epoch, a pure function of (seed, epoch): a run resumes from its cursor alone,
    and rank r of R reads ``take(cursor + r * P, P)`` of a step of R * P prompts without communication.

    ``dropped``: number of examples longer than the limit. ``unmatched``: number of examples without ``cut_after``.
    """

    def __init__(
        self,
        ids: Sequence[list[int]],
        prompts: Sequence[Prompt],
        rows: Sequence[Row],
        *,
        seed: int = 0,
        shuffle: bool = True,
        dropped: int = 0,
        unmatched: int = 0,
    ) -> None:
        self.ids, self.prompts, self.rows = ids, prompts, rows
        self.seed, self.shuffle = seed, shuffle
        self.dropped, self.unmatched = dropped, unmatched
        self.names = [name for name in _names(rows) if name not in RESERVED]

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        lengths = [len(ids) for ids in self.ids]
        span = f"{len(self):,} prompts of {min(lengths)} to {max(lengths)} tokens"
        return f"PromptSet({span}; {self.dropped:,} dropped as too long, {self.unmatched:,} without cut_after)"

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Columns for reward functions, in the order of the source."""
        return {name: [row.get(name) for row in self.rows] for name in self.names}

    def take(self, cursor: int, count: int) -> Batch:
        """Return the prompts number ``cursor`` to ``cursor + count - 1`` of the run, which may span epochs."""
        if cursor < 0 or count < 0:
            raise ValueError(f"take(cursor={cursor}, count={count}): both must be 0 or more.")
        index = list(range(cursor, cursor + count))
        at = [self._index(i) for i in index]
        rows = [self.rows[i] for i in at]
        columns = {name: [row.get(name) for row in rows] for name in self.names}
        return Batch(index, [list(self.ids[i]) for i in at], [self.prompts[i] for i in at], columns)

    def split(self, count: int) -> tuple[PromptSet, PromptSet]:
        """Split off the last ``count`` prompts of the source, at most half; return the rest and them.

        A set of one prompt is returned as both.
        """
        count = min(count, len(self) // 2)
        if count == 0:
            return self, self
        cut = len(self) - count
        return self.only(range(cut)), self.only(range(cut, len(self)))

    def distinct(self, known: Iterable[Sequence[int]] = ()) -> PromptSet:
        """Return the set without duplicates and without prompts whose token ids are in ``known``."""
        seen, places = {tuple(ids) for ids in known}, []
        for i, ids in enumerate(self.ids):
            if tuple(ids) not in seen:
                seen.add(tuple(ids))
                places.append(i)
        return self.only(places)

    def only(self, places: Sequence[int]) -> PromptSet:
        """Return the set of the prompts at these indices of the source."""
        return PromptSet(
            [self.ids[i] for i in places],
            [self.prompts[i] for i in places],
            [self.rows[i] for i in places],
            seed=self.seed,
            shuffle=self.shuffle,
            dropped=self.dropped,
            unmatched=self.unmatched,
        )

    def _index(self, number: int) -> int:
        epoch, position = divmod(number, len(self))
        return int(order(len(self), self.seed, epoch)[position]) if self.shuffle else position


def plain_text(prompt: Prompt) -> str:
    """Return a prompt for display: the text, or the last message of a conversation."""
    return prompt if isinstance(prompt, str) else text_of(prompt[-1:])


def text_of(message: str | Iterable[dict[str, Any]]) -> str:
    """Return a prompt or completion as text; the messages of a conversation are joined by line breaks."""
    if isinstance(message, str):
        return message
    return "\n".join(_content(part["content"]) for part in message)


def _content(content: object) -> str:
    """Return the content of a message as text: the string, or its text parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return "" if content is None else str(content)


@lru_cache(maxsize=4)
def order(length: int, seed: int, epoch: int) -> np.ndarray:
    """Permutation of ``range(length)`` for an epoch.

    It sorts raw PCG64 words: a run may be resumed with another NumPy version, and NumPy keeps their stream the same
    between versions, unlike ``Generator.permutation``.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(words, kind="stable")


def visits(length: int, cursor: int, count: int, seed: int) -> list[int]:
    """Indices of the examples, of ``length``, that a run visits as number ``cursor`` to ``cursor + count - 1``."""
    return [
        int(order(length, seed, epoch)[i]) for epoch, i in (divmod(n, length) for n in range(cursor, cursor + count))
    ]


def load(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    split: str = "train",
    prompt_column: str = "prompt",
    template: str = "{prompt}",
    cut_after: str | None = None,
    separator: str | None = None,
    first_words: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    limit: int | None = None,
    add_bos: bool | None = None,
) -> PromptSet:
    """Load the prompts of ``source`` and tokenise them.

    ``split``          split of a data set or folder; ignored for a single file.
    ``prompt_column``  column of texts, or of conversations (lists of ``{"role": .., "content": ..}``) for the chat
                       template. Without a column ``prompt`` the default is ``messages``, less the assistant's answer.
    ``template``       text with columns in braces, ``"Question: {question}\\nAnswer:"``; ``{prompt}`` is the prompt
                       column.
    ``cut_after``      cut the prompt column after the last occurrence of this text; examples without it are dropped.
    ``separator``      text that separates the documents of a text file; by default it has one prompt per line.
    ``first_words``    keep only this number of words of the prompt column, with the white space between them.
    ``limit``          maximum number of examples to read.
    ``add_bos``        True: start with BOS; False: do not; None: as the tokenizer does.

    Prompts of more than ``max_prompt_tokens`` tokens are dropped and counted. An EOS that the tokenizer appends is
    removed, because the model would start a new text after it. An empty prompt becomes the BOS alone.

    Raises ValueError for an unreadable or empty source, a missing column, a conversation without a chat template, and
    if no prompt is left.
    """
    _check_positive(max_prompt_tokens=max_prompt_tokens, first_words=first_words, limit=limit)
    if seed < 0:
        raise ValueError(f"seed = {seed}: must be 0 or more.")
    rows = list(islice(read(source, split, separator), limit))
    if not rows:
        raise ValueError(f"{source} is empty: it has no example to take a prompt from.")
    maker = _PromptMaker(source, _names(rows), prompt_column, template, cut_after, first_words)
    examples = [_Example(f"{source}, example {i}", maker.make(row, i), row) for i, row in enumerate(rows, 1)]
    kept = [example for example in examples if example.prompt is not None]
    if not kept:
        raise ValueError(
            f"{source}: none of {len(rows):,} examples has cut_after = {cut_after!r} in column {maker.column!r}.\n"
            f"  The first example begins with {str(rows[0].get(maker.column))[:80]!r}."
        )
    ids = _encode(tokenizer, kept, add_bos)
    fits = [i for i, prompt in enumerate(ids) if len(prompt) <= max_prompt_tokens]
    if not fits:
        raise ValueError(f"{source}: {_all_too_long(ids, max_prompt_tokens)}")
    return PromptSet(
        [ids[i] for i in fits],
        [kept[i].prompt for i in fits],
        [kept[i].row for i in fits],
        seed=seed,
        shuffle=shuffle,
        dropped=len(ids) - len(fits),
        unmatched=len(rows) - len(kept),
    )


def _all_too_long(ids: list[list[int]], limit: int) -> str:
    lengths = [len(prompt) for prompt in ids]
    return (
        f"all {len(ids):,} prompts are longer than max_prompt_tokens = {limit}; "
        f"the shortest has {min(lengths):,} tokens, the longest {max(lengths):,}.\n"
        "  Raise the limit (prompt and completion share the model's context), or shorten the prompts with first_words."
    )


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value}: must be 1 or more.")


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


# --- Prompts: from a row to a text or a conversation ------------------------------------------------------------------


class _Example(NamedTuple):
    where: str  # for messages
    prompt: Any  # a Prompt, or None if cut_after is not in it
    row: Row


class _PromptMaker:
    """Builds the prompt of a row from its columns, which it checks for existence."""

    def __init__(
        self,
        source: str,
        names: list[str],
        prompt_column: str,
        template: str,
        cut_after: str | None,
        first_words: int | None,
    ) -> None:
        self.source, self.cut_after = source, cut_after
        self.first_words = re.compile(rf"\s*((?:\S+\s+){{0,{first_words - 1}}}\S+)") if first_words else None
        has_messages = prompt_column == "prompt" and "prompt" not in names and "messages" in names
        self.column = "messages" if has_messages else prompt_column
        self.pieces = _parse(template, self.column)
        self.bare = template == "{prompt}"
        shortens = cut_after is not None or first_words is not None
        if shortens and all(field != self.column for _, field in self.pieces):
            raise ValueError(
                f"cut_after and first_words shorten the prompt column, which the template {template!r} does not use.\n"
                "  Write {prompt} into the template and name the column with prompt_column."
            )
        for _, field in self.pieces:
            if field is not None and field not in names:
                raise ValueError(f"{source} has no column {field!r}. It has {', '.join(names)}.{nearest(field, names)}")

    def make(self, row: Row, number: int) -> Prompt | None:
        """Return the prompt of example ``number`` (from 1), or None if ``cut_after`` is not in it."""
        where = f"{self.source}, example {number}"
        value = row.get(self.column)
        if self.bare and isinstance(value, list | tuple):
            return self._conversation(value, where)
        texts = []
        for literal, field in self.pieces:
            text = "" if field is None else self._text(row, field, where)
            if text is None:
                return None
            texts += [literal, text]
        return "".join(texts)

    def _text(self, row: Row, field: str, where: str) -> str | None:
        value = row.get(field)
        if not isinstance(value, str | int | float):
            raise ValueError(f"{where}: column {field!r} holds {brief(value)} instead of a text.")
        return self._shorten(str(value)) if field == self.column else str(value)

    def _shorten(self, text: str) -> str | None:
        if self.cut_after is not None:
            before, marker, _ = text.rpartition(self.cut_after)
            if not marker:
                return None
            text = before + marker
        match = self.first_words.match(text) if self.first_words else None
        return match[1] if match else text

    def _conversation(self, value: Sequence[Any], where: str) -> list[dict[str, Any]]:
        if self.cut_after is not None or self.first_words is not None:
            raise ValueError(
                f"{where}: column {self.column!r} is a conversation, which cut_after and first_words cannot shorten."
            )
        messages = list(value)
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
            expected = "a list of {'role': .., 'content': ..}"
            raise ValueError(f"{where}: column {self.column!r} holds {brief(value)} instead of {expected}.")
        while self.column == "messages" and messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the recorded answer, which the model has to give
        if not messages:
            raise ValueError(f"{where}: the conversation in column {self.column!r} has no message to answer.")
        return messages


def brief(value: object) -> str:
    """Return the type and the beginning of a value, for messages."""
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


def _parse(template: str, column: str) -> list[tuple[str, str | None]]:
    """Parse ``"Q: {question}!"`` into [("Q: ", "question"), ("!", None)]; ``{prompt}`` is the prompt column."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}. Write a literal brace twice.") from error
    for _, field, spec, conversion in parsed:
        if field == "" or spec or conversion:
            raise ValueError(
                f"template {template!r}: braces may contain only the name of a column, as in {{question}}."
            )
    if all(field is None for _, field, _, _ in parsed):
        raise ValueError(
            f"template {template!r} has no column, so all prompts would be equal; write {{prompt}} into it."
        )
    return [(literal, column if field == "prompt" else field) for literal, field, _, _ in parsed]


# --- Tokens: from a prompt to ids -------------------------------------------------------------------------------------


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Tokenize prompts like `load`: with the tokens that the tokenizer adds before a text, without EOS after it.

    Raises ValueError for an empty text if the tokenizer has no BOS token, and for a conversation if it has no chat
    template.
    """
    return _encode(tokenizer, [_Example(f"prompt {i}", prompt, {}) for i, prompt in enumerate(prompts, 1)], None)


def _encode(tokenizer: PreTrainedTokenizerBase, examples: list[_Example], add_bos: bool | None) -> list[list[int]]:
    if add_bos and tokenizer.bos_token_id is None:
        raise ValueError("add_bos = True, but the tokenizer has no BOS token; omit add_bos.")
    for where, prompt, _ in examples:
        if broken := _lone_surrogate(prompt):
            raise ValueError(
                f"{where}: {broken!r} in {brief(prompt)} is half a character (a lone surrogate); remove it."
            )
    texts = [example.prompt for example in examples if isinstance(example.prompt, str)]
    # verbose=False: no warning about long texts, which the caller drops.
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
    end = tokenizer.eos_token
    strip = _appends_eos(tokenizer, next((text for text in texts if text and not (end and text.endswith(end))), "a"))
    nothing = list(tokenizer("", verbose=False)["input_ids"])
    out = []
    for where, prompt, _ in examples:
        if isinstance(prompt, str):
            ids = list(next(encoded))
            if ids == nothing and prompt.strip():
                raise ValueError(f"{where}: the tokenizer has no token for {brief(prompt)}.")
            ids = ids[:-1] if strip else ids
        else:
            ids = _encode_chat(tokenizer, prompt, where)
        out.append(_with_bos(ids, tokenizer.bos_token_id, add_bos, where))
    return out


def _lone_surrogate(prompt: Prompt) -> str | None:
    r"""Return the first half character, which JSON can hold ("\ud83d") and no encoding can write; None without one."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _appends_eos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the tokenizer appends EOS to a text. Compares with and without: BOS and EOS may be the same token."""
    eos = [tokenizer.eos_token_id]
    alone = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokenizer(text, verbose=False)["input_ids"][-1:] == eos != alone[-1:]


def _with_bos(ids: list[int], bos: int | None, add_bos: bool | None, where: str) -> list[int]:
    if add_bos and ids[:1] != [bos]:
        ids = [cast(int, bos), *ids]
    elif add_bos is False and ids[:1] == [bos]:
        ids = ids[1:]
    if ids:
        return ids
    if bos is None:
        raise ValueError(f"{where} is empty, and the tokenizer has no BOS token to start from; remove the example.")
    return [bos]


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str) -> list[int]:
    """Apply the model's chat template. As in TRL, a conversation that ends with an assistant message is continued."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a conversation, but the tokenizer has no chat template.\n"
            "  Use the tokenizer of an instruct model, set its chat_template, or give the prompts as texts."
        )
    continued = messages[-1]["role"] == "assistant"
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(f"{where}: the chat template rejects the conversation {brief(messages)}: {error}") from error
    return list(cast(list[int], ids))
