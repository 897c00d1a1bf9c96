"""Packed micro-batches: sequences concatenated without padding, a prefix that several share only once.

A policy's sequence is a prompt and its completion; a reward model's sequences come in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nlgrpo.kernels import Segments

Inserted = Sequence[Mapping[int, Sequence[int]]]


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one rank: T tokens, S of which are predicted completion tokens."""

    tokens: Tensor  # (T,)
    segments: Segments  # prompts, each followed by its completions without their last tokens
    select: Tensor  # (S,) index in `tokens` of the token that predicts each target
    targets: Tensor  # (S,)
    row: Tensor  # (S,) the completion of the rollout that each target belongs to
    offset: Tensor  # (S,) its position in that completion

    def pick(self, values: Tensor) -> Tensor:
        """Select the values (S,) of the targets from ``values (R, L)``, indexed by completion and position."""
        return values[self.row, self.offset]


def pack(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
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
    completion_ids: Sequence[Sequence[int]],
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
    prompts, suffixes = _number(prompt_ids), dict[int, _Suffix]()
    for r in (r for rows in sets for r in rows):
        suffixes[r] = _Suffix.of(completion_ids[r], inserted[r] if inserted else {})
    by_prompts: dict[tuple[int, ...], list[int]] = {}
    for i, rows in enumerate(sets):
        by_prompts.setdefault(tuple(sorted({prompts[r] for r in rows})), []).append(i)
    units, unit_sizes = list[list[int]](), list[int]()
    for members in by_prompts.values():
        shared = sum(len(prompt_ids[r]) for r in {prompts[r]: r for r in sets[members[0]]}.values())
        sizes = {i: sum(len(suffixes[r].tokens) for r in sets[i]) for i in members}
        for part in bins(sizes, max(max_tokens, group_tokens) - shared):
            units.append([r for i in part for r in sets[i]])
            unit_sizes.append(shared + sum(sizes[i] for i in part))
    parts = [[r for unit in part for r in units[unit]] for part in bins(dict(enumerate(unit_sizes)), max_tokens)]
    return [_micro_batch(prompt_ids, completion_ids, suffixes, prompts, part, device) for part in parts]


class _Suffix(NamedTuple):
    """The tokens that follow a prompt, without the last sampled one, which predicts nothing."""

    tokens: Sequence[int]
    before: Sequence[int]  # for each sampled token, the index of the one before it; -1 is the prompt's last

    @classmethod
    def of(cls, completion: Sequence[int], inserted: Mapping[int, Sequence[int]]) -> _Suffix:
        if not inserted:
            return cls(completion[:-1], range(-1, len(completion) - 1))
        tokens, before = list[int](), list[int]()
        for k, token in enumerate(completion):
            tokens += inserted.get(k, ())
            before.append(len(tokens) - 1)
            tokens.append(token)
        return cls(tokens[:-1], before)


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
        self.tokens: list[int] = []
        self.lengths: list[int] = []
        self.prefixes: list[int | None] = []

    def add(self, prefix: Sequence[int], suffixes: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """Append sequences that share a prefix. Returns the indices of the first tokens of the prefix and suffixes."""
        start, starts = len(self.tokens), list[int]()
        self.tokens += prefix
        for suffix in suffixes:
            starts.append(len(self.tokens))
            self.tokens += suffix
        lengths = [len(suffix) for suffix in suffixes if suffix]
        if len(lengths) > 1 and prefix:
            segment = len(self.lengths)
            self.lengths += [len(prefix), *lengths]
            self.prefixes += [None, *[segment] * len(lengths)]
        else:
            lengths = lengths if not prefix else [len(prefix) + sum(lengths)]
            self.lengths += lengths
            self.prefixes += [None] * len(lengths)
        return start, starts

    def segments(self) -> Segments:
        return Segments(self.lengths, self.prefixes)


def _on(device: torch.device | str, *columns: Sequence[int]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.int64).to(device, non_blocking=True) for column in columns]


def _micro_batch(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
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
    select, targets, row, offset = list[int](), list[int](), list[int](), list[int]()
    for group in groups.values():
        _, starts = packed.add(prompt_ids[group[0]], [suffixes[r].tokens for r in group])
        last = starts[0] - 1
        for r, start in zip(group, starts, strict=True):
            completion = completion_ids[r]
            before = suffixes[r].before
            if isinstance(before, range):  # nothing was inserted
                select += [last, *range(start, start + len(completion) - 1)][: len(completion)]
            else:
                select += [last if i < 0 else start + i for i in before]
            targets += completion
            row += [r] * len(completion)
            offset += range(len(completion))
    tokens, *columns = _on(device, packed.tokens, select, targets, row, offset)
    return MicroBatch(tokens, packed.segments(), *columns)


def empty_micro_batch(device: torch.device | str = "cpu") -> MicroBatch:
    """One token and no target: run by a rank that has no micro-batch left, because the others need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(nothing.new_zeros(1), Segments([1]), nothing, nothing, nothing, nothing)


# --- pairs of sequences, each scored at one token -----------------------------------------------------------------


@dataclass(frozen=True)
class PairBatch:
    """n packed pairs with T tokens: the common beginning of each pair, then the rest of the chosen and the rejected."""

    tokens: Tensor  # (T,)
    segments: Segments
    select: (
        Tensor  # (2n,) index in `tokens` of the token at which each sequence is scored: chosen, rejected, chosen, ..
    )
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
        packed, select = _Tokens(), list[int]()
        for i in part:
            pair, shared = (chosen[rows[i]], rejected[rows[i]]), common[i]
            start, starts = packed.add(pair[0][:shared], [ids[shared:] for ids in pair])
            for ids, suffix in zip(pair, starts, strict=True):
                scored = scored_at(ids, pad)
                select.append(start + scored if scored < shared else suffix + scored - shared)
        tokens, *columns = _on(device, packed.tokens, select, [rows[i] for i in part])
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
