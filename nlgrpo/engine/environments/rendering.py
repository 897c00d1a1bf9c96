"""From messages to tokens, by the library `renderers`, and from the policy's tokens to a message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nlgrpo.data.conversations import ChatOptions, messages_of
from nlgrpo.engine.backends.base import EngineError
from nlgrpo.errors import UserError

MARK = "nlgrpo-7f3a9c"  # stands for the policy's answer in a rendered conversation

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class Rendering:
    """Renders the conversations of ``model``, a path or a name on the Hugging Face Hub.

    ``options``: fields of a configuration of `renderers`, such as ``{"name": "qwen3"}``. Without a name the renderer is
    that of the model's name. Models that `renderers` does not know use their chat template; tool calls and reasoning in
    their answers are recognised with the options ``tool_parser`` and ``reasoning_parser``.
    ``template_kwargs``: arguments of the chat template.

    Raises UserError for options that `renderers` rejects, and for a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        options: Mapping[str, Any],
        template_kwargs: Mapping[str, Any],
    ) -> None:
        from pydantic import TypeAdapter, ValidationError
        from renderers import RendererConfig, create_renderer
        from renderers.base import MODEL_RENDERER_MAP

        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        name = options.get("name") or MODEL_RENDERER_MAP.get(model, "default")
        self.by_template = name == "default"
        fields = {**options, "name": name}
        if not self.by_template:
            # Keep the reasoning of earlier answers: the policy sampled it, and its tokens must not change.
            fields = {"thinking_retention": "all", **template_kwargs, **fields}
        elif tokenizer.chat_template is None:
            raise UserError("an environment needs a chat template; use the tokenizer of an instruct model")
        try:
            config = TypeAdapter[Any](RendererConfig).validate_python(fields)
            self.renderer: Any = create_renderer(tokenizer, config)
        except Exception as error:  # renderers raise many kinds, such as AssertionError for a missing token
            causes = [part["msg"] for part in error.errors()] if isinstance(error, ValidationError) else [str(error)]
            found = f"the renderer {name!r} of environment.renderer cannot be used"
            raise UserError(f"{found}: {'; '.join(causes)}") from error

    @property
    def description(self) -> str:
        """What renders messages."""
        return "the model's chat template" if self.by_template else f"renderer {self.renderer.config.name}"

    def begin(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens of a conversation, up to the place where the policy answers."""
        if self.by_template:
            options = ChatOptions(template_kwargs=self.template_kwargs, tools=list(map(_function, tools)))
            return options.encode(self.tokenizer, wire(messages), "a conversation of the environment")
        return list(self.renderer.render_ids(wire(messages), tools=list(tools) or None, add_generation_prompt=True))

    def extend(
        self, ids: Sequence[int], answer: Sequence[int], messages: Sequence[Message], new: int, tools: Tools
    ) -> list[int]:
        """Return the tokens that follow ``ids`` and the policy's ``answer`` before it answers again.

        ``messages``: the whole conversation; its last ``new`` messages follow the answer. The tokens so far do not
        change. Raises EngineError if the format of the model has no such continuation.
        """
        tail = messages[len(messages) - new :]
        if any(message["role"] == "assistant" for message in tail):
            raise EngineError(
                "the environment wrote a message of the assistant after the policy's, which is not supported"
            )
        if not self.by_template:
            extended = self.renderer.bridge_to_next_turn(list(ids), list(answer), wire(tail), tools=list(tools) or None)
            if extended is not None:
                return list(extended.token_ids[len(ids) + len(answer) :])
            if self.tokenizer.chat_template is None:
                raise EngineError(
                    f"the renderer {self.renderer.config.name!r} cannot continue a conversation without tokenizing the "
                    "policy's answer again, and the model has no chat template"
                )
        # Renderers refuse answers that are not well-formed, such as reasoning without an end; a policy samples them.
        return self._after(messages[: len(messages) - new - 1], tail, answer)

    def _after(self, before: Sequence[Message], tail: Sequence[Message], answer: Sequence[int]) -> list[int]:
        """Tokens that the chat template has after an answer, for a stand-in of the answer."""
        answered = [*wire(before), {"role": "assistant", "content": MARK}]
        options = ChatOptions(template_kwargs=self.template_kwargs)
        messages = [*answered, *wire(tail)]
        text = options.text(self.tokenizer, messages, "a conversation of the environment", checked=False)
        _, found, after = text.rpartition(MARK)
        if not found:
            raise EngineError(
                "the chat template leaves answers of the assistant out of the conversation; set environment.renderer"
            )
        tokens = list(self.tokenizer(after, add_special_tokens=False)["input_ids"])
        closed = len(answer) > 0 and tokens[:1] == [answer[-1]]  # the policy has ended its turn itself
        return tokens[1:] if closed else tokens

    def parse(self, answer: Sequence[int], prompt: Sequence[int], tools: Tools) -> Any:
        """Return the answer as `renderers.base.ParsedResponse`: content, reasoning and tool calls."""
        return self.renderer.parse_response(list(answer), tools=list(tools) or None, prompt_ids=list(prompt))

    def stop_ids(self) -> list[int]:
        """Token ids that end an answer."""
        return list(self.renderer.get_stop_token_ids())


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(tool)}


def wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: text, and tool calls as OpenAI writes them.

    Raises EngineError for content other than text.
    """
    return [_one(dict(message)) for message in messages]


def _one(message: dict[str, Any]) -> dict[str, Any]:
    found = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    try:
        [plain] = messages_of([found], "a conversation of the environment")
    except ValueError as error:
        raise EngineError(str(error)) from error
    return plain


def _call(call: Mapping[str, Any] | str) -> dict[str, Any]:
    call = json.loads(call) if isinstance(call, str) else call  # the output of `verifiers`
    if "function" in call:
        return dict(call)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }
