"""Layout of packed sequences that share prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import requires_grad


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
        self._tensors: dict[tuple[str, str], Tensor] = {}
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
        return self._kept("positions", device, lambda: spans(self.offsets, self.lengths))

    def ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each segment ends among the T tokens, and among the K keys of `key_index`: 0, then S ends, int32."""
        queries = self._kept("ends", device, lambda: torch.tensor(_starts(self.lengths), dtype=torch.int32))
        keys = self._kept("key_ends", device, lambda: torch.tensor(_starts(self.key_lengths), dtype=torch.int32))
        return queries, keys

    def key_index(self, device: torch.device) -> Tensor:
        """Indices (K,) of the tokens whose keys each segment reads: its prefix, then its own; segment by segment."""
        return self._kept("key_index", device, self._key_index)

    def _key_index(self) -> Tensor:
        starts = _starts(self.lengths)
        firsts = list[int]()
        lengths = list[int]()
        for i, (length, prefix) in enumerate(zip(self.lengths, self.prefixes, strict=True)):
            if prefix is not None:
                firsts.append(starts[prefix])
                lengths.append(self.lengths[prefix])
            firsts.append(starts[i])
            lengths.append(length)
        return spans(firsts, lengths)

    def key_sources(self, device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Where the keys of each token are among the K of `key_index`, to add their gradients.

        Returns the index (T,) of each token in the keys of its own segment; and, for each number m of segments that
        share a prefix, the n tokens of such prefixes, and the indices (n, 1 + m) of all their keys.
        """
        own = self._kept("own_keys", device, self._own_keys)
        counts = sorted({len(group.suffixes) for group in self.groups() if group.length and group.suffixes})
        copied = list[tuple[Tensor, Tensor]]()
        for m in counts:
            table = self._kept(f"copies of {m}", device, partial(self._copies, m))
            copied.append((table[:, 0], table[:, 1:]))
        return own, copied

    def _own_keys(self) -> Tensor:
        starts = _starts(self.key_lengths)
        firsts = [start + offset for start, offset in zip(starts, self.offsets, strict=False)]
        return spans(firsts, self.lengths)

    def _copies(self, m: int) -> Tensor:
        """Tokens of the prefixes that m segments share, and the indices of their keys, (n, 2 + m)."""
        starts = _starts(self.key_lengths)
        parts = list[Tensor]()
        segment = 0
        for group in self.groups():
            if len(group.suffixes) == m:
                firsts = [group.start, *starts[segment : segment + 1 + m]]
                parts.append(torch.arange(group.length)[:, None] + torch.tensor(firsts))
            segment += 1 + len(group.suffixes)
        return torch.cat(parts)

    def _kept(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that is made once, on the CPU, and copied once: all layers and passes read the same."""
        key = (name, str(device))
        if key not in self._tensors:
            with torch.inference_mode(False):  # a pass that autograd records may read it next
                self._tensors[key] = make().to(device, non_blocking=True)
        return self._tensors[key]


def spans(firsts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Concatenate the ranges first, first + 1, .. of ``lengths``, on the CPU."""
    total = sum(lengths)  # of numbers, because fake tensors have no values
    counts = torch.tensor(lengths, dtype=torch.int64)
    shifts = torch.tensor(firsts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(total) + shifts.repeat_interleave(counts, output_size=total)


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each of the parts of ``lengths`` begins, and where the last one ends."""
    return list(itertools.accumulate(lengths, initial=0))


def keys_of_segments(x: Tensor, segments: Segments) -> Tensor:
    """Rows (K, ..) that the segments attend to, segment by segment, from ``x (T, ..)``: of its prefix, then its own.

    Equal to ``x[segments.key_index(x.device)]``. The gradient of a token of a prefix is the sum over its copies, added
    in one order: no atomic additions, and no sort as in the gradient of indexing. Differentiable once.
    """
    if requires_grad(x):
        copied: Tensor = _Copied.apply(x, segments)
        return copied
    return x.index_select(0, segments.key_index(x.device))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return x.index_select(0, segments.key_index(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, copied = ctx.segments.key_sources(grad.device)
        total = grad.index_select(0, own)
        for tokens, copies in copied:
            of_tokens = grad.index_select(0, copies.flatten()).unflatten(0, copies.shape)
            total.index_copy_(0, tokens, of_tokens.sum(1))
        return total, None
