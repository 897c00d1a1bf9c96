"""Built-in kernels: similarities of two completions, for diversity objectives.

Each is a class, which `specs.load_reward` builds once from the arguments in its spec. The instance is called like a
reward, with the P*M completions of a step, and returns the rows of the P kernel matrices, (P*M, M) in float64. All
kernels are positive semidefinite with k(y, y) = 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nlgrpo.data.conversations import text_of
from nlgrpo.errors import UserError
from nlgrpo.rewards.builtin import Length


class Ngrams:
    """Cosine similarity of n-gram counts c, of tokens or, with ``of="words"``, of words.

        k(y, y') = c(y) . c(y') / (|c(y)| |c(y')|)

    It is 1 for equal counts and 0 without a common n-gram. A completion of fewer than n tokens is one n-gram. Words are
    lower-case runs of letters, digits and apostrophes. Raises UserError for n < 1 and another ``of``.
    """

    def __init__(self, n: int = 2, of: Literal["tokens", "words"] = "tokens") -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise UserError(f"n must be an integer >= 1, got {n!r}")
        if of not in ("tokens", "words"):
            raise UserError(f"of must be 'tokens' or 'words', got {of!r}")
        self.n = n
        self.of = of

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], samples: int, **_: Any
    ) -> Tensor:
        rows = completion_ids if self.of == "tokens" else [_words(text_of(text)) for text in completions]
        return torch.cat([self._group(rows[i : i + samples]) for i in range(0, len(rows), samples)])

    def _group(self, rows: Sequence[Sequence[Hashable]]) -> Tensor:
        counters = []
        columns: dict[tuple[Hashable, ...], int] = {}
        for row in rows:
            starts = range(max(1, len(row) - self.n + 1))
            counter = Counter(tuple(row[i : i + self.n]) for i in starts)
            for ngram in counter:
                columns.setdefault(ngram, len(columns))
            counters.append(counter)
        counts = torch.zeros(len(rows), len(columns), dtype=torch.float64)
        for number, counter in enumerate(counters):
            occupied = [columns[ngram] for ngram in counter]
            counts[number, occupied] = torch.tensor(list(counter.values()), dtype=torch.float64)
        unit = counts / counts.norm(dim=1, keepdim=True)
        return unit @ unit.T


@dataclass(frozen=True)
class LengthKernel:
    """Gaussian kernel of the lengths in tokens.

        k(y, y') = exp(-((|y| - |y'|) / width)^2 / 2)

    Raises UserError for a ``width`` that is not a finite number > 0.
    """

    width: float

    def __post_init__(self) -> None:
        Length(0, self.width)  # validates the width

    def __call__(self, completion_ids: Sequence[Sequence[int]], samples: int, **_: Any) -> Tensor:
        lengths = torch.tensor([len(ids) for ids in completion_ids], dtype=torch.float64).view(-1, samples)
        apart = (lengths[:, :, None] - lengths[:, None, :]) / self.width
        return (-apart.square() / 2).exp().flatten(0, 1)


class Equal:
    """1 for completions with equal texts, else 0.

    Rao's entropy with this kernel is the probability that two samples differ, minus 1.

    ``pattern``: compare the last match of this regular expression instead (its first group, if it has one), such as an
    answer; abstains for completions without a match. Raises UserError for a pattern that does not compile.
    """

    in_main_thread = True  # only there can a pattern that takes for ever be interrupted

    def __init__(self, pattern: str | None = None) -> None:
        try:
            self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise UserError(f"{pattern!r} is not a regular expression: {error}") from error

    def __call__(self, completions: Sequence[Any], samples: int, **_: Any) -> list[list[float] | None]:
        keys = [self._key(text_of(completion)) for completion in completions]
        rows: list[list[float] | None] = []
        for number, key in enumerate(keys):
            if key is None:
                rows.append(None)
                continue
            begin = number - number % samples
            group = keys[begin : begin + samples]
            rows.append([float(key == other) for other in group])
        return rows

    def _key(self, text: str) -> str | None:
        if self.pattern is None:
            return text
        matches = list(self.pattern.finditer(text))
        return matches[-1][1 if self.pattern.groups else 0] if matches else None


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())
