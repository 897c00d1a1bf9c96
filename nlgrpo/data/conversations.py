"""Conversations: their text, and their token ids by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from nlgrpo.data.sources import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]  # a text, or a conversation

# Variables that `apply_chat_template` sets itself.
GIVEN = {
    "messages", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token",
    "unk_token",
}  # fmt: skip


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


def brief(value: object) -> str:
    """Return the type and the beginning of a value, for messages."""
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


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

    def conversation(self, prompt: Prompt) -> Prompt:
        """Return the prompt as a conversation, if these options make one of it."""
        if isinstance(prompt, str):
            if not self.from_text and self.system_prompt is None:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is not None and not any(message["role"] == "system" for message in prompt):
            prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        return prompt

    def with_row(self, row: Mapping[str, Any], where: str) -> ChatOptions:
        """Return the options for a row of the data. Raises ValueError for columns of another kind."""
        kwargs, tools = row.get("chat_template_kwargs"), row.get("tools")
        if kwargs is None and tools is None:
            return self
        kwargs, tools = _from_json(kwargs, where, "chat_template_kwargs"), _from_json(tools, where, "tools")
        if not isinstance(kwargs, Mapping | None):
            raise ValueError(f"{where}: column 'chat_template_kwargs' holds {brief(kwargs)} instead of an object.")
        if not (tools is None or (isinstance(tools, list | tuple) and all(isinstance(t, Mapping) for t in tools))):
            raise ValueError(f"{where}: column 'tools' holds {brief(tools)} instead of a list of tool schemas.")
        # Arrow gives all rows of a column the same keys, and None to those that a row does not have.
        given = {name: value for name, value in (kwargs or {}).items() if value is not None}
        added = [cast(Mapping[str, Any], without_none(tool)) for tool in tools or ()]
        return ChatOptions(self.system_prompt, self.from_text, {**self.template_kwargs, **given}, [*self.tools, *added])

    def encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the place where the assistant answers.

        As in TRL, a conversation that ends with an assistant message is continued. ``generation_prompt`` = False leaves
        the beginning of the answer out. Raises ValueError without a chat template, for arguments that it does not have,
        and for a conversation that it rejects.
        """
        return list(cast(list[int], self._apply(tokenizer, messages, where, generation_prompt, tokenize=True)))

    def text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Like `encode`, but return the text that is tokenized."""
        return str(self._apply(tokenizer, messages, where, generation_prompt, tokenize=False))

    def _apply(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        generation_prompt: bool,
        *,
        tokenize: bool,
    ) -> Any:
        from jinja2 import TemplateError

        tools = [dict(tool) for tool in self.tools] or None
        self._check(tokenizer, where)
        continued = generation_prompt and messages[-1]["role"] == "assistant"
        try:
            return tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=cast(Any, tools),
                add_generation_prompt=generation_prompt and not continued,
                continue_final_message=continued,
                tokenize=tokenize,
                return_dict=False,
                **self.template_kwargs,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where}: the chat template rejects the conversation {brief(list(messages))}: {error}"
            ) from error

    def _check(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        """Raise ValueError for arguments that the template would ignore."""
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{where} is a conversation, but the tokenizer has no chat template.\n"
                "  Use the tokenizer of an instruct model, set its chat_template, or give the prompts as texts."
            )
        if not self.template_kwargs and not self.tools:
            return
        tools = [dict(tool) for tool in self.tools] or None
        known = _variables(tokenizer.get_chat_template(tools=cast(Any, tools)))
        for name in self.template_kwargs:
            if name not in known:
                raise ValueError(
                    f"{where}: the chat template has no argument {name!r}. It has {', '.join(sorted(known))}."
                    f"{nearest(name, known)}"
                )
        if self.tools and "tools" not in known:
            raise ValueError(f"{where} has tools, but the chat template does not use them.")


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
        raise ValueError(f"the chat template cannot be parsed: {error}") from error
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
        raise ValueError(f"{where}: column {column!r} is not JSON ({error}): {value[:60]!r}") from error


def without_none(value: Any) -> Any:
    """Remove keys without a value from nested objects: Arrow gives all objects of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list | tuple) else value
