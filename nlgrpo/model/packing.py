"""Packed micro-batches: sequences concatenated without padding.

A policy's sequence is a prompt and its completion; a reward model's sequences come in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one rank: T tokens, S of which are predicted completion tokens."""

    tokens: Tensor  # (T,)
    lengths: list[int]  # of prompt + completion without its last token; the sum is T
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
) -> list[MicroBatch]:
    """Pack the completions ``rows`` with their prompts into micro-batches of at most ``max_tokens`` tokens.

    ``prompt_ids`` has one prompt per completion. Each sequence goes into the first micro-batch with room, longest
    first; one of more than ``max_tokens`` tokens gets its own.
    """
    return pack_sets(prompt_ids, completion_ids, [[r] for r in sorted(rows)], max_tokens, device)


def pack_sets(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    sets: Sequence[Sequence[int]],
    max_tokens: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Like `pack`, but keep the completions of a set in one micro-batch, because their loss needs all of them.

    ``sets``: lists of rows. A set of more than ``max_tokens`` tokens gets its own micro-batch.
    """
    sizes = {
        i: sum(len(prompt_ids[r]) + max(len(completion_ids[r]) - 1, 0) for r in rows) for i, rows in enumerate(sets)
    }
    parts = [[r for i in part for r in sets[i]] for part in bins(sizes, max_tokens)]
    return [_micro_batch(prompt_ids, completion_ids, part, device) for part in parts]


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


def _micro_batch(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[int],
    device: torch.device | str,
) -> MicroBatch:
    tokens: list[int] = []
    lengths: list[int] = []
    select: list[int] = []
    targets: list[int] = []
    row: list[int] = []
    offset: list[int] = []
    for r in rows:
        prompt, completion = prompt_ids[r], completion_ids[r]
        first = len(tokens) + len(prompt) - 1  # the prompt's last token predicts the completion's first
        select += range(first, first + len(completion))
        sequence = [*prompt, *completion[:-1]]  # the last token predicts nothing
        tokens += sequence
        targets += completion
        lengths.append(len(sequence))
        row += [r] * len(completion)
        offset += range(len(completion))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return MicroBatch(tensor(tokens), lengths, tensor(select), tensor(targets), tensor(row), tensor(offset))


def empty_micro_batch(device: torch.device | str = "cpu") -> MicroBatch:
    """One token and no target: run by a rank that has no micro-batch left, because the others need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(torch.zeros(1, dtype=torch.int64, device=device), [1], nothing, nothing, nothing, nothing)


# --- pairs of sequences, each scored at one token -----------------------------------------------------------------


@dataclass(frozen=True)
class PairBatch:
    """n packed pairs with T tokens: the chosen sequence of each pair, then the rejected one."""

    tokens: Tensor  # (T,)
    lengths: list[int]  # (2n), their sum is T
    select: Tensor  # (2n,) index in `tokens` of the token at which each sequence is scored
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

    A pair is never split, because its loss needs both scores. ``rows`` may repeat a pair: the last of one epoch can be
    the first of the next. ``pad``: see `scored_at`.
    """
    sizes = {place: len(chosen[row]) + len(rejected[row]) for place, row in enumerate(rows)}
    parts = [[rows[place] for place in part] for part in bins(sizes, max_tokens)]
    return [_pair_batch([ids for r in part for ids in (chosen[r], rejected[r])], part, pad, device) for part in parts]


def _pair_batch(
    sequences: list[Sequence[int]], rows: list[int], pad: int | None, device: torch.device | str
) -> PairBatch:
    tokens: list[int] = []
    select: list[int] = []
    for ids in sequences:
        select.append(len(tokens) + scored_at(ids, pad))
        tokens += ids
    placed = [torch.tensor(x, dtype=torch.int64).to(device, non_blocking=True) for x in (tokens, select, rows)]
    return PairBatch(placed[0], [len(ids) for ids in sequences], placed[1], placed[2])


def empty_pair_batch(device: torch.device | str = "cpu") -> PairBatch:
    """One token and no pair: run by a rank that has no micro-batch left, because the others need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return PairBatch(torch.zeros(1, dtype=torch.int64, device=device), [1], nothing, nothing)


def scored_at(ids: Sequence[int], pad: int | None) -> int:
    """Index of the token at which transformers' decoder classifiers read the score: the last one that is not ``pad``.

    The rule uses ids, not a mask, so a padding id inside the text counts as padding too. If all ids are padding, it is
    the first token; without a padding id (None) it is the last one.
    """
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] != pad), 0)
