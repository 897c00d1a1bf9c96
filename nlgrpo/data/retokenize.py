"""From one tokenizer's tokens to another's, by text: what a value model reads of a policy with another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

CUT = "\ufffd"  # what a tokenizer of bytes decodes the beginning of a character to


@dataclass(frozen=True)
class Retokenizer:
    """Reads tokens of ``source``, writes those of ``target``.

    The text is that of prompt and completion together, without ``source``'s special tokens and without the beginning of
    a character at its end; ``target`` puts before it what it puts before texts, and its end-of-sequence token goes
    behind a completion that has ended by one of the ``stops``, tokens of ``source``.
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    stops: Sequence[int]

    def whole(self, prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
        """The text of both. Raises ValueError where it has no token."""
        ids, end = self._ids([*prompt, *completion]), self.target.eos_token_id
        if not ids:
            raise ValueError("a value model with another tokenizer has no token of its own for an empty text")
        ended = completion and completion[-1] in self.stops and end is not None
        return [*ids, end] if ended else ids

    def parts(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[list[int], list[int]]:
        """`whole`, parted: a token that has letters of both is of the completion; the prompt has one token at least."""
        whole, alone = self.whole(prompt, completion), self._ids(prompt)
        shared = next((i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), len(alone))
        return whole[: max(shared, 1)], whole[max(shared, 1) :]

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        text = str(self.source.decode(list(tokens), skip_special_tokens=True)).rstrip(CUT)
        ids: list[int] = self.target(text, verbose=False).input_ids
        closed = len(ids) > 1 and ids[-1] == self.target.eos_token_id  # by a tokenizer that closes every text
        return ids[:-1] if closed else ids
