"""Responses in OpenAI's protocol, complete or as a stream of server-sent events."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from nlgrpo.apps.respond.requests import ChatRequest, Request
from nlgrpo.apps.respond.responder import Response, Scored
from nlgrpo.data.encoding import BROKEN, decode


@dataclass(frozen=True)
class Answer:
    """The responses to one request; the choices of a prompt follow each other."""

    model: str
    chat: bool
    request: Request
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    responses: Sequence[Response]

    def complete(self) -> dict[str, Any]:
        """The JSON object of a response that is not streamed."""
        return self._head() | {"choices": list(map(self._choice, range(len(self.responses)))), "usage": self._usage()}

    def events(self) -> Iterator[str]:
        """Server-sent events: the chosen responses word by word, then their finish reasons and scores."""
        head = self._head(streamed=True)
        usage = self.request.stream_options
        asked = {"usage": None} if usage is not None and usage.include_usage else {}
        for i, response in enumerate(self.responses):
            if self.chat:
                yield _event(head | {"choices": [_delta(i, {"role": "assistant", "content": ""})]} | asked)
            for word in re.findall(r"\s*\S+|\s+", response.text):
                part = _delta(i, {"content": word}) if self.chat else _text(i, word)
                yield _event(head | {"choices": [part]} | asked)
            last = _delta(i, {}) if self.chat else _text(i, "")
            ending = {"finish_reason": response.best.finish_reason, "logprobs": self._logprobs(i)} | self._scores(
                response
            )
            yield _event(head | {"choices": [last | ending]} | asked)
        if asked:
            yield _event(head | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _head(self, streamed: bool = False) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * streamed) if self.chat else "text_completion"
        identity = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        return {"id": identity, "object": kind, "created": int(time.time()), "model": self.model}

    def _choice(self, i: int) -> dict[str, Any]:
        best = self.responses[i].best
        text = {"message": {"role": "assistant", "content": best.text}} if self.chat else {"text": best.text}
        ending = {"finish_reason": best.finish_reason, "logprobs": self._logprobs(i)}
        return {"index": i} | text | ending | self._scores(self.responses[i])

    def _scores(self, response: Response) -> dict[str, Any]:
        if not self.request.candidates:
            return {}
        return {
            "score": response.score,
            "candidates": [_candidate(one, j == response.chosen) for j, one in enumerate(response.candidates)],
        }

    def _logprobs(self, i: int) -> dict[str, Any] | None:
        """Log-probs of the tokens; the text of a token is what it adds to the tokens before it."""
        asked = getattr(self.request, "logprobs", None)
        if asked is None or asked is False:
            return None
        best = self.responses[i].best
        apart = isinstance(self.request, ChatRequest) and self.request.messages[-1].role != "assistant"
        before = [] if apart else list(self.prompts[i // self.request.n])
        starts = [[*before, *best.tokens[:t]] for t in range(len(best.tokens))]
        pieces = decode(self.tokenizer, starts, [[token] for token in best.tokens])
        if self.chat:
            rows = zip(pieces, best.logprobs, strict=True)
            return {
                "content": [
                    {"token": piece, "logprob": logprob, "bytes": _bytes(piece), "top_logprobs": []}
                    for piece, logprob in rows
                ]
            }
        offsets = [0, *accumulate(map(len, pieces))][:-1]
        return {
            "tokens": pieces, "token_logprobs": list(best.logprobs), "top_logprobs": None, "text_offset": offsets,
        }  # fmt: skip

    def _usage(self) -> dict[str, int | None]:
        prompt = sum(map(len, self.prompts))
        completion = sum(len(response.best.tokens) for response in self.responses)
        sampled = [response.sampled for response in self.responses]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "sampled_tokens": None if None in sampled else sum(tokens or 0 for tokens in sampled),
        }


def _bytes(piece: str) -> list[int] | None:
    """UTF-8 bytes of a token; None for a part of a character."""
    return None if BROKEN in piece else list(piece.encode())


def _delta(i: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}


def _text(i: int, text: str) -> dict[str, Any]:
    return {"index": i, "text": text, "finish_reason": None, "logprobs": None}


def _candidate(one: Scored, chosen: bool) -> dict[str, Any]:
    return {
        "text": one.text, "score": one.score, "finish_reason": one.finish_reason, "tokens": len(one.tokens),
        "chosen": chosen,
    }  # fmt: skip


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
