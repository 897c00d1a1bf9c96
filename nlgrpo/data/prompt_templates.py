"""Prompts from the rows of a source: a column or a template, shortened, or a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from nlgrpo.data.conversations import Prompt, brief
from nlgrpo.data.sources import Row, nearest


class PromptMaker:
    """Builds the prompt of a row from its columns, which it checks for existence."""

    def __init__(
        self,
        source: str,
        names: list[str],
        prompt_column: str,
        template: str,
        cut_after: str | None,
        first_words: int | None,
    ) -> None:
        self.source, self.cut_after = source, cut_after
        self.first_words = re.compile(rf"\s*((?:\S+\s+){{0,{first_words - 1}}}\S+)") if first_words else None
        has_messages = prompt_column == "prompt" and "prompt" not in names and "messages" in names
        self.column = "messages" if has_messages else prompt_column
        self.pieces = _parse(template, self.column)
        self.bare = template == "{prompt}"
        shortens = cut_after is not None or first_words is not None
        if shortens and all(field != self.column for _, field in self.pieces):
            raise ValueError(
                f"cut_after and first_words shorten the prompt column, which the template {template!r} does not use.\n"
                "  Write {prompt} into the template and name the column with prompt_column."
            )
        for _, field in self.pieces:
            if field is not None and field not in names:
                raise ValueError(f"{source} has no column {field!r}. It has {', '.join(names)}.{nearest(field, names)}")

    def make(self, row: Row, number: int) -> Prompt | None:
        """Return the prompt of example ``number`` (from 1), or None if ``cut_after`` is not in it."""
        where = f"{self.source}, example {number}"
        value = row.get(self.column)
        if self.bare and isinstance(value, list | tuple):
            return self._conversation(value, where)
        texts = []
        for literal, field in self.pieces:
            text = "" if field is None else self._text(row, field, where)
            if text is None:
                return None
            texts += [literal, text]
        return "".join(texts)

    def _text(self, row: Row, field: str, where: str) -> str | None:
        value = row.get(field)
        if not isinstance(value, str | int | float):
            raise ValueError(f"{where}: column {field!r} holds {brief(value)} instead of a text.")
        return self._shorten(str(value)) if field == self.column else str(value)

    def _shorten(self, text: str) -> str | None:
        if self.cut_after is not None:
            before, marker, _ = text.rpartition(self.cut_after)
            if not marker:
                return None
            text = before + marker
        match = self.first_words.match(text) if self.first_words else None
        return match[1] if match else text

    def _conversation(self, value: Sequence[Any], where: str) -> list[dict[str, Any]]:
        if self.cut_after is not None or self.first_words is not None:
            raise ValueError(
                f"{where}: column {self.column!r} is a conversation, which cut_after and first_words cannot shorten."
            )
        messages = list(value)
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
            expected = "a list of {'role': .., 'content': ..}"
            raise ValueError(f"{where}: column {self.column!r} holds {brief(value)} instead of {expected}.")
        while self.column == "messages" and messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the recorded answer, which the model has to give
        if not messages:
            raise ValueError(f"{where}: the conversation in column {self.column!r} has no message to answer.")
        return messages


def _parse(template: str, column: str) -> list[tuple[str, str | None]]:
    """Parse ``"Q: {question}!"`` into [("Q: ", "question"), ("!", None)]; ``{prompt}`` is the prompt column."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}. Write a literal brace twice.") from error
    for _, field, spec, conversion in parsed:
        if field == "" or spec or conversion:
            raise ValueError(
                f"template {template!r}: braces may contain only the name of a column, as in {{question}}."
            )
    if all(field is None for _, field, _, _ in parsed):
        raise ValueError(
            f"template {template!r} has no column, so all prompts would be equal; write {{prompt}} into it."
        )
    return [(literal, column if field == "prompt" else field) for literal, field, _, _ in parsed]
