"""Micro-batches of packed tokens: prompt and completion end to end, sequence after sequence, without padding."""

from __future__ import annotations

from collections.abc import Sequence
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
    size = {r: len(prompt_ids[r]) + max(len(completion_ids[r]) - 1, 0) for r in rows}
    bins: list[list[int]] = []
    space: list[int] = []
    for r in sorted(rows, key=lambda r: (-size[r], r)):
        fitting = next((i for i, left in enumerate(space) if left >= size[r]), None)
        if fitting is None:
            bins.append([])
            space.append(max_tokens)
            fitting = len(bins) - 1
        bins[fitting].append(r)
        space[fitting] -= size[r]
    return [_micro_batch(prompt_ids, completion_ids, sorted(b), device) for b in bins]


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
