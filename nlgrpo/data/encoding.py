"""Token ids of texts for sequence classifiers."""

from __future__ import annotations

from typing import Any


def ids_to_score(
    tokenizer: Any, text: str, max_length: int | None, *, templated: bool, append_eos: bool = True
) -> list[int]:
    """Tokenize a text for a classifier, in training and in use: EOS at the end, truncated to ``max_length``.

    ``templated``: the text comes from a chat template, which has added all special tokens. Long texts lose their
    beginning, because the tokenizer's ``truncation_side`` is "left".
    """
    eos = tokenizer.eos_token_id if append_eos and not templated else None
    limit = None if max_length is None else max_length - (eos is not None)
    ids = list(
        tokenizer(
            text, add_special_tokens=not templated, truncation=limit is not None, max_length=limit, verbose=False
        ).input_ids
    )
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
