"""The kernels that come with the package: how alike two completions are, for diversity objectives.

Each is a class; `reward_functions.load` builds it once from the arguments in its spec. The instance is called as a
reward is, on the P*M completions of a step, and returns the rows of the P kernel matrices, (P*M, M) in float64. All are
positive semidefinite, with k(y, y) = 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nlgrpo.data.prompt_dataset import text_of
from nlgrpo.rewards.builtin import Length


class Ngrams:
    """Cosine of the counts of ``n`` successive tokens, or words with ``of="words"``: 1 for the same counts, 0 for none.

        k(y, y') = c(y) . c(y') / (|c(y)| |c(y')|)

    A completion of fewer than n tokens counts as one piece. Words are runs of letters, digits and apostrophes, in lower
    case. Raises ValueError for n < 1 and another ``of``.
    """

    def __init__(self, n: int = 2, of: Literal["tokens", "words"] = "tokens") -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"n must be a whole number from 1, got {n!r}")
        if of not in ("tokens", "words"):
            raise ValueError(f"of must be 'tokens' or 'words', got {of!r}")
        self.n, self.of = n, of

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], samples: int, **_: Any
    ) -> Tensor:
        rows = completion_ids if self.of == "tokens" else [_words(text_of(text)) for text in completions]
        return torch.cat([self._group(rows[i : i + samples]) for i in range(0, len(rows), samples)])

    def _group(self, rows: Sequence[Sequence[Hashable]]) -> Tensor:
        pieces = [Counter(tuple(row[i : i + self.n]) for i in range(max(1, len(row) - self.n + 1))) for row in rows]
        column = {piece: i for i, piece in enumerate(dict.fromkeys(piece for counts in pieces for piece in counts))}
        counts = torch.zeros(len(rows), len(column), dtype=torch.float64)
        for row, found in enumerate(pieces):
            counts[row, [column[piece] for piece in found]] = torch.tensor(list(found.values()), dtype=torch.float64)
        unit = counts / counts.norm(dim=1, keepdim=True)
        return unit @ unit.T


@dataclass(frozen=True)
class LengthKernel:
    """k(y, y') = exp(-((|y| - |y'|) / width)^2 / 2): how near two lengths in tokens are.

    Raises ValueError for a width that is no finite number above 0.
    """

    width: float

    def __post_init__(self) -> None:
        Length(0, self.width)  # checks a number of tokens

    def __call__(self, completion_ids: Sequence[Sequence[int]], samples: int, **_: Any) -> Tensor:
        lengths = torch.tensor([len(ids) for ids in completion_ids], dtype=torch.float64).view(-1, samples)
        apart = (lengths[:, :, None] - lengths[:, None, :]) / self.width
        return (-apart.square() / 2).exp().flatten(0, 1)


class Equal:
    """1 for two completions of the same text, else 0: Rao's entropy is then the chance that two samples differ, less 1.

    ``pattern``: compare what this regular expression finds last (its first group, if it has one), such as an answer; a
    completion without it is abstained from. Raises ValueError for a pattern that does not compile.
    """

    def __init__(self, pattern: str | None = None) -> None:
        try:
            self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error

    def __call__(self, completions: Sequence[Any], samples: int, **_: Any) -> list[list[float] | None]:
        keys = [self._key(text_of(completion)) for completion in completions]
        groups = [keys[i : i + samples] for i in range(0, len(keys), samples)]
        return [None if key is None else [float(key == other) for other in group] for group in groups for key in group]

    def _key(self, text: str) -> str | None:
        if self.pattern is None:
            return text
        found = list(self.pattern.finditer(text))
        return found[-1][1 if self.pattern.groups else 0] if found else None


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())


KERNELS: dict[str, type] = {"ngrams": Ngrams, "length": LengthKernel, "equal": Equal}
