"""Prompts from the rows of a source: a column or a template, shortened, or a conversation."""

from __future__ import annotations

import math
import re
from string import Formatter
from typing import Any

from nlgrpo.data.conversations import EXPECTED, Prompt, brief, messages_in, messages_of
from nlgrpo.data.sources import Row
from nlgrpo.errors import UserError, did_you_mean, nearest


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
        self.source = source
        self.cut_after = cut_after
        self.first_words = re.compile(rf"\s*((?:\S+\s+){{0,{first_words - 1}}}\S+)") if first_words else None
        self.by_default = prompt_column == "prompt" and "prompt" not in names and "messages" in names
        self.column = "messages" if self.by_default else prompt_column
        self.pieces = _parse(template, self.column)
        self.template = template
        self.bare = template == "{prompt}"
        self.used = any(field == self.column for _, field in self.pieces)
        shortens = cut_after is not None or first_words is not None
        if shortens and not self.used:
            raise UserError(
                f"cut_after and first_words shorten the prompt column, which the template {template!r} does not use.\n"
                "  Write {prompt} into the template and name the column with prompt_column."
            )
        if prompt_column != "prompt" and not self.used:
            raise UserError(
                f"prompt_column = {prompt_column!r}, but the template {template!r} does not use it: write {{prompt}} "
                f"or {{{prompt_column}}} into the template, or remove prompt_column."
            )
        for _, field in self.pieces:
            if field is not None and field not in names:
                hint = did_you_mean(nearest(field, names))
                raise UserError(f"{source} has no column {field!r}{hint} It has {', '.join(names)}.")

    def make(self, row: Row, number: int) -> Prompt | None:
        """Return the prompt of example ``number`` (from 1), or None if ``cut_after`` is not in it."""
        where = f"{self.source}, example {number}"
        if self.used:
            value = row.get(self.column)
            of_column = f"{where}: column {self.column!r}"
            value = messages_in(value, of_column) if isinstance(value, str) else value
            if isinstance(value, list | tuple):
                return self._conversation(value, of_column)
            if self.by_default and isinstance(value, str):
                raise UserError(
                    f"{of_column} holds {brief(value)} instead of {EXPECTED}. Set prompt_column = 'messages' if its "
                    "texts are the prompts."
                )
        texts = []
        for literal, field in self.pieces:
            text = "" if field is None else self._text(row, field, where)
            if text is None:
                return None
            texts += [literal, text]
        return "".join(texts)

    def _text(self, row: Row, field: str, where: str) -> str | None:
        if field not in row:
            hint = did_you_mean(nearest(field, row))
            raise UserError(f"{where} has no column {field!r}{hint} It has {', '.join(row)}.")
        value = row[field]
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if isinstance(value, list | tuple) and value and all(type(x) in (int, float) for x in value):
            return str(list(value))  # [3, 5, 7]
        is_flag = isinstance(value, bool) and self.bare  # no prompt, but a word that a template may write
        if is_flag or not (isinstance(value, str) or is_number):
            advice = " Give the text, or leave out the example." if value is None else ""
            raise UserError(f"{where}: column {field!r} holds {brief(value)} instead of a text.{advice}")
        return self._shorten(str(value)) if field == self.column else str(value)

    def _shorten(self, text: str) -> str | None:
        if self.cut_after is not None:
            before, marker, _ = text.rpartition(self.cut_after)
            if not marker:
                return None
            text = before + marker
        match = self.first_words.match(text) if self.first_words else None
        return match[1] if match else text

    def _conversation(self, value: object, where: str) -> list[dict[str, Any]]:
        if not self.bare:
            raise UserError(
                f"{where} is a conversation, which the template {self.template!r} cannot contain: leave template out, "
                "or name a column of texts with prompt_column."
            )
        if self.cut_after is not None or self.first_words is not None:
            raise UserError(f"{where} is a conversation, which cut_after and first_words cannot shorten.")
        messages = messages_of(value, where)
        while self.column == "messages" and messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the recorded answer, which the model has to give
        if not messages:
            raise UserError(f"{where}: the conversation has no message to answer.")
        return messages


def _parse(template: str, column: str) -> list[tuple[str, str | None]]:
    """Parse ``"Q: {question}!"`` into [("Q: ", "question"), ("!", None)]; ``{prompt}`` is the prompt column."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"template {template!r}: {error}. Write a literal brace twice.") from error
    for _, field, spec, conversion in parsed:
        if field == "" or spec or conversion:
            raise UserError(f"template {template!r}: braces may contain only the name of a column, as in {{question}}.")
    if all(field is None for _, field, _, _ in parsed):
        raise UserError(
            f"template {template!r} has no column, so all prompts would be equal; write {{prompt}} into it."
        )
    return [(literal, column if field == "prompt" else field) for literal, field, _, _ in parsed]
