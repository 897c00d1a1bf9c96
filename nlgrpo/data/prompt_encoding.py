"""Token ids of prompts: texts and conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from nlgrpo.data.conversations import ChatOptions, Prompt
from nlgrpo.data.encoding import one_bos
from nlgrpo.data.messages import brief
from nlgrpo.data.sources import Row
from nlgrpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Tokenize prompts like `prompt_dataset.load`: with the tokens that the tokenizer adds before a text, without EOS.

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
    end = tokenizer.eos_token
    strip = _appends_eos(tokenizer, next((text for text in texts if text and not (end and text.endswith(end))), "a"))
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


def _appends_eos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the tokenizer appends EOS to a text. Compares with and without: BOS and EOS may be the same token."""
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
