"""Rewards of opposed.toml and uneven.toml. Copy and change them."""

import zlib
from typing import Any

from nlgrpo.data.prompt_dataset import text_of
from nlgrpo.rewards.builtin import Classifier, Lexicon


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
