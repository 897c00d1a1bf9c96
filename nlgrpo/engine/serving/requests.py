"""Requests of OpenAI's protocol: chat and plain completions, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1)]
Ids = Several[int]
Stop = Annotated[str, Field(min_length=1)]

# Options that have no effect on the response.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)

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
}


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Request(BaseModel):
    """Options of both kinds of completion. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
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
                raise ValueError(f"{name!r} is not supported by this server")
        if data.get("stream_options") is not None and not data.get("stream"):
            raise ValueError("stream_options: only with stream")
        return {
            name: value
            for name, value in data.items()
            if value is not None and (name in cls.model_fields or (name not in NEUTRAL and name not in IGNORED))
        }

    @property
    def tokens(self) -> int | None:
        """Requested number of tokens of a completion."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(BaseModel):
    """Text in the content of a message; other kinds of content are refused."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return the message for the chat template. ``developer`` is a system message."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Request):
    """Request of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, as in vLLM: ``{"enable_thinking": false}``."""
    logprobs: bool | None = None

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
