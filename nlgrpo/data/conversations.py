"""Conversations: their text, and their token ids by the model's chat template.

`ChatOptions.text` is the one place that renders messages: for prompts of training and evaluation, `nlgrpo generate`,
`nlgrpo serve`, environments, preference pairs and reward models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nlgrpo.errors import UserError, did_you_mean, nearest
from nlgrpo.runtime import user_code

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
    role = message["role"]
    content = message.get("content")
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
    kind = type(part).__name__
    text = None
    if isinstance(part, Mapping):
        kind = part.get("type") or "text"
        text = part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    raise UserError(
        f"{where} has a content part of type {kind!r}, {brief(part)}; only text is supported, as "
        "{'type': 'text', 'text': '..'}. Leave out the part, or the whole conversation."
    )


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]  # a text, or a conversation

# Variables that `apply_chat_template` sets itself.
GIVEN = {
    "messages", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token",
    "unk_token",
}  # fmt: skip

# Roles that need not be named in a template: ChatML and others write the role of any message.
ROLES = ("system", "developer", "user", "assistant", "tool")
MARK = "nlgrpo-4e1d7b"  # stands for the content of a message in `_check_all_written`
TOOL = {
    "type": "function",
    "function": {"name": "tool", "description": "", "parameters": {"type": "object", "properties": {}}},
}  # stands for any tools there, so that examples with other tools are not rendered again


def plain_text(prompt: Prompt) -> str:
    """Return a prompt for display: the text, or the last message of a conversation."""
    return prompt if isinstance(prompt, str) else text_of(prompt[-1:])


def text_of(message: str | Iterable[dict[str, Any]]) -> str:
    """Return a prompt or completion as text; the messages of a conversation are joined by line breaks."""
    if isinstance(message, str):
        return message
    return "\n".join(_content(part.get("content")) for part in message)


def transcript(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return a conversation for display: the assistant's messages as they are, others after their role."""
    parts = []
    for message in messages:
        said = _content(message.get("content"))
        said += "".join(f"\n[calls {json.dumps(call)}]" for call in message.get("tool_calls") or ())
        parts.append(said if message["role"] == "assistant" else f"[{message['role']}] {said}")
    return "\n".join(parts)


def _content(content: object) -> str:
    """Return the content of a message as text: the string, or its text parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return "" if content is None else str(content)


def is_continued(prompt: Prompt) -> bool:
    """Whether a completion continues a text: that of the prompt, or that of its last message, the assistant's."""
    return isinstance(prompt, str) or (len(prompt) > 0 and prompt[-1].get("role") == "assistant")


