"""Packed micro-batches: sequences concatenated without padding, a prefix that several share only once.

A policy's sequence is a prompt and its completion; a reward model's sequences come in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nlgrpo.kernels import Segments

Inserted = Sequence[Mapping[int, Sequence[int]]]
Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one rank: T tokens, S of which are predicted completion tokens."""

    tokens: Tensor  # (T,)
    segments: Segments  # prompts, each followed by its completions without their last tokens
    select: Tensor  # (S,) index in `tokens` of the token that predicts each target
    targets: Tensor  # (S,)
    row: Tensor  # (S,) the completion of the rollout that each target belongs to
    offset: Tensor  # (S,) its position in that completion
    completions: list[int]  # the n completions that have targets, in the order of the targets
    lengths: list[int]  # their numbers of targets

    @cached_property
    def present(self) -> Tensor:
        """``completions`` (n,) on the device."""
        return _on(self.row.device, _array(self.completions))[0]

    @cached_property
    def sequence(self) -> Tensor:
        """Number (S,) of the completion of each target, among the n that are present."""
        return _on(self.row.device, np.repeat(np.arange(len(self.lengths)), self.lengths))[0]

    def sets(self, width: int) -> Tensor:
        """Numbers, in their order, of the sets that are present: ``width`` consecutive completions each."""
        numbers = sorted({completion // width for completion in self.completions})
        return _on(self.row.device, _array(numbers))[0]

    def pick(self, values: Tensor) -> Tensor:
        """Select the values (S,) of the targets from ``values (R, L)``, indexed by completion and position."""
        return values[self.row, self.offset]


def pack(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Ids],
    rows: Sequence[int],
    max_tokens: int,
    device: torch.device | str = "cpu",
    *,
    group_tokens: int = 0,
    inserted: Inserted | None = None,
) -> list[MicroBatch]:
    """Pack the completions ``rows`` with their prompts into micro-batches of at most ``max_tokens`` tokens.

    ``prompt_ids`` has one prompt per completion. A micro-batch contains each of its prompts once. The completions of
    equal prompts share a micro-batch if they fit, or if they have at most ``group_tokens`` tokens; otherwise they are
    split, and each part repeats the prompt. Parts go into the first micro-batch with room, longest first. A part or a
    completion that does not fit gets its own.

    ``inserted``: for each completion, tokens that come before its token k and are no targets, {k: ids}.
    """
    sets = [[r] for r in sorted(rows)]
    return pack_sets(prompt_ids, completion_ids, sets, max_tokens, device, group_tokens=group_tokens, inserted=inserted)


def pack_sets(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Ids],
    sets: Sequence[Sequence[int]],
    max_tokens: int,
    device: torch.device | str = "cpu",
    *,
    group_tokens: int = 0,
    inserted: Inserted | None = None,
) -> list[MicroBatch]:
    """Like `pack`, but keep the completions of a set in one micro-batch, because their loss needs all of them.

    ``sets``: lists of rows. A set of more than ``max_tokens`` tokens gets its own micro-batch.
    """
    prompts = _number(prompt_ids)
    suffixes = dict[int, _Suffix]()
    by_prompts: dict[tuple[int, ...], list[int]] = {}
    for i, rows in enumerate(sets):
        for r in rows:
            suffixes[r] = _Suffix.of(completion_ids[r], inserted[r] if inserted else {})
        by_prompts.setdefault(tuple(sorted({prompts[r] for r in rows})), []).append(i)

    # A unit is a list of sets with the same prompts that stay together.
    units = list[list[int]]()
    unit_sizes = list[int]()
    for members in by_prompts.values():
        a_row_of_each_prompt = {prompts[r]: r for r in sets[members[0]]}
        shared = sum(len(prompt_ids[r]) for r in a_row_of_each_prompt.values())
        sizes = {i: sum(len(suffixes[r].tokens) for r in sets[i]) for i in members}
        for part in bins(sizes, max(max_tokens, group_tokens) - shared):
            units.append([r for i in part for r in sets[i]])
            unit_sizes.append(shared + sum(sizes[i] for i in part))

    batches = []
    for part in bins(dict(enumerate(unit_sizes)), max_tokens):
        rows_of_part = [r for unit in part for r in units[unit]]
        batches.append(_micro_batch(prompt_ids, suffixes, prompts, rows_of_part, device))
    return batches


