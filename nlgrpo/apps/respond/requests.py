"""Requests of OpenAI's protocol: chat and plain completions, checked."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from nlgrpo.data.conversations import brief, content_text
from nlgrpo.errors import UserError

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1)]
Ids = Several[int]
TopK = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda k: max(k, 0))]  # -1 is off, as 0

# Options that have no effect on the response.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls"}
)  # fmt: skip

# Options that are not supported, with their neutral values, which are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "echo": (None, False),
    "best_of": (None, 1),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
    "verbosity": (None,),
    # of vLLM
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "use_beam_search": (None, False),
}


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = True
    """Of OpenAI, whose streams have padding against eavesdroppers; there is none here."""


class Request(BaseModel):
    """Options of both kinds of completion. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[str] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    candidates: bool = False
    """Report all candidates with their scores, besides the chosen one."""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in NEUTRAL.items():
            if name in data and name not in cls.model_fields and data[name] not in neutral:
                raise UserError(f"{name!r} is not supported by this server")
        if data.get("stream_options") is not None and not data.get("stream"):
            raise UserError("stream_options: only with stream")
        return {
            name: value
            for name, value in data.items()
            if value is not None and (name in cls.model_fields or (name not in NEUTRAL and name not in IGNORED))
        }

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: object) -> list[str]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise UserError(f"expected a text or a list of texts, got {brief(value)}")
        if "" in strings:
            raise UserError("an empty string stops before the first token; leave it out")
        return strings

    @property
    def tokens(self) -> int | None:
        """Requested number of tokens of a completion."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)


class Message(BaseModel):
    """Message of a conversation, with the fields that chat templates know."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Drop empty fields, such as those that clients return with a response; refuse others by name."""
        if not isinstance(data, dict):
            return data
        kept = {
            name: value for name, value in data.items() if name == "content" or value not in (None, False, "", [], {})
        }
        if others := kept.keys() - cls.model_fields.keys():
            raise UserError(
                f"{min(others)!r} is not supported in a message; this server takes {', '.join(cls.model_fields)}"
            )
        if kept.get("tool_calls") and kept.get("content") == []:
            del kept["content"]
        return kept

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: object) -> str | None:
        return None if content is None else content_text(content, "the message")

    def plain(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        return self.model_dump(exclude_none=True) | {"content": self.content}


class ChatRequest(Request):
    """Request of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, as in vLLM: ``{"enable_thinking": false}``."""
    logprobs: bool | None = None
    continue_final_message: bool | None = None
    """As in vLLM: the response continues the last message. It always does if that is the assistant's."""
    add_generation_prompt: bool | None = None
    """As in vLLM: the response is a message of its own. It always is after a message that is not the assistant's."""

    @model_validator(mode="after")
    def _continued(self) -> ChatRequest:
        role = self.messages[-1].role
        continued = role == "assistant"
        for name, right in (("continue_final_message", continued), ("add_generation_prompt", not continued)):
            if getattr(self, name) not in (None, right):
                raise UserError(
                    f"{name} = {json.dumps(not right)} is not supported where the last message has the role {role!r}: "
                    f"the response {'continues it' if continued else 'is a message of its own'}; leave the option out"
                )
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            both = f"max_tokens = {self.max_tokens}, max_completion_tokens = {self.max_completion_tokens}"
            raise UserError(f"{both}: give one of them")
        return self

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class TextRequest(Request):
    """Request of ``/v1/completions``."""

    prompt: str | Ids | Several[str] | Several[Ids]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
