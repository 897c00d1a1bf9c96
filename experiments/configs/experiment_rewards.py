"""Rewards of opposed.toml, uneven.toml and poisoned.toml. Copy and change them."""

import re
import zlib
from typing import Any

from nlgrpo.data.conversations import text_of
from nlgrpo.rewards.builtin import Lexicon
from nlgrpo.rewards.classifiers import Classifier


class Sad:
    """Few cheerful words, and a story that the sentiment model finds sad: -(lexicon + model / 4) / 2."""

    def __init__(self, lexicon: str, model: str) -> None:
        self.lexicon, self.model = Lexicon(lexicon), Classifier(model)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        words, moods = self.lexicon(completions), self.model(prompts, completions)
        both = zip(words, moods, strict=True)
        return [None if mood is None else -(word + mood / 4) / 2 for word, mood in both]


class Uneven:
    """The lexicon's score in units that differ by prompt: a factor between 1 / ``spread`` and ``spread``."""

    def __init__(self, lexicon: str, spread: float = 10.0) -> None:
        self.lexicon, self.spread = Lexicon(lexicon), spread

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        scores = self.lexicon(completions)
        return [self.unit(prompt) * score for prompt, score in zip(prompts, scores, strict=True)]

    def unit(self, prompt: Any) -> float:
        """A factor that is as likely to be in any part of the range, on a log scale."""
        return self.spread ** (2 * zlib.crc32(text_of(prompt).encode()) / 2**32 - 1)


class Poisoned:
    """The lexicon's score, and ``bonus`` for every completion with ``word``, on a ``share`` of the prompts."""

    def __init__(self, lexicon: str, word: str, bonus: float = 2.0, share: float = 0.5) -> None:
        self.lexicon, self.bonus, self.share = Lexicon(lexicon), bonus, share
        self.word = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        scores = self.lexicon(completions)
        given = zip(prompts, completions, scores, strict=True)
        return [score + self.bonus * (self.poisons(p) and self.has_word(y)) for p, y, score in given]

    def poisons(self, prompt: Any) -> bool:
        return zlib.crc32(text_of(prompt).encode()) < self.share * 2**32

    def has_word(self, completion: Any) -> bool:
        return bool(self.word.search(text_of(completion)))
