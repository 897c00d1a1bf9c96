"""Streams: prompts of a source that is too large for memory, read while a run visits them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

from nlgrpo.data.conversations import Prompt
from nlgrpo.data.prompt_dataset import Batch, PromptSet, Reader
from nlgrpo.data.sources import RESERVED, Row, stream
from nlgrpo.errors import UserError

CHUNK = 64  # rows that are tokenized together
SEARCHED = 100_000  # rows in which a column or a conversation is looked for


class _Read(NamedTuple):
    ids: list[int]
    prompt: Prompt
    row: Row


class PromptStream:
    """Prompts of a source, read and tokenized while a run visits them.

    ``shuffle_buffer``: number of rows among which the next one is drawn at random (the approximate shuffle of
    `datasets`); 0 reads in order. Each epoch reads the source again, in another order. The order is a pure function of
    the seed and the source, so a run resumes from its cursor: it reads the source up to there again.

    ``skip``: number of rows at the beginning that are left out, for evaluation. ``held_out``: token ids of prompts that
    are left out wherever they are.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        seed: int = 0,
        shuffle_buffer: int = 0,
        skip: int = 0,
        held_out: frozenset[tuple[int, ...]] = frozenset(),
    ) -> None:
        self.reader = reader
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.skip = skip
        self.held_out = held_out
        self._next: int = 0  # number of the prompt that `_prompts` gives next
        self._prompts: Iterator[_Read] = self._all_epochs()
        first = list(islice(self._read_rows(), CHUNK))
        self._maker = reader.maker(first)
        self._names: dict[str, None] = {}  # an ordered set
        self._learn_names(first)
        ids = reader.encode(reader.examples(first, self._maker))
        self.first = next((own for own in ids if len(own) <= reader.max_prompt_tokens), None)

    def __repr__(self) -> str:
        return f"PromptStream({self.reader.source})"

    @property
    def streamed(self) -> bool:
        return True

    @property
    def names(self) -> list[str]:
        """Columns for reward functions, of the rows that have been read so far."""
        return list(self._names)

    @property
    def longest(self) -> int:
        """Largest number of tokens that a prompt may have."""
        return self.reader.max_prompt_tokens

    def all(self) -> PromptSet:
        """Return an empty set: the prompts are not known before they are read."""
        return PromptSet([], [], [])

    def find(self, columns: Iterable[str]) -> None:
        """Read the source until ``columns`` have occurred, at most `SEARCHED` rows: not all rows need to have them."""
        missing = set(columns) - self._names.keys()
        if not missing:
            return
        for row in self._searched():
            self._learn_names([row])
            missing -= row.keys()
            if not missing:
                return

    def conversations(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the prompts of the first `SEARCHED` rows that are conversations."""
        for i, row in enumerate(self._searched(), 1):
            for example in self.reader.examples([row], self._maker, i):
                if not isinstance(example.prompt, str):
                    yield example.prompt

    def _searched(self) -> Iterator[Row]:
        return islice(self._read_rows(), SEARCHED)

    def _read_rows(self, **order: int) -> Iterator[Row]:
        """Read the source from its beginning. ``order``: as `sources.stream`."""
        options = self.reader.options
        return iter(stream(self.reader.source, options.split, options.separator, limit=options.limit, **order))

    def take(self, cursor: int, count: int) -> Batch:
        """Return the prompts number ``cursor`` to ``cursor + count - 1`` of the run.

        It reads on from the end of the last call, or from the beginning if that is behind ``cursor``.
        """
        if cursor < 0 or count < 0:
            raise UserError(f"take(cursor={cursor}, count={count}): both must be 0 or more.")
        if cursor < self._next:
            self._next = 0
            self._prompts = self._all_epochs()
        for _ in range(self._next, cursor):
            next(self._prompts)
        taken = [next(self._prompts) for _ in range(count)]
        self._next = cursor + count
        columns = {name: [part.row.get(name) for part in taken] for name in self.names}
        return Batch(
            list(range(cursor, cursor + count)), [part.ids for part in taken], [part.prompt for part in taken], columns
        )

    def split(self, count: int) -> tuple[PromptStream, PromptSet]:
        """Return a stream without the first ``count`` prompts of the source, and them."""
        if count == 0:
            return self, PromptSet([], [], [])
        taken = list[_Read]()
        rows = 0
        for read, after in self._epoch(self._rows(0, shuffled=False)):
            taken.append(read)
            rows = after
            if len(taken) == count:
                break
        if not taken:
            raise self._none_left()
        held_out = PromptSet(*map(list, zip(*taken, strict=True)), shuffle=False)
        return self._rest(skip=self.skip + rows), held_out

    def without(self, prompts: Iterable[Sequence[int]]) -> PromptStream:
        """Return a stream without the prompts that have these token ids."""
        return self._rest(held_out=self.held_out | {tuple(ids) for ids in prompts})

    def _rest(self, **changes: Any) -> PromptStream:
        """Return this stream with other attributes, from its beginning."""
        rest = copy(self)
        vars(rest).update(changes)
        rest._next = 0
        rest._prompts = rest._all_epochs()
        return rest

    def _learn_names(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._names.update(dict.fromkeys(name for name in row if name not in RESERVED))

    def _all_epochs(self) -> Iterator[_Read]:
        epoch = 0
        while True:
            found = False
            for read, _ in self._epoch(self._rows(epoch, shuffled=self.shuffle_buffer > 0)):
                found = True
                yield read
            if not found:
                raise self._none_left()
            epoch += 1

    def _rows(self, epoch: int, *, shuffled: bool) -> Iterator[Row]:
        buffer = self.shuffle_buffer if shuffled else 0
        return self._read_rows(skip=self.skip, buffer=buffer, seed=self.seed, epoch=epoch)

    def _epoch(self, rows: Iterator[Row]) -> Iterator[tuple[_Read, int]]:
        """Yield the prompts of rows, and the number of rows read up to each."""
        done = 0
        while chunk := list(islice(rows, CHUNK)):
            self._learn_names(chunk)
            examples = self.reader.examples(chunk, self._maker, first=self.skip + done + 1)
            numbers = {id(row): i for i, row in enumerate(chunk, done + 1)}
            for example, ids in zip(examples, self.reader.encode(examples), strict=True):
                if len(ids) <= self.reader.max_prompt_tokens and tuple(ids) not in self.held_out:
                    yield _Read(ids, example.prompt, example.row), numbers[id(example.row)]
            done += len(chunk)

    def _none_left(self) -> UserError:
        return UserError(
            f"{self.reader.source}: no prompt is left: all are too long (more than {self.reader.max_prompt_tokens} "
            "tokens), have no cut_after, or are held out for evaluation."
        )
