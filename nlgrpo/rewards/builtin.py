"""Built-in rewards that need no library: length, word list, regular expression, GSM8K answer.

Each is a class, which `specs.load_reward` builds once from the arguments in its spec. The instance is called at
every step like a user's function, with TRL's signature: lists over the P*M completions in, one float or None each out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from nlgrpo.data.conversations import text_of
from nlgrpo.errors import UserError


def path_of(value: object) -> Path:
    """Return the path that an argument of a reward names."""
    if not isinstance(value, str | Path):
        raise UserError(f"path must be a string in quotes, got {value!r}")
    return Path(os.path.expanduser(value))


@dataclass(frozen=True)
class Length:
    """Negative squared distance to a target length (IAMA, 6.1, where ``scale`` is the maximum length).

        r(y) = -((|y| - target) / scale)^2

    |y| is the number of tokens of the completion, including a sampled end-of-sequence token. The maximum is 0.
    Raises UserError for a non-finite ``target`` or ``scale``, and for ``scale`` <= 0.
    """

    target: float
    scale: float

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("scale", self.scale)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
                raise UserError(f"{name} must be a number of tokens, got {value!r}")
        if self.scale <= 0:
            raise UserError(f"scale must be above 0 (the maximum length is a good one), got {self.scale}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-(((len(ids) - self.target) / self.scale) ** 2) for ids in completion_ids]


@dataclass(frozen=True)
class Overlong:
    """Penalty for long completions (soft overlong punishment, DAPO, 3.4), in [-1, 0].

        r(y) = min(0, max(-1, (limit - margin - |y|) / margin))

    |y| is the number of tokens: 0 up to ``limit - margin``, -1 from ``limit`` on. With ``margin = 0`` it is 0 or -1.
    Raises UserError unless 0 <= margin <= limit and limit > 0.
    """

    limit: int
    margin: int = 0

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("margin", self.margin)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"{name} must be a whole number of tokens, got {value!r}")
        if not 0 <= self.margin <= self.limit or self.limit <= 0:
            raise UserError(f"expected 0 <= margin <= limit, got {self.margin} and {self.limit}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        over = length - (self.limit - self.margin)
        return -min(over / self.margin, 1.0) if 0 < over <= self.margin else -float(over > 0)


class Lexicon:
    """Score of the words of a lexicon that occur in the completion, in (-1, 1); 0 if none does.

        s / sqrt(s^2 + 15), with s the sum of the scores

    This is the normalisation of VADER's compound score, without VADER's heuristics (negation, boosters, capitals).
    ``normalize="mean"`` returns the mean score of the words instead, in the units of the file.

    ``path``: a text file (UTF-8) with lines ``word<TAB>score``; further columns are ignored. Case and punctuation
    around a word do not matter; if entries differ only in case, the last one counts. A hyphenated word that is not in
    the file counts by its parts. Entries with spaces or signs match literally: "fed up", ":)".

    Raises UserError for a missing or empty file, a line without a finite score, and another ``normalize``.
    """

    def __init__(self, path: str, normalize: Literal["compound", "mean"] = "compound") -> None:
        if normalize not in ("compound", "mean"):
            raise UserError(f"normalize must be 'compound' or 'mean', got {normalize!r}")
        self.normalize = normalize
        self.scores = _read_lexicon(path_of(path))
        phrases = [entry for entry in self.scores if not re.fullmatch(r"[\w'-]+", entry)]
        # Phrases come before words, and longer phrases before their beginnings: ":-))" is not ":-)" and a bracket.
        units = [_phrase_pattern(entry) for entry in sorted(phrases, key=len, reverse=True)] + [r"[\w'-]+"]
        self.unit = re.compile("|".join(units))

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [self._score(text_of(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        scores = [score for unit in self.unit.findall(text.lower().replace("’", "'")) for score in self._lookup(unit)]
        total = math.fsum(scores)
        if self.normalize == "mean":
            return total / max(len(scores), 1)
        return total / math.sqrt(total * total + 15)

    def _lookup(self, unit: str) -> list[float]:
        word = unit if unit in self.scores else unit.strip("_'-")
        parts = [word] if word in self.scores else word.split("-")
        return [self.scores[part] for part in parts if part in self.scores]


def _read_lexicon(path: Path) -> dict[str, float]:
    """Read a ``word<TAB>score`` file into ``{lower-case entry: score}``."""
    if not os.path.isfile(path):
        raise UserError(f"there is no lexicon file {str(path)!r} (looked from {Path.cwd()})")
    scores: dict[str, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            scores[line.split("\t")[0].strip().lower()] = _lexicon_score(line, f"{path}, line {number}")
    if not scores:
        raise UserError(f"the lexicon {str(path)!r} is empty; expected a line 'word<TAB>score' for each word")
    return scores


def _lexicon_score(line: str, where: str) -> float:
    fields = line.split("\t")
    try:
        score = float(fields[1])
    except (IndexError, ValueError):
        score = math.nan
    if not math.isfinite(score) or not fields[0].strip():
        raise UserError(f"{where}: expected 'word<TAB>score', got {line[:80]!r}")
    return score


def _phrase_pattern(phrase: str) -> str:
    """Pattern of a phrase on its own: "fed up" not in "fed upon", ":/" not in "http://", but ":)" in "great:)"."""
    before = r"(?<!\w)" if re.match(r"\w", phrase) else r"(?<![^\w\s\"'(.,!?])"
    after = r"(?!\w)" if re.search(r"\w$", phrase) else r"(?=[\s\"').,!?;]|$)"
    return before + re.escape(phrase) + after


class Regex:
    """1.0 if ``pattern`` occurs in the completion (``full=True``: matches all of it), else 0.0.

    A dot also matches a line break. Raises UserError for a pattern that does not compile.
    """

    in_main_thread = True  # only there can a pattern that takes for ever be interrupted

    def __init__(self, pattern: str, full: bool = False) -> None:
        try:
            compiled = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise UserError(f"{pattern!r} is not a regular expression: {error}") from error
        self.match: Callable[[str], re.Match[str] | None] = compiled.fullmatch if full else compiled.search

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(self.match(text_of(completion)) is not None) for completion in completions]


@dataclass(frozen=True)
class Gsm8k:
    """1.0 if the final answer of the completion equals that of ``column``, else 0.0.

    `final_answer` extracts both. Abstains (None) if the column has no number. Raises UserError if the data do not have
    the column.
    """

    column: str = "answer"

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Required columns of the data."""
        return (self.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if self.column not in columns:
            raise UserError(f"gsm8k(column={self.column!r}) needs a column {self.column!r} in the data")
        golds = [final_answer(str(gold)) for gold in columns[self.column]]  # floats too: "5e-05" is valid
        answers = [final_answer(text_of(completion)) for completion in completions]
        return [None if gold is None else float(gold == answer) for gold, answer in zip(golds, answers, strict=True)]

    def answer(self, text: str) -> Decimal | None:
        """Return the answer of a completion for majority voting."""
        return final_answer(text)


# Digits with commas, a decimal part, a denominator. A minus is a sign unless it follows a term: "16-3" is 16 and 3.
# The decimal point needs digits after it, so a full stop is not part of the number.
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
_NUMBER = re.compile(rf"((?<![\w)])[-−])?\\?\$?({_DIGITS})(?:/({_DIGITS}))?")


def final_answer(text: str) -> Decimal | None:
    r"""Extract the final number of a solution, or None if it has none.

    It is the first number of the line after the last ``####`` (GSM8K's format); without ``####`` the last number in the
    last ``\boxed{}``; without a box the last number. Reads "$1,234.50", "72." as "72.0", "-$5", "3/4", "\frac{3}{4}"
    and "5e-05".
    """
    text = _plain(text)
    _, marker, tail = text.rpartition("####")
    if marker:
        return next(iter(_numbers(tail.strip().partition("\n")[0])), None)
    numbers = _numbers(_last_boxed(text))
    return numbers[-1] if numbers else None


def vote(text: str) -> Decimal | str | None:
    r"""Return the answer of a solution for majority voting: the content of its last ``\boxed{}``, else `final_answer`.

    A box with a single number, apart from ``x =``, ``$``, ``%`` and ``\text{..}``, gives the number. Any other box
    gives its text without white space, so ``x+1`` and ``2x+1``, or ``2`` and ``x^2``, are different answers.
    """
    boxed = _last_boxed(text)
    if boxed == text or "####" in text:
        return final_answer(text)
    bare = re.sub(r"^\s*[A-Za-z]\s*=|\\?[$%]|\\(?:text|mathrm)\{[^{}]*\}", "", _plain(boxed)).strip()
    several = re.search(r",(?!\d{3}(?!\d))", bare)  # 1,2 is several, 1,200 is one
    number = _numbers(bare) if _NUMBER.fullmatch(bare) and not several else []
    return number[0] if number else "".join(boxed.split()) or None


def _plain(text: str) -> str:
    """Rewrite ``\\frac{3}{4}`` as 3/4, and drop the braces and thin spaces of thousands."""
    return re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text.replace("{,}", ",").replace(r"\,", ""))


def _numbers(text: str) -> list[Decimal]:
    # Decimal, because int rejects the thousands of digits that an untrained model may write.
    numbers = []
    for sign, digits, denominator in _NUMBER.findall(text):
        value = Decimal(("-" if sign else "") + digits.replace(",", ""))
        divisor = Decimal(denominator.replace(",", "") or 1)
        if divisor != 0:
            numbers.append(value if divisor == 1 else value / divisor)
    return numbers


def _last_boxed(text: str) -> str:
    r"""Return the content of the last ``\boxed{}`` with balanced braces; without one, the full text."""
    _, marker, tail = text.rpartition(r"\boxed{")
    if not marker:
        return text
    depth = 1
    for position, letter in enumerate(tail):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return tail[:position]
    return tail