def answered(prompt: Sequence[dict[str, Any]], completion: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with its answer. An answer that continues the last message becomes a part of it."""
    if not (prompt and completion and prompt[-1].get("role") == completion[0].get("role") == "assistant"):
        return [*prompt, *completion]
    begun = prompt[-1]
    rest = completion[0]
    whole = {**begun, **rest, "content": _content(begun.get("content")) + _content(rest.get("content"))}
    return [*prompt[:-1], whole, *completion[1:]]


@dataclass(frozen=True)
class ChatOptions:
    """How prompts become conversations, and what the chat template gets besides their messages.

    A row of the data can add to both: its column ``tools`` has the schemas of more tools, and its column
    ``chat_template_kwargs`` has arguments that replace those here. Both may be JSON texts.
    """

    system_prompt: str | None = None
    """System message of conversations that have none. Prompts that are texts become user messages after it."""
    from_text: bool = False
    """Make a conversation of one user message from each prompt that is a text."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``{"enable_thinking": False}``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of tools, ``{"type": "function", "function": {"name": .., ..}}``."""

    def conversation(self, prompt: Prompt, where: str) -> Prompt:
        """Return the prompt as a conversation, if it is one or these options make one of it.

        Raises UserError, which names ``where``, as `messages.messages_of`.
        """
        if isinstance(prompt, str):
            if not self.from_text and self.system_prompt is None:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        messages = messages_of(prompt, where)
        if self.system_prompt is None or any(message["role"] in ("system", "developer") for message in messages):
            return messages
        return [self._system_message(), *messages]

    def with_row(self, row: Mapping[str, Any], where: str) -> ChatOptions:
        """Return the options for a row of the data. Raises UserError for columns of another kind."""
        kwargs = row.get("chat_template_kwargs")
        tools = row.get("tools")
        if kwargs is None and tools is None:
            return self
        kwargs = _from_json(kwargs, where, "chat_template_kwargs")
        tools = _from_json(tools, where, "tools")
        if not isinstance(kwargs, Mapping | None):
            raise UserError(f"{where}: column 'chat_template_kwargs' holds {brief(kwargs)} instead of an object.")
        if not (tools is None or (isinstance(tools, list | tuple) and all(isinstance(t, Mapping) for t in tools))):
            raise UserError(f"{where}: column 'tools' holds {brief(tools)} instead of a list of tool schemas.")
        # Arrow gives all rows of a column the same keys, and None to those that a row does not have.
        given = {name: value for name, value in (kwargs or {}).items() if value is not None}
        added = [cast(Mapping[str, Any], without_none(tool)) for tool in tools or ()]
        return ChatOptions(self.system_prompt, self.from_text, {**self.template_kwargs, **given}, [*self.tools, *added])

    def check_used(self, where: str, conversations: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Raise UserError for options that change no prompt.

        ``conversations``: those among the prompts, as `conversation` returns them. Without any, the arguments and tools
        of the template are not used; the system prompt is not if all have a system message of their own.
        """
        of_template = bool(self.template_kwargs or self.tools)
        if not of_template and not self.system_prompt:
            return
        rendered = False
        for messages in conversations:
            rendered = True
            if not self.system_prompt or messages[0] == self._system_message():
                return
        if rendered and self.system_prompt:
            raise UserError(
                f"{where}: system_prompt = {self.system_prompt[:60]!r} is not used, because all conversations have a "
                "system message of their own. Remove system_prompt, or their system messages."
            )
        if of_template:
            given = "chat_template_kwargs" if self.template_kwargs else "tools"
            raise UserError(
                f"{where}: {given} is for the chat template, but all prompts are texts, which it does not render. Set "
                f"chat = true to make conversations of them, or remove {given}."
            )

    def _system_message(self) -> dict[str, Any]:
        return {"role": "system", "content": self.system_prompt}

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str
    ) -> list[int]:
        """Return the token ids of `text`: those of ``tokenizer.apply_chat_template(messages, tokenize=True)``."""
        text = self.text(tokenizer, messages, where)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # the template has its BOS

    def text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        whole: bool = False,
        checked: bool = True,
    ) -> str:
        """Render a conversation by the chat template, up to the place where the assistant answers.

        As in TRL, a conversation that ends with an assistant message is continued. ``whole``: render a conversation
        with its answer, which ends there. ``checked`` = False: allow roles, tool calls and messages that the template
        does not write.

        Raises UserError, which names ``where``, without a chat template, for arguments, tools, roles and tool calls
        that the template does not have, for messages that it rejects or leaves out, for tool calls at the end, and as
        `messages.messages_of`.
        """
        template = self._template(tokenizer, where)
        plain = messages_of(messages, where)
        if checked:
            plain = _with_known_roles(plain, template, where)
        continued = not whole and plain[-1]["role"] == "assistant"
        if continued and plain[-1].get("tool_calls"):
            raise UserError(
                f"{where} ends with tool calls of the assistant, which cannot be continued. Add the result of the tool "
                "as a message of the role 'tool', or remove the message."
            )
        if continued and "content" not in plain[-1]:
            raise UserError(
                f"{where} ends with reasoning of the assistant without content, which cannot be continued. Add the "
                "beginning of its answer as the content, or remove the message."
            )
        arguments: dict[str, Any] = {
            "tools": [dict(tool) for tool in self.tools] or None,
            "add_generation_prompt": not whole and not continued,
            **self.template_kwargs,
        }
        text = _rendered(tokenizer, plain, where, continue_final_message=continued, **arguments)
        if checked:
            variables = {**tokenizer.special_tokens_map, **arguments, "tools": [TOOL] if arguments["tools"] else None}
            _check_all_written(template, plain, variables, where)
        return text

    def _template(self, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
        """Return the source of the chat template. Raises UserError for arguments that it would ignore."""
        if tokenizer.chat_template is None:
            raise UserError(
                f"{where} is a conversation, but the tokenizer has no chat template.\n"
                "  Use the tokenizer of an instruct model, set its chat_template, or give the prompts as texts."
            )
        tools = [dict(tool) for tool in self.tools] or None
        template = tokenizer.get_chat_template(tools=cast(Any, tools))
        if not self.template_kwargs and not self.tools:
            return template
        known = _variables(template)
        for name in self.template_kwargs:
            if name not in known:
                raise UserError(
                    f"{where}: the chat template has no argument {name!r}{did_you_mean(nearest(name, known))} It has "
                    f"{', '.join(sorted(known))}."
                )
        if self.tools and "tools" not in known:
            raise UserError(f"{where} has tools, but the chat template does not use them.")
        return template


def _with_known_roles(messages: list[dict[str, Any]], template: str, where: str) -> list[dict[str, Any]]:
    """Return the messages, those of a developer as the system's if the template does not name developers.

    Raises UserError for a role that no template has and this one does not name, and for tool calls that it ignores.
    """
    found = []
    for number, message in enumerate(messages, 1):
        role = message["role"]
        named = f"'{role}'" in template or f'"{role}"' in template
        if role not in ROLES and not named:
            raise UserError(
                f"{where}: message {number} has the role {role!r}, which the chat template does not "
                f"know{did_you_mean(nearest(role, ROLES))} Expected one of {', '.join(ROLES)}."
            )
        if message.get("tool_calls") and "tool_calls" not in template:
            raise UserError(
                f"{where}: message {number} has tool calls, but the chat template leaves them out. Write them into its "
                "content, or use a model whose template has tool_calls."
            )
        found.append({**message, "role": "system"} if role == "developer" and not named else message)
    return found


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str, **arguments: Any) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except (TemplateError, ValueError, TypeError) as error:
        system = any(message["role"] == "system" for message in messages)
        advice = f"\n  If it is the role 'system' that it does not have: {_other_place('system')}" if system else ""
        raise UserError(
            f"{where}: the chat template rejects the conversation {brief(messages)}: {error}{advice}"
        ) from error


def _other_place(role: str) -> str:
    if role in ("system", "developer"):
        return "Write its text into the first message of the user, and remove data.system_prompt if that set it."
    return "Write its text into another message, or remove the example."


def _check_all_written(template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a template leaves the content of a message out, as some do with the role "system"."""
    marks = {i: f"{MARK}-{i}." for i, message in enumerate(messages) if message.get("content", "").strip()}
    marked = [{**message, "content": marks[i]} if i in marks else message for i, message in enumerate(messages)]
    written = _written(template, json.dumps(marked, default=str), json.dumps(variables, sort_keys=True, default=str))
    for i, mark in marks.items():
        if written is not None and mark not in written:
            role = messages[i]["role"]
            content = messages[i]["content"]
            raise UserError(
                f"{where}: the chat template leaves out message {i + 1}, of the role {role!r}: {brief(content)}. "
                f"{_other_place(role)}"
            )


@lru_cache(maxsize=1024)
def _written(template: str, messages: str, variables: str) -> str | None:
    """Render messages (JSON) with the variables of a template (JSON). None if it rejects these messages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            conversations=[json.loads(messages)], chat_template=template, **json.loads(variables)
        )
    except Exception:  # a template may check contents, and the caller has rendered the real ones
        return None
    return str(rendered[0][0])  # of one conversation


@lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    """Names that a Jinja template reads but does not set."""
    import jinja2
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _generation_tag()])
    try:
        found = meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template cannot be parsed: {error}") from error
    return frozenset(found) - GIVEN


def _generation_tag() -> Any:
    """The tag ``{% generation %}``, with which templates of transformers mark the assistant's tokens."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation


def _from_json(value: object, where: str, column: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: column {column!r} is not JSON ({error}): {value[:60]!r}") from error


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
