"""Between texts and token ids: prompts, texts for sequence classifiers, and completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from nlgrpo.data.conversations import ChatOptions, Prompt, brief
from nlgrpo.data.sources import Row
from nlgrpo.errors import UserError

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


class Example(NamedTuple):
    where: str  # for messages
    prompt: Prompt
    row: Row


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    chat: ChatOptions | None = None,
    add_bos: bool | None = None,
) -> list[list[int]]:
    """Tokenize prompts like `load_prompt_set`: with the tokens that the tokenizer adds before a text, without EOS.

    Raises UserError for an empty text if the tokenizer has no BOS token, and for a conversation as `ChatOptions`.
    """
    chat = chat or ChatOptions()
    wheres = [f"prompt {i}" for i in range(1, len(prompts) + 1)]
    found = [chat.conversation(prompt, where) for prompt, where in zip(prompts, wheres, strict=True)]
    examples = [Example(where, prompt, {}) for where, prompt in zip(wheres, found, strict=True)]
    return encode_examples(tokenizer, examples, chat, add_bos)


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    chat: ChatOptions,
    add_bos: bool | None = None,
) -> list[list[int]]:
    """Tokenize examples. ``add_bos``: True or False, start all of them with BOS or none; None, as the tokenizer does.

    No prompt starts with BOS twice: one that a text or template writes replaces that of the tokenizer. A conversation
    gets the tools and template arguments of its row, too.
    """
    if add_bos and tokenizer.bos_token_id is None:
        raise UserError("add_bos = True, but the tokenizer has no BOS token; omit add_bos.")
    for where, prompt, _ in examples:
        if broken := _lone_surrogate(prompt):
            raise UserError(
                f"{where}: {broken!r} in {brief(prompt)} is half a character (a lone surrogate); remove it."
            )
    texts = [example.prompt for example in examples if isinstance(example.prompt, str)]
    # verbose=False: no warning about long texts, which the caller drops.
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
    strip = _appends_eos(tokenizer, texts)
    nothing = list(tokenizer("", verbose=False)["input_ids"])
    out = []
    for where, prompt, row in examples:
        if isinstance(prompt, str):
            ids = list(next(encoded))
            if ids == nothing and prompt.strip():
                raise UserError(
                    f"{where}: the tokenizer has no token for {brief(prompt)}. It was loaded as "
                    f"{type(tokenizer).__name__}: for some model types transformers takes its own class, whatever the "
                    "folder says, and its pre-tokenizer may not fit the vocabulary."
                )
            ids = ids[:-1] if strip else ids
        else:
            ids = chat.with_row(row, where).encode(tokenizer, prompt, where)
        out.append(_with_bos(ids, tokenizer.bos_token_id, add_bos, where))
    return out


def _lone_surrogate(prompt: Prompt) -> str | None:
    r"""Return the first half character, which JSON can hold ("\ud83d") and no encoding can write; None without one."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _appends_eos(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> bool:
    """Whether the tokenizer appends EOS, to the first of the texts that does not end with it itself.

    Compares with and without special tokens: BOS and EOS may be the same token.
    """
    end = tokenizer.eos_token
    text = next((text for text in texts if text and not (end and text.endswith(end))), "a")
    eos = [tokenizer.eos_token_id]
    alone = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokenizer(text, verbose=False)["input_ids"][-1:] == eos != alone[-1:]


def _with_bos(ids: list[int], bos: int | None, add_bos: bool | None, where: str) -> list[int]:
    ids = one_bos(ids, bos)
    if add_bos and ids[:1] != [bos]:
        ids = [cast(int, bos), *ids]
    elif add_bos is False and ids[:1] == [bos]:
        ids = ids[1:]
    if ids:
        return ids
    if bos is None:
        raise UserError(f"{where} is empty, and the tokenizer has no BOS token to start from; remove the example.")
    return [bos]
