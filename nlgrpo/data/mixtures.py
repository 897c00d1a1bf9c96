"""Mixtures: prompts of several sources, visited with weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from nlgrpo.data.prompt_dataset import Batch, Prompts, PromptSet
from nlgrpo.errors import UserError

BLOCK = 1000  # prompts; each block has the shares of the weights


@dataclass(frozen=True)
class MixedPrompts:
    """Prompts of several sources, evenly interleaved: a run visits them as often as their weights say.

    Of every 1,000 prompts, ``shares[s]`` come from source s. Each source keeps its own order and starts its next epoch
    when it is used up, so a small source with a large weight repeats more often. The order is a pure function of the
    cursor, like that of each source.
    """

    sources: Sequence[Prompts]
    shares: tuple[int, ...]

    @property
    def streamed(self) -> bool:
        return any(source.streamed for source in self.sources)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for source in self.sources for name in source.names))

    @property
    def longest(self) -> int:
        return max(source.longest for source in self.sources)

    @property
    def first(self) -> list[int] | None:
        return self.sources[0].first

    def conversations(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the prompts that are conversations, source by source."""
        for source in self.sources:
            yield from source.conversations()

    def __repr__(self) -> str:
        parts = (f"{share / BLOCK:.1%} {source}" for share, source in zip(self.shares, self.sources, strict=True))
        return f"MixedPrompts({', '.join(parts)})"

    def all(self) -> PromptSet:
        """Return the prompts of all sources but streams, source by source."""
        return merge([source.all() for source in self.sources])

    def find(self, columns: Iterable[str]) -> None:
        """Look for columns in the streams among the sources."""
        missing = set(columns) - set(self.names)
        for source in self.sources:
            source.find(missing)

    def take(self, cursor: int, count: int) -> Batch:
        """Return the prompts number ``cursor`` to ``cursor + count - 1`` of the run."""
        places = [self._place(number) for number in range(cursor, cursor + count)]
        taken = [self.sources[s].take(k, 1) for s, k in places]
        columns = {
            name: [part.columns[name][0] if name in part.columns else None for part in taken] for name in self.names
        }
        return Batch(
            list(range(cursor, cursor + count)),
            [part.ids[0] for part in taken],
            [part.prompts[0] for part in taken],
            columns,
        )

    def split(self, count: int) -> tuple[MixedPrompts, PromptSet]:
        """Split ``count`` prompts off by the weights, at most half of each source; return the rest and them."""
        if count == 0:
            return self, PromptSet([], [], [])
        counts = largest_remainders([count * share / BLOCK for share in self.shares], count)
        parts = [source.split(n) if n else (source, None) for source, n in zip(self.sources, counts, strict=True)]
        held_out = [held for rest, held in parts if held is not None and held is not rest]
        if not held_out:
            raise UserError(
                "each source of the mixture has a single prompt, so none can be held out: set data.evaluation, or "
                "evaluation.prompts = 0."
            )
        return MixedPrompts([rest for rest, _ in parts], self.shares), merge(held_out)

    def without(self, prompts: Iterable[Sequence[int]]) -> MixedPrompts:
        """Drop the prompts that have these token ids from every source."""
        known = list(prompts)
        return MixedPrompts([source.without(known) for source in self.sources], self.shares)

    def _place(self, number: int) -> tuple[int, int]:
        """Return the source of a prompt, and its number among the prompts of that source."""
        block, position = divmod(number, BLOCK)
        source, before = _slots(self.shares)[position]
        return source, block * self.shares[source] + before


def merge(sets: Sequence[PromptSet]) -> PromptSet:
    """Concatenate sets of prompts into one, with the order of a single source."""
    first = sets[0]
    return PromptSet(
        [ids for part in sets for ids in part.ids],
        [prompt for part in sets for prompt in part.prompts],
        [row for part in sets for row in part.rows],
        seed=first.seed,
        shuffle=first.shuffle,
        dropped=sum(part.dropped for part in sets),
        unmatched=sum(part.unmatched for part in sets),
        shared=sum(part.shared for part in sets),
        names=list(dict.fromkeys(name for part in sets for name in part.names)),
    )


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Convert weights, whose sum is arbitrary, to numbers of prompts per block of 1,000.

    Raises UserError for a weight that is not positive and finite, or too small for one prompt per block.
    """
    if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
        raise UserError(f"weights {', '.join(f'{w:g}' for w in weights)}: expected positive numbers")
    total = math.fsum(weights)
    shares = largest_remainders([BLOCK * w / total for w in weights], BLOCK)
    if 0 in shares:
        raise UserError(f"the weight {min(weights):g} is less than 1/{BLOCK} of their sum {total:g}; remove it")
    return tuple(shares)


def largest_remainders(wanted: Sequence[float], total: int) -> list[int]:
    """Round ``wanted``, whose sum is ``total``, to integers with this sum (method of the largest remainders)."""
    rounded = [math.floor(x) for x in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda i: (rounded[i] - wanted[i], i))
    for i in by_remainder[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded


@lru_cache(maxsize=4)
def _slots(shares: tuple[int, ...]) -> list[tuple[int, int]]:
    """Source of each position of a block, evenly interleaved, and how many of its prompts come before."""
    sources = np.repeat(np.arange(len(shares)), shares)
    fractions = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    ordered = sources[np.argsort(fractions, kind="stable")].tolist()
    seen = [0] * len(shares)
    slots = []
    for source in ordered:
        slots.append((source, seen[source]))
        seen[source] += 1
    return slots
