"""Schemas of the tools that a chat template gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nlgrpo.data.messages import brief
from nlgrpo.errors import UserError
from nlgrpo.runtime import user_code


def load_tools(names: Sequence[str]) -> list[dict[str, Any]]:
    """Load tool schemas from ``.json`` files, and of Python functions by ``module:function`` or ``file.py:function``.

    A file has one schema or a list of them. A function needs annotations and a docstring with a section ``Args:``,
    from which ``transformers.utils.get_json_schema`` makes its schema.

    Raises UserError for a file or function that gives no schema.
    """
    found: list[dict[str, Any]] = []
    for name in names:
        if name.endswith(".json"):
            found += _tools_of_file(Path(name).expanduser())
        else:
            from transformers.utils import chat_template_utils, get_json_schema

            function = user_code.function(name)
            try:
                found.append(get_json_schema(function))
            except (chat_template_utils.TypeHintParsingException, chat_template_utils.DocstringParsingException) as e:
                raise UserError(f"data.tools: no schema can be made of {name}: {e}") from e
    return found


def _tools_of_file(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"data.tools: {path} cannot be read as JSON: {error}") from error
    tools = content if isinstance(content, list) else [content]
    if not all(isinstance(tool, dict) and isinstance(tool.get("function", tool).get("name"), str) for tool in tools):
        raise UserError(f"data.tools: {path} has no list of tool schemas with names, but {brief(content)}.")
    return tools
