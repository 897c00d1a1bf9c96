"""Between texts and token ids: texts for sequence classifiers, and completions as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

CONTEXT = 8  # number of a prompt's last tokens that are decoded together with its completion
BROKEN = "\ufffd"  # replacement character: the tokens end within a character


def one_bos(ids: list[int], bos: int | None) -> list[int]:
    """Drop repeated BOS tokens at the beginning: a text may write its own besides that of the tokenizer."""
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def ids_to_score(
    tokenizer: Any, text: str, max_length: int | None, *, templated: bool, append_eos: bool = True
) -> list[int]:
    """Tokenize a text for a classifier, in training and in use: EOS at the end, truncated to ``max_length``.

    ``templated``: the text comes from a chat template, which has added all special tokens. A text that writes BOS has
    no second one. Long texts lose their beginning, because the tokenizer's ``truncation_side`` is "left".
    """
    eos = tokenizer.eos_token_id if append_eos and not templated else None
    limit = None if max_length is None else max_length - (eos is not None)
    ids = list(
        tokenizer(
            text, add_special_tokens=not templated, truncation=limit is not None, max_length=limit, verbose=False
        ).input_ids
    )
    ids = ids if templated else one_bos(ids, tokenizer.bos_token_id)
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def as_answer(prompt: str | list[dict[str, Any]], text: str) -> str | list[dict[str, str]]:
    """Format a completion as TRL does for reward functions: a text, or the assistant message of a conversation."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def decode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[str]:
    """Decode completions (ids) as continuations of their prompts (ids), without special tokens.

    Tokenizers like SentencePiece drop the space at the start of a text, but a completion does not start a text.
    Therefore the end of the prompt is decoded together with the completion, and its text is removed.
    """
    if not completions:
        return []  # batch_decode([]) returns a text
    ends = [list(prompt[-CONTEXT:]) for prompt in prompts]
    broken = [BROKEN in text for text in tokenizer.batch_decode(ends, skip_special_tokens=True)]
    ends = [list(prompt) if cut else end for prompt, end, cut in zip(prompts, ends, broken, strict=True)]
    before = tokenizer.batch_decode(ends, skip_special_tokens=True)
    rows = [[*end, *completion] for end, completion in zip(ends, completions, strict=True)]
    continued = tokenizer.batch_decode(rows, skip_special_tokens=True)
    alone = tokenizer.batch_decode([list(completion) for completion in completions], skip_special_tokens=True)
    # Use the completion's own text if that of the prompt changes: it ends within a character, or with a removed space.
    return [
        text[len(start) :] if text.startswith(start) else separate
        for start, text, separate in zip(before, continued, alone, strict=True)
    ]
