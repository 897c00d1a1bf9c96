"""Configuration of the prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from nlgrpo.errors import UserError


def _table(words: Sequence[str]) -> dict[str, Any]:
    """Read a table from the command line."""
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise UserError("expected a JSON object")
    return value


Table = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_table,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""A table with any keys: in TOML ``{key = value}``, on the command line ``'{"key": value}'``."""


@dataclass
class DataConfig:
    source: str = "story-prompts"
    """A .jsonl, .json, .parquet, .csv or .txt file (.gz too), a `datasets` name, or the embedded "story-prompts"."""
    mixture: Table = field(default_factory=dict)
    """Several sources and their weights, instead of `source`: {"math.jsonl" = 3, "chat.jsonl" = 1}. In place of a
    weight, a table can set other keys of this section: {weight = 3, prompt_column = "problem"}."""
    streaming: bool = False
    """Read the prompts while the run visits them, for sources that are too large for memory."""
    shuffle_buffer: int = 10_000
    """Streaming only: number of examples among which the next one is drawn, instead of shuffling all."""
    evaluation: str = ""
    """Evaluation prompts, in the same formats as `source`. Empty: the last prompts of `source` are held out. Training
    prompts that are also evaluation prompts are dropped. The evaluation prompts are the same for every seed."""
    split: str = "train"
    """Split of a `datasets` name or folder."""
    evaluation_split: str = ""
    """Split of `evaluation`. Empty: the same as `split`."""
    prompt_column: str = "prompt"
    """Column with a text, or with a conversation (a list of messages, or its JSON) for the model's chat template."""
    template: str = "{prompt}"
    """Template that builds the prompt from columns, such as "Question: {question}\\nAnswer:"."""
    cut_after: str | None = None
    """Cut the prompt after the last occurrence of this text, such as "\\n\\nAssistant:"."""
    separator: str | None = None
    """Text that separates documents in a plain text file. None: one document per line."""
    first_words: int | None = None
    """Keep only this many words of the prompt column."""
    limit: int | None = None
    """Read only this many examples."""
    max_prompt_tokens: int | None = None
    """Drop longer prompts. None: drop prompts that leave no room for a completion in the context."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch."""
    add_bos: bool | None = None
    """Start each prompt with BOS, once. None: as the tokenizer does."""
    system_prompt: str | None = None
    """System message of conversations that have none. A prompt that is a text becomes the user's message after it."""
    chat: bool = False
    """Make a conversation of one user message from each prompt that is a text."""
    chat_template_kwargs: Table = field(default_factory=dict)
    """Arguments of the chat template: {enable_thinking = false}. A column of this name replaces them per example."""
    tools: tuple[str, ...] = ()
    """Tools in the chat template: .json files of schemas, or functions, `file.py:function`. A column `tools` adds
    others per example."""


def buffer_faults(data: DataConfig) -> list[str]:
    """Find shuffle buffers that no stream uses: one of [data], and those of the sources of a mixture."""
    tables = {name: table if isinstance(table, dict) else {} for name, table in data.mixture.items()} or {"": {}}
    shuffled = {
        name: bool(table.get("streaming", data.streaming)) and bool(table.get("shuffle", data.shuffle))
        for name, table in tables.items()
    }
    advice = "only a shuffled stream has one; set data.streaming = true and data.shuffle = true"
    faults = [
        f"data.mixture, {name!r}: shuffle_buffer = {table['shuffle_buffer']!r}: {advice}"
        for name, table in tables.items()
        if "shuffle_buffer" in table and not shuffled[name]
    ]
    if data.shuffle_buffer != DataConfig().shuffle_buffer and not any(shuffled.values()):
        faults.append(f"data.shuffle_buffer = {data.shuffle_buffer}: {advice}")
    return faults
