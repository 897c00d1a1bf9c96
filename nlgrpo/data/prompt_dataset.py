"""Prompts: read the rows of a source and tokenize them, in a shuffled order that one integer resumes.

Rows stay in memory as Python values, because reward functions get them; prompts are tokenized once, at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nlgrpo.data.conversations import ChatOptions, Prompt, brief
from nlgrpo.data.encoding import Example, encode_examples
from nlgrpo.data.prompt_templates import PromptMaker
from nlgrpo.data.sources import RESERVED, Row, read_rows
from nlgrpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        ids = [self.ids[i] for i in places]
        prompts = [self.prompts[i] for i in places]
        columns = {name: [values[i] for i in places] for name, values in self.columns.items()}
        return Batch([self.index[i] for i in places], ids, prompts, columns)


class Prompts(Protocol):
    """What a training run needs of its prompts."""

    @property
    def streamed(self) -> bool:
        """Whether some of the prompts are read while the run visits them."""

    @property
    def names(self) -> list[str]:
        """Columns for reward functions, in the order of the source."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt, or an upper bound of it."""

    @property
    def first(self) -> list[int] | None:
        """Token ids of the first prompt of the source, for display; None without one."""

    def conversations(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the prompts that are conversations, which the chat template renders; of a stream, its first ones."""

    def all(self) -> PromptSet:
        """Return the prompts that are known: those of a stream are not."""

    def find(self, columns: Iterable[str]) -> None:
        """Look for columns that `names` does not have yet; only a stream has more rows to look into."""

    def take(self, cursor: int, count: int) -> Batch:
        """Return the prompts number ``cursor`` to ``cursor + count - 1`` of the run."""

    def split(self, count: int) -> tuple[Prompts, PromptSet]:
        """Split off about ``count`` prompts for evaluation, the same for every seed; return the rest and them."""

    def without(self, prompts: Iterable[Sequence[int]]) -> Prompts:
        """Return these prompts without those that have the token ids of ``prompts``."""


class PromptSet:
    """Tokenised prompts with their columns, and the order in which a run visits them.

    The order is a new permutation every epoch, a pure function of (seed, epoch): a run resumes from its cursor alone,
    and rank r of R reads ``take(cursor + r * P, P)`` of a step of R * P prompts without communication.

    ``dropped``: number of examples longer than the limit. ``unmatched``: number of examples without ``cut_after``.
    ``shared``: number of examples left out because their prompt is also held out. ``names``: columns for reward
    functions, by default those of ``rows``; a row that lacks one has None there.
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
        shared: int = 0,
        names: Sequence[str] | None = None,
    ) -> None:
        self.ids = ids
        self.prompts = prompts
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self.dropped = dropped
        self.unmatched = unmatched
        self.shared = shared
        self.names = [name for name in _names(rows) if name not in RESERVED] if names is None else list(names)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        lengths = [len(ids) for ids in self.ids]
        span = f"{len(self):,} prompts of {min(lengths)} to {max(lengths)} tokens"
        left_out = f"{self.dropped:,} dropped as too long, {self.unmatched:,} without cut_after"
        left_out += f", {self.shared:,} dropped with a held-out prompt" * (self.shared > 0)
        return f"PromptSet({span}; {left_out})"

    @property
    def streamed(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(map(len, self.ids), default=0)

    @property
    def first(self) -> list[int] | None:
        """Token ids of the first prompt of the source; None without one."""
        return self.ids[0] if self.ids else None

    def conversations(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the prompts that are conversations."""
        return (prompt for prompt in self.prompts if not isinstance(prompt, str))

    @property
    def left_out(self) -> dict[str, int]:
        """Why prompts of the source are not in the set: their numbers by reason; {} if all are in it."""
        reasons = {"dropped as too long": self.dropped, "without cut_after": self.unmatched}
        return {reason: count for reason, count in reasons.items() if count}

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Columns for reward functions, in the order of the source."""
        return {name: [row.get(name) for row in self.rows] for name in self.names}

    def all(self) -> PromptSet:
        """Return itself."""
        return self

    def find(self, columns: Iterable[str]) -> None:
        """Do nothing: all columns are known."""

    def take(self, cursor: int, count: int) -> Batch:
        """Return the prompts number ``cursor`` to ``cursor + count - 1`` of the run, which may span epochs."""
        if cursor < 0 or count < 0:
            raise UserError(f"take(cursor={cursor}, count={count}): both must be 0 or more.")
        index = list(range(cursor, cursor + count))
        at = [self._index(i) for i in index]
        rows = [self.rows[i] for i in at]
        columns = {name: [row.get(name) for row in rows] for name in self.names}
        return Batch(index, [list(self.ids[i]) for i in at], [self.prompts[i] for i in at], columns)

    def split(self, count: int) -> tuple[PromptSet, PromptSet]:
        """Split off the last ``count`` prompts of the source, at most half, for evaluation; return the rest and them.

        Every seed of a run evaluates them in the same order. A set of one prompt is returned as both.
        """
        count = min(count, len(self) // 2)
        if count == 0:
            return self, self
        cut = len(self) - count
        held_out = self.only(range(cut, len(self)))
        held_out.seed = 0
        held_out.dropped = 0  # they count for the rest
        held_out.unmatched = 0
        return self.only(range(cut)), held_out

    def without(self, prompts: Iterable[Sequence[int]]) -> PromptSet:
        """Drop the prompts that have these token ids, and count them in ``shared``.

        Raises UserError if none is left.
        """
        known = {tuple(ids) for ids in prompts}
        kept = [i for i, ids in enumerate(self.ids) if tuple(ids) not in known]
        if len(kept) == len(self):
            return self
        if not kept:
            raise UserError(
                f"all {len(self):,} training prompts are also held out for evaluation: prompts repeat, or two sources "
                "share them. Set other prompts in data.evaluation, hold out fewer with evaluation.prompts, or none "
                "with evaluation.prompts = 0."
            )
        rest = self.only(kept)
        rest.shared = self.shared + len(self) - len(kept)
        return rest

    def distinct(self, known: Iterable[Sequence[int]] = ()) -> PromptSet:
        """Return the set without duplicates and without prompts whose token ids are in ``known``."""
        seen = {tuple(ids) for ids in known}
        places = []
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
            shared=self.shared,
            names=self.names,
        )

    def _index(self, number: int) -> int:
        epoch, position = divmod(number, len(self))
        return int(order(len(self), self.seed, epoch)[position]) if self.shuffle else position


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


@dataclass(frozen=True)
class SourceOptions:
    """How the rows of a source become prompts."""

    split: str = "train"
    """Split of a data set or folder; a single file has only "train"."""
    prompt_column: str = "prompt"
    """Column of texts, or of conversations (lists of ``{"role": .., "content": ..}``) for the chat template. Without a
    column ``prompt`` the default is ``messages``, less the assistant's answer."""
    template: str = "{prompt}"
    """Text with columns in braces, ``"Question: {question}\\nAnswer:"``; ``{prompt}`` is the prompt column."""
    cut_after: str | None = None
    """Cut the prompt column after the last occurrence of this text; examples without it are dropped."""
    separator: str | None = None
    """Text that separates the documents of a text file; by default it has one prompt per line."""
    first_words: int | None = None
    """Keep only this number of words of the prompt column, with the white space between them."""
    limit: int | None = None
    """Maximum number of examples to read."""
    add_bos: bool | None = None
    """True: start with BOS; False: do not; None: as the tokenizer does."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    """Options of conversations."""


@dataclass(frozen=True)
class Reader:
    """Reads prompts from a source.

    Prompts of more than ``max_prompt_tokens`` tokens are dropped and counted. An EOS that the tokenizer appends is
    removed, because the model would start a new text after it. An empty prompt becomes the BOS alone.
    """

    source: str
    tokenizer: PreTrainedTokenizerBase
    options: SourceOptions
    max_prompt_tokens: int
    vocab: int | None = None  # of the model

    def __post_init__(self) -> None:
        limits = {"first_words": self.options.first_words, "limit": self.options.limit}
        for name, value in {"max_prompt_tokens": self.max_prompt_tokens, **limits}.items():
            if value is not None and value < 1:
                raise UserError(f"{name} = {value}: must be 1 or more.")

    def rows(self) -> Iterator[Row]:
        """Iterate over the rows of the source."""
        return islice(read_rows(self.source, self.options.split, self.options.separator), self.options.limit)

    def maker(self, rows: Sequence[Row]) -> PromptMaker:
        """Return what makes prompts of rows with the columns of ``rows``. Raises UserError for a missing column."""
        if not rows:
            raise UserError(f"{self.source} is empty: it has no example to take a prompt from.")
        o = self.options
        return PromptMaker(self.source, _names(rows), o.prompt_column, o.template, o.cut_after, o.first_words)

    def examples(self, rows: Sequence[Row], maker: PromptMaker, first: int = 1) -> list[Example]:
        """Make the prompts of rows, number ``first`` and following, without those that have no ``cut_after``."""
        made = ((f"{self.source}, example {i}", maker.make(row, i), row) for i, row in enumerate(rows, first))
        chat = self.options.chat
        return [
            Example(where, chat.conversation(prompt, where), row) for where, prompt, row in made if prompt is not None
        ]

    def encode(self, examples: Sequence[Example]) -> list[list[int]]:
        """Tokenize prompts; those that are too long included.

        Raises UserError for a token id that is outside the model's vocabulary.
        """
        encoded = encode_examples(self.tokenizer, examples, self.options.chat, self.options.add_bos)
        for ids, example in zip(encoded, examples, strict=True):
            if self.vocab is not None and max(ids) >= self.vocab:
                raise UserError(
                    f"{example.where}: the tokenizer returns the token id {max(ids)} "
                    f"({self.tokenizer.convert_ids_to_tokens(max(ids))!r}), outside the model's vocabulary of "
                    f"{self.vocab}, for the prompt {brief(example.prompt)}"
                )
        return encoded

    def no_match(self, count: int, maker: PromptMaker, row: Row) -> UserError:
        """Error for a source without ``cut_after``."""
        return UserError(
            f"{self.source}: none of {count:,} examples has cut_after = {self.options.cut_after!r} in column "
            f"{maker.column!r}.\n  The first example begins with {str(row.get(maker.column))[:80]!r}."
        )

    def all_too_long(self, lengths: Sequence[int]) -> UserError:
        """Error for a source whose prompts, of these numbers of tokens, are all too long."""
        return UserError(
            f"{self.source}: all {len(lengths):,} prompts are longer than max_prompt_tokens = "
            f"{self.max_prompt_tokens}; the shortest has {min(lengths):,} tokens, the longest {max(lengths):,}.\n"
            "  Raise the limit (prompt and completion share the model's context), or shorten the prompts with "
            "first_words."
        )


def load_prompt_set(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    seed: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> PromptSet:
    """Load the prompts of ``source`` and tokenize them. ``options``: the fields of `SourceOptions`.

    Raises UserError for an unreadable or empty source, a missing column, a conversation that the chat template cannot
    render, options of the template without a conversation, and if no prompt is left.
    """
    reader = Reader(source, tokenizer, SourceOptions(**options), max_prompt_tokens)
    found = read_all(reader, seed=seed, shuffle=shuffle)
    reader.options.chat.check_used(source, found.conversations())
    return found


def read_all(reader: Reader, rows: Iterable[Row] | None = None, *, seed: int = 0, shuffle: bool = True) -> PromptSet:
    """Return the prompts of all rows, by default of those of the reader's source. Raises UserError as `load`."""
    if seed < 0:
        raise UserError(f"seed = {seed}: must be 0 or more.")
    rows = list(reader.rows() if rows is None else rows)
    maker = reader.maker(rows)
    examples = reader.examples(rows, maker)
    if not examples:
        raise reader.no_match(len(rows), maker, rows[0])
    ids = reader.encode(examples)
    fits = [i for i, prompt in enumerate(ids) if len(prompt) <= reader.max_prompt_tokens]
    if not fits:
        raise reader.all_too_long(list(map(len, ids)))
    return PromptSet(
        [ids[i] for i in fits],
        [examples[i].prompt for i in fits],
        [examples[i].row for i in fits],
        seed=seed,
        shuffle=shuffle,
        dropped=len(ids) - len(fits),
        unmatched=len(rows) - len(examples),
    )


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))
