"""Token ids of a text that a sequence classifier scores."""

from __future__ import annotations

from typing import Any


def ids_to_score(
    tokenizer: Any, text: str, max_length: int | None, *, templated: bool, append_eos: bool = True
) -> list[int]:
    """Token ids of a text as classifiers read it, in training and in use: closed by EOS, its beginning cut off if long.

    A chat template has written the special tokens itself (``templated``), the closing one included. The tokenizer's
    ``truncation_side`` is "left".
    """
    eos = tokenizer.eos_token_id if append_eos and not templated else None
    limit = None if max_length is None else max_length - (eos is not None)
    ids = list(
        tokenizer(
            text, add_special_tokens=not templated, truncation=limit is not None, max_length=limit, verbose=False
        ).input_ids
    )
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
