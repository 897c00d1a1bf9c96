"""Micro-batches of packed tokens: sequence after sequence, end to end, without padding.

For the policy a sequence is a prompt and its completion; for a reward model two of them make a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Some of a rank's sequences, packed. S completion tokens are predicted among T tokens."""

    tokens: Tensor  # (T,)
    lengths: list[int]  # of the sequences, prompt and completion without its last token; their sum is T
    select: Tensor  # (S,) index in `tokens` of the token that predicts each target
    targets: Tensor  # (S,)
    row: Tensor  # (S,) the completion of the rollout that each target belongs to
    offset: Tensor  # (S,) its place in that completion

    def pick(self, values: Tensor) -> Tensor:
        """(S,) from what is stored by completion and place, ``(R, L)``."""
        return values[self.row, self.offset]


def pack(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[int],
    max_tokens: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Pack the completions numbered ``rows``, each behind its prompt, into micro-batches of at most ``max_tokens``.

    ``prompt_ids`` has a prompt for each completion. Sequences are taken longest first into the first micro-batch with
    room, which leaves little of it empty; one that is longer than ``max_tokens`` goes alone.
    """
    return pack_sets(prompt_ids, completion_ids, [[r] for r in sorted(rows)], max_tokens, device)


def pack_sets(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    sets: Sequence[Sequence[int]],
    max_tokens: int,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """`pack`, with the completions of a set never parted, because their loss needs them all; too long a set is alone.

    ``sets`` are rows, (B, n) as lists.
    """
    sizes = {i: sum(len(prompt_ids[r]) + max(len(completion_ids[r]) - 1, 0) for r in own) for i, own in enumerate(sets)}
    parts = [[r for i in part for r in sets[i]] for part in bins(sizes, max_tokens)]
    return [_micro_batch(prompt_ids, completion_ids, part, device) for part in parts]


def bins(sizes: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Rows (keys) put into as few bins of ``max_tokens`` as first fit finds, longest first; too long a one is alone."""
    found: list[list[int]] = []
    space: list[int] = []
    for row in sorted(sizes, key=lambda row: (-sizes[row], row)):
        fitting = next((i for i, left in enumerate(space) if left >= sizes[row]), None)
        if fitting is None:
            found.append([])
            space.append(max_tokens)
            fitting = len(found) - 1
        found[fitting].append(row)
        space[fitting] -= sizes[row]
    return [sorted(part) for part in found]


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
    """One token and nothing to predict: what a rank runs while others, with more of them, need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(torch.zeros(1, dtype=torch.int64, device=device), [1], nothing, nothing, nothing, nothing)


# --- pairs of sequences, each with one place where it is scored ---------------------------------------------------


@dataclass(frozen=True)
class PairBatch:
    """n pairs, packed: the preferred sequence of a pair, then the other one. T tokens."""

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
    """Pack the pairs numbered ``rows`` into micro-batches of at most ``max_tokens``; a longer pair goes alone.

    A pair is never parted, because its loss needs both scores. A row may come twice, as the last of one epoch and the
    first of the next. ``pad``: see `scored_at`.
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
    """One token and no pair: what a rank runs while others, with more of them, need its collectives."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return PairBatch(torch.zeros(1, dtype=torch.int64, device=device), [1], nothing, nothing)


def scored_at(ids: Sequence[int], pad: int | None) -> int:
    """Where transformers' sequence classifiers of decoders read the score: at the last token that is not ``pad``.

    Its rule looks at ids and not at a mask, so that a padding id in the text itself counts as padding too; of nothing
    but padding it takes the first token. Without a padding id (None) it is the last token.
    """
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] != pad), 0)