class _Suffix(NamedTuple):
    """A completion, and the tokens that follow the prompt: all but the last sampled one, which predicts nothing."""

    sampled: np.ndarray
    tokens: np.ndarray
    before: np.ndarray  # for each sampled token, the index of the one before it; -1 is the prompt's last

    @classmethod
    def of(cls, completion: Ids, inserted: Mapping[int, Sequence[int]]) -> _Suffix:
        sampled = _array(completion)
        if not inserted:
            return cls(sampled, sampled[:-1], np.arange(-1, len(sampled) - 1))
        tokens = list[int]()
        before = list[int]()
        for k, token in enumerate(completion):
            tokens += inserted.get(k, ())
            before.append(len(tokens) - 1)
            tokens.append(token)
        return cls(sampled, _array(tokens[:-1]), _array(before))


def _array(ids: Ids) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def _number(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Number the sequences such that equal ones have the same number."""
    by_content: dict[tuple[int, ...], int] = {}
    by_identity: dict[int, int] = {}  # most prompts of a group are one list, which need not be hashed again
    for sequence in sequences:
        if id(sequence) not in by_identity:
            by_identity[id(sequence)] = by_content.setdefault(tuple(sequence), len(by_content))
    return [by_identity[id(sequence)] for sequence in sequences]


def bins(sizes: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Pack the rows (keys of ``sizes``) into bins of ``max_tokens`` by first fit, longest first.

    A row of more than ``max_tokens`` gets its own bin.
    """
    packed: list[list[int]] = []
    space: list[int] = []
    for row in sorted(sizes, key=lambda row: (-sizes[row], row)):
        fitting = next((i for i, left in enumerate(space) if left >= sizes[row]), None)
        if fitting is None:
            packed.append([])
            space.append(max_tokens)
            fitting = len(packed) - 1
        packed[fitting].append(row)
        space[fitting] -= sizes[row]
    return [sorted(part) for part in packed]


class _Tokens:
    """Tokens of a micro-batch, and their segments."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.count = 0
        self.lengths: list[int] = []
        self.prefixes: list[int | None] = []

    def add(self, prefix: np.ndarray, suffixes: Sequence[np.ndarray]) -> tuple[int, list[int]]:
        """Append sequences that share a prefix. Returns the indices of the first tokens of the prefix and suffixes."""
        start = self._append(prefix)
        starts = [self._append(suffix) for suffix in suffixes]
        lengths = [len(suffix) for suffix in suffixes if len(suffix)]
        if len(lengths) > 1 and len(prefix):
            segment = len(self.lengths)
            self.lengths += [len(prefix), *lengths]
            self.prefixes += [None, *[segment] * len(lengths)]
        else:
            lengths = [len(prefix) + sum(lengths)] if len(prefix) else lengths
            self.lengths += lengths
            self.prefixes += [None] * len(lengths)
        return start, starts

    def _append(self, tokens: np.ndarray) -> int:
        start = self.count
        self.parts.append(tokens)
        self.count += len(tokens)
        return start

    def tokens(self) -> np.ndarray:
        return _joined(self.parts)

    def segments(self) -> Segments:
        return Segments(self.lengths, self.prefixes)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([_array(()), *parts])


def _on(device: torch.device | str, *columns: np.ndarray) -> list[Tensor]:
    """Return the columns as tensors on ``device``, which are views of one, so that one copy moves them."""
    together = torch.from_numpy(_joined(columns)).to(device, non_blocking=True)
    return list(together.split([len(column) for column in columns]))


def _micro_batch(
    prompt_ids: Sequence[Sequence[int]],
    suffixes: Mapping[int, _Suffix],
    prompts: Sequence[int],
    rows: Sequence[int],
    device: torch.device | str,
) -> MicroBatch:
    """Pack ``rows``; ``prompts`` has the number of the prompt of each row (see `_number`)."""
    groups: dict[int, list[int]] = {}
    for r in rows:
        groups.setdefault(prompts[r], []).append(r)
    packed = _Tokens()
    select = list[np.ndarray]()
    order = list[int]()
    for group in groups.values():
        _, starts = packed.add(_array(prompt_ids[group[0]]), [suffixes[r].tokens for r in group])
        last = starts[0] - 1
        for r, start in zip(group, starts, strict=True):
            before = suffixes[r].before
            select.append(np.where(before < 0, last, start + before))
            order.append(r)
    targets = [suffixes[r].sampled for r in order]
    lengths = [len(ids) for ids in targets]
    row = np.repeat(_array(order), lengths)
    offset = _joined([np.arange(n) for n in lengths])
    columns = (packed.tokens(), _joined(select), _joined(targets), row, offset)
    tokens, selected, target_ids, rows_of_targets, offsets = _on(device, *columns)
    return MicroBatch(
        tokens,
        packed.segments(),
        selected,
        target_ids,
        rows_of_targets,
        offsets,
        completions=[r for r in order if len(suffixes[r].sampled)],
        lengths=[n for n in lengths if n],
    )


def empty_micro_batch(device: torch.device | str = "cpu") -> MicroBatch:
    """One token and no target: run by a rank that has no micro-batch left, because the others need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(nothing.new_zeros(1), Segments([1]), nothing, nothing, nothing, nothing, [], [])


# --- pairs of sequences, each scored at one token -----------------------------------------------------------------


@dataclass(frozen=True)
class PairBatch:
    """n packed pairs with T tokens: the common beginning of each pair, then the rest of the chosen and the rejected."""

    tokens: Tensor  # (T,)
    segments: Segments
    # (2n,) index in `tokens` of the token at which each sequence is scored: chosen, rejected, chosen, ..
    select: Tensor
    row: Tensor  # (n,) number of each pair


def pack_pairs(
    chosen: Sequence[Sequence[int]],
    rejected: Sequence[Sequence[int]],
    rows: Sequence[int],
    max_tokens: int,
    pad: int | None = None,
    device: torch.device | str = "cpu",
) -> list[PairBatch]:
    """Pack the pairs ``rows`` into micro-batches of at most ``max_tokens`` tokens; a longer pair gets its own.

    The tokens that both sequences of a pair begin with are packed once. A pair is never split, because its loss needs
    both scores. ``rows`` may repeat a pair: the last of one epoch can be the first of the next. ``pad``: see
    `scored_at`.
    """
    common = [_common_prefix(chosen[row], rejected[row]) for row in rows]
    sizes = {i: len(chosen[row]) + len(rejected[row]) - common[i] for i, row in enumerate(rows)}
    batches = []
    for part in bins(sizes, max_tokens):
        packed = _Tokens()
        select = list[int]()
        for i in part:
            pair = (chosen[rows[i]], rejected[rows[i]])
            shared = common[i]
            start, starts = packed.add(_array(pair[0][:shared]), [_array(ids[shared:]) for ids in pair])
            for ids, suffix in zip(pair, starts, strict=True):
                scored = scored_at(ids, pad)
                select.append(start + scored if scored < shared else suffix + scored - shared)
        tokens, *columns = _on(device, packed.tokens(), _array(select), _array([rows[i] for i in part]))
        batches.append(PairBatch(tokens, packed.segments(), *columns))
    return batches


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that both sequences begin with."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def empty_pair_batch(device: torch.device | str = "cpu") -> PairBatch:
    """One token and no pair: run by a rank that has no micro-batch left, because the others need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return PairBatch(nothing.new_zeros(1), Segments([1]), nothing, nothing)


def scored_at(ids: Sequence[int], pad: int | None) -> int:
    """Index of the token at which transformers' decoder classifiers read the score: the last one that is not ``pad``.

    The rule uses ids, not a mask, so a padding id inside the text counts as padding too. If all ids are padding, it is
    the first token; without a padding id (None) it is the last one.
    """
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] != pad), 0)
