"""Messages of a conversation as chat templates take them, whatever form data, requests and environments give them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from nlgrpo.errors import UserError

EXPECTED = "a list of {'role': .., 'content': ..}"
# A text that is meant to be a conversation, also where it is not JSON: Python's repr of a list, or a text that was cut.
CONVERSATION = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from)["']\s*:""")


def brief(value: object) -> str:
    """Return the type and the beginning of a value, for messages."""
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


def without_none(value: Any) -> Any:
    """Remove keys without a value from nested objects: Arrow gives all objects of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list | tuple) else value


def messages_in(text: str, where: str) -> str | list[Any]:
    """Return the messages that a text holds as JSON, not yet checked; any other text unchanged.

    Raises UserError, which names ``where``, for a text that begins like a list of messages and is not JSON, and for
    the JSON of one message or of an object with messages.
    """
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if CONVERSATION.match(text) is None:
            return text
        raise UserError(
            f"{where} begins like a conversation, but is not JSON ({error}): {text[:60]!r}. Store the list itself, or "
            "write it with json.dumps."
        ) from error
    if isinstance(value, list) and (CONVERSATION.match(text) is not None or any(map(_is_message, value))):
        return value
    if _is_message(value) or (isinstance(value, dict) and isinstance(value.get("messages"), list)):
        raise UserError(f"{where} holds the JSON of an object instead of {EXPECTED}: {text[:60]!r}.")
    return text


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


def messages_of(value: object, where: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation: each with a role, and with one text as its content.

    Text parts, ``[{"type": "text", "text": ".."}]``, are joined by line breaks, numbers become texts, and keys without
    a value are removed. Only a message with tool calls or with ``reasoning_content`` may have no content.

    Raises UserError, which names ``where`` and the message, for anything else.
    """
    expected = f"{where} holds {brief(value)} instead of {EXPECTED}"
    if not isinstance(value, list | tuple) or not all(isinstance(message, Mapping) for message in value):
        raise UserError(f"{expected}.")
    if not value:
        raise UserError(f"{where} holds {brief(value)}: the conversation has no message to answer.")
    for number, message in enumerate(value, 1):
        for key in ("role", "content"):
            if message.get(key) is None and not (key == "content" and (key in message or _is_silent(message))):
                renamed = " Rename 'from' and 'value' to 'role' and 'content'." if _is_message(message) else ""
                raise UserError(f"{expected}: message {number} has no {key!r}.{renamed}")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(value, 1)]


def _is_silent(message: Mapping[str, Any]) -> bool:
    """Whether a message needs no content, because it calls tools or reasons."""
    return bool(message.get("tool_calls") or message.get("reasoning_content"))


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where} has {brief(role)} as its role; expected a text, such as 'user'.")
    found = {key: without_none(part) for key, part in message.items() if part is not None}
    if content in (None, []) and _is_silent(message):
        return {key: part for key, part in found.items() if key != "content"}
    return {**found, "content": content_text(content, f"{where} (role {role!r})")}


def content_text(content: object, where: str) -> str:
    """Return a content as one text. Raises UserError for one that is not text."""
    if isinstance(content, str):
        return content
    if isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content):
        return str(content)
    if isinstance(content, list | tuple) and content:
        return "\n".join(_part(part, where) for part in content)
    raise UserError(f"{where} has {brief(content)} as its content; expected a text, or a list of text parts.")


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind, text = type(part).__name__, None
    if isinstance(part, Mapping):
        kind, text = part.get("type") or "text", part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    raise UserError(
        f"{where} has a content part of type {kind!r}, {brief(part)}; only text is supported, as "
        "{'type': 'text', 'text': '..'}. Leave out the part, or the whole conversation."
    )
