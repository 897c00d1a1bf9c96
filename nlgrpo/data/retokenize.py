"""Convert token ids from one tokenizer to another, for a value model whose vocabulary differs from the policy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from nlgrpo.errors import UserError

CUT = "\ufffd"  # a byte-level tokenizer decodes an incomplete character to this


@dataclass(frozen=True)
class Retokenizer:
    """Converts token ids of ``source`` to token ids of ``target``, by way of the text.

    The text of prompt and completion is decoded together, without ``source``'s special tokens and without an incomplete
    character at its end. ``target`` adds its usual tokens before the text, and its EOS after a completion that ends in
    one of the ``stops`` (ids of ``source``).
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    stops: Sequence[int]

    def whole(self, prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
        """Convert prompt and completion. Raises UserError if their text has no token."""
        ids = self._ids([*prompt, *completion])
        end = self.target.eos_token_id
        if not ids:
            raise UserError(
                "prompt and completion are an empty text, for which the value model's tokenizer has no token"
            )
        ended = completion and completion[-1] in self.stops and end is not None
        return [*ids, end] if ended else ids

    def parts(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split `whole` into the ids of the prompt, at least one, and those of the completion.

        A token with letters of both belongs to the completion.
        """
        whole = self.whole(prompt, completion)
        prompt_ids = self._ids(prompt)
        shared = next((i for i, (a, b) in enumerate(zip(prompt_ids, whole, strict=False)) if a != b), len(prompt_ids))
        return whole[: max(shared, 1)], whole[max(shared, 1) :]

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        text = str(self.source.decode(list(tokens), skip_special_tokens=True)).rstrip(CUT)
        ids: list[int] = self.target(text, verbose=False).input_ids
        has_eos = len(ids) > 1 and ids[-1] == self.target.eos_token_id  # some tokenizers add it to every text
        return ids[:-1] if has_eos else ids
