"""Layout of packed sequences that share prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """A segment without a prefix, and the segments that continue it, one after another from token ``start``."""

    start: int
    length: int
    suffixes: list[int]  # lengths


class Segments:
    """Lengths of the segments of T packed tokens, and the segment that each of them continues.

    With ``prefixes[i] = j``, segment i continues segment j: it attends to the tokens of j before its own, and its
    positions follow those of j. With None, it is a sequence on its own; so are all segments by default. M completions
    of a prompt are 1 + M segments, so the prompt is computed once:

        Segments([3, 2, 4], [None, 0, 0]) has the positions 0 1 2 | 3 4 | 3 4 5 6

    Raises ValueError unless a segment directly follows its prefix or another segment with the same prefix; a prefix has
    no prefix itself.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None = None) -> None:
        self.lengths = list(lengths)
        self.prefixes = [None] * len(self.lengths) if prefixes is None else list(prefixes)
        if len(self.prefixes) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} segments have {len(self.prefixes)} prefixes: expected one each")
        for i, prefix in enumerate(self.prefixes):
            if prefix is not None and (i == 0 or prefix not in (i - 1, self.prefixes[i - 1]) or self.is_suffix(prefix)):
                raise ValueError(
                    f"segment {i} continues segment {prefix}: expected the segment before it, or its prefix"
                )

    @classmethod
    def of(cls, lengths: Segments | Sequence[int]) -> Segments:
        """Segments as they are, or the segments of sequences with these ``lengths`` and without shared prefixes."""
        return lengths if isinstance(lengths, Segments) else cls(lengths)

    @property
    def key_lengths(self) -> list[int]:
        """Number of keys of each segment: those of its prefix and its own."""
        return [offset + length for offset, length in zip(self.offsets, self.lengths, strict=True)]

    def is_suffix(self, segment: int) -> bool:
        return self.prefixes[segment] is not None

    @property
    def shared(self) -> bool:
        """Whether any segment has a prefix."""
        return any(prefix is not None for prefix in self.prefixes)

    @property
    def offsets(self) -> list[int]:
        """Position of the first token of each segment in its sequence: the length of its prefix, or 0."""
        return [0 if prefix is None else self.lengths[prefix] for prefix in self.prefixes]

    @cached_property
    def tensor(self) -> Tensor:
        """Length and prefix (-1: none) of each segment, (S, 2) int64, for the compiled op."""
        prefixes = [-1 if prefix is None else prefix for prefix in self.prefixes]
        return torch.tensor([self.lengths, prefixes], dtype=torch.int64).T.contiguous()

    def groups(self) -> list[Group]:
        groups: list[Group] = []
        start = 0
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            if prefix is None:
                groups.append(Group(start, length, []))
            else:
                groups[-1].suffixes.append(length)
            start += length
        return groups

    def positions(self, device: torch.device) -> Tensor:
        """Position (T,) of each token in its sequence."""
        spans = [torch.arange(first, first + n) for first, n in zip(self.offsets, self.lengths, strict=True)]
        return torch.cat(spans or [torch.arange(0)]).to(device, non_blocking=True)

    def key_index(self, device: torch.device) -> Tensor:
        """Indices (K,) of the tokens whose keys each segment reads: its prefix, then its own; segment by segment."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        spans = []
        for i, (length, prefix) in enumerate(zip(self.lengths, self.prefixes, strict=True)):
            if prefix is not None:
                spans.append(torch.arange(starts[prefix], starts[prefix] + self.lengths[prefix]))
            spans.append(torch.arange(starts[i], starts[i] + length))
        return torch.cat(spans or [torch.arange(0)]).to(device, non_blocking=True)
