"""Routes, limits and errors of the server.

Each error is a JSON object as OpenAI's: 400 for a request that is not valid or does not fit the limits, 401 without
the key, 404 for another model, 408 for a body that does not arrive, 413 for one that is too large, 429 when the queue
is full, 503 while the server stops, 500 if the model or the reward fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nlgrpo import __version__
from nlgrpo.apps.respond.answers import Answer
from nlgrpo.apps.respond.batching import Answer as Responses
from nlgrpo.apps.respond.batching import Batcher, Closed, Job, QueueFull
from nlgrpo.apps.respond.options import VALUE
from nlgrpo.apps.respond.requests import ChatRequest, Request, TextRequest
from nlgrpo.apps.respond.responder import Responder
from nlgrpo.data.conversations import ChatOptions, Prompt
from nlgrpo.engine.generation import check_prompts
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserError

BODY_SECONDS = 30.0  # for the body of a request to arrive
ENCODING = 2  # requests whose prompts are tokenized at the same time
WATCH_SECONDS = 0.5  # between checks that the client is still there


class ApiError(Exception):
    """Error that the client sees."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def response(self) -> JSONResponse:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return JSONResponse({"error": error}, self.status, headers)


@dataclass(frozen=True)
class ServerLimits:
    """What a request may ask for."""

    choices: int = 16
    """Responses per request: prompts times n."""
    body: int = 1 << 20
    """Bytes of the body."""
    api_key: str | None = None
    """Key that requests have to send as ``Authorization: Bearer KEY``."""


class Service:
    """Turns requests into jobs, and waits for their responses."""

    def __init__(self, batcher: Batcher, name: str, limits: ServerLimits) -> None:
        self.batcher = batcher
        self.name = name
        self.limits = limits
        self.encoding = asyncio.Semaphore(ENCODING)

    @property
    def responder(self) -> Responder:
        return self.batcher.responder

    async def chat(self, request: ChatRequest, http: HttpRequest) -> Response:
        """Respond to a conversation."""
        self._check(request, 1)
        chat = self.responder.chat
        chat = replace(chat, template_kwargs={**chat.template_kwargs, **(request.chat_template_kwargs or {})})
        try:
            messages = chat.conversation([message.plain() for message in request.messages], "messages")
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_prompt", "messages") from error
        ids = await self._encode([messages], chat)
        return await self._respond(request, [messages], ids, http, chat=True)

    async def text(self, request: TextRequest, http: HttpRequest) -> Response:
        """Continue texts."""
        given = request.prompts
        self._check(request, len(given))
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        if texts:
            return await self._respond(request, texts, await self._encode(texts, ChatOptions()), http, chat=False)
        ids = [prompt for prompt in given if not isinstance(prompt, str)]
        self._fits(ids, self._sampling(request))  # before an id outside the vocabulary is decoded
        prompts = self.responder.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return await self._respond(request, prompts, ids, http, chat=False)

    def _check(self, request: Request, prompts: int) -> None:
        if request.model not in (None, self.name):
            raise ApiError(
                404, f"the model {request.model!r} does not exist; this server has {self.name!r}", "model_not_found",
                "model",
            )  # fmt: skip
        if prompts * request.n > self.limits.choices:
            raise ApiError(
                400, f"{prompts} prompts x n = {request.n}: this server returns at most {self.limits.choices} "
                "responses per request", "invalid_value", "n",
            )  # fmt: skip

    def _sampling(self, request: Request) -> Sampling:
        """Sampling options of a request, with the server's for those that it does not set."""
        default = self.responder.sampling
        tokens = request.tokens
        if tokens is not None and tokens > default.max_new_tokens:
            raise ApiError(
                400, f"max_tokens = {tokens}: this server generates at most {default.max_new_tokens} tokens",
                "invalid_value", "max_tokens",
            )  # fmt: skip
        asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(default, **given, max_new_tokens=tokens or default.max_new_tokens)

    async def _encode(self, prompts: Sequence[Prompt], chat: ChatOptions) -> list[list[int]]:
        """Tokenize in a thread: a body of the largest size takes seconds, in which the loop has to respond."""
        try:
            async with self.encoding:
                batch = await asyncio.to_thread(self.responder.batch, prompts, chat)
                return batch.ids
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_prompt") from error

    def _fits(self, ids: Sequence[Sequence[int]], sampling: Sampling) -> None:
        try:
            check_prompts(self.responder.model.shape, ids, sampling)
        except ValueError as error:
            raise ApiError(400, str(error), "context_length_exceeded") from error

    async def _respond(
        self, request: Request, prompts: Sequence[Prompt], ids: list[list[int]], http: HttpRequest, *, chat: bool
    ) -> Response:
        sampling = self._sampling(request)
        choices = range(request.n)
        chooser = self.responder.chooser
        if request.stops and chooser is not None and chooser.how == VALUE:
            raise ApiError(
                400, "stop: this server chooses by a value, which belongs to the whole text", "invalid_value", "stop"
            )
        self._fits(ids, sampling)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        job = Job(
            ids=[own for own in ids for _ in choices],
            prompts=[prompt for prompt in prompts for _ in choices],
            keys=[_key(seed, place) for place in range(len(ids) * request.n)],
            sampling=sampling,
            stop=request.stops,
        )
        try:
            responses = await _wait(self.batcher.submit(job), http)
        except QueueFull:
            raise ApiError(
                429, f"{self.batcher.max_queue} requests are waiting; try again later", "queue_full"
            ) from None
        except Closed:
            raise ApiError(503, "the server is stopping", "stopping") from None
        except UserError as error:
            raise ApiError(500, str(error), "generation_failed") from error
        except Exception as error:
            raise ApiError(500, f"{type(error).__name__}; the server's log has more", "generation_failed") from error
        answer = Answer(self.name, chat, request, self.responder.tokenizer, ids, responses)
        if request.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        return JSONResponse(await asyncio.to_thread(answer.complete))


def _key(seed: int, place: int) -> int:
    """Key of the noise of a choice: a hash, so that seeds that follow each other share none."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{place}".encode()).digest()[:8]) >> 2


class ClientGone(Exception):
    """The client closed the connection."""


async def _wait(future: Future[Responses], http: HttpRequest) -> Responses:
    """Wait for the responses. Cancel the job if the client goes away; it is then not run if it is still waiting."""
    waiting = asyncio.ensure_future(asyncio.wrap_future(future))
    try:
        while not (await asyncio.wait([waiting], timeout=WATCH_SECONDS))[0]:
            if await http.is_disconnected():
                raise ClientGone
        return waiting.result()
    finally:
        waiting.cancel()


def build_app(batcher: Batcher, name: str, limits: ServerLimits) -> ASGIApp:
    """Build the application: ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models`` and ``/health``."""
    service = Service(batcher, name, limits)
    app = FastAPI(title="nlgrpo", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: HttpRequest) -> Response:
        return await service.chat(request, http)

    @app.post("/v1/completions")
    async def completions(request: TextRequest, http: HttpRequest) -> Response:
        return await service.text(request, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name)]}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        if model != name:
            raise ApiError(404, f"the model {model!r} does not exist; this server has {name!r}", "model_not_found")
        return _model(name)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "procedure": str(service.responder.procedure), "waiting": len(batcher)}

    @app.exception_handler(ApiError)
    async def refused(_: HttpRequest, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientGone)
    async def gone(_: HttpRequest, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def missing(_: HttpRequest, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return ApiError(error.status_code, str(error.detail), code).response()

    return Gate(app, limits)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "nlgrpo"}


def _invalid(error: RequestValidationError) -> ApiError:
    """The first error of a body that is not valid JSON, or not a valid request."""
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {found.get('ctx', {}).get('error', '')}", "invalid_json")
    where = ".".join(str(part) for part in found["loc"][1:] if not _names_a_type(part))
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        message = "unknown option"
    elif found["type"] == "missing" and not where:
        message = "the body is empty"
    elif found["type"] == "model_attributes_type" and not where:
        message = "the body must be a JSON object, sent as application/json"
    return ApiError(400, f"{where}: {message}" if where else message, "invalid_value", where or None)


def _names_a_type(part: str | int) -> bool:
    """Whether a part of an error's place is an alternative of a union, such as "str" or "list[int]"."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or part.startswith("constrained-"))


class Gate:
    """Checks the key, and reads the body up to its limit, before the application sees a request."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            if scope["path"] != "/health":
                self._authorize(headers.get(b"authorization", b""))
            body = await self._body(headers.get(b"content-length", b"0"), receive)
        except ApiError as error:
            response = error.response()
            response.headers["Connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        except ClientGone:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, send)

    def _authorize(self, header: bytes) -> None:
        key = self.limits.api_key
        if key is not None and not hmac.compare_digest(header, b"Bearer " + key.encode()):
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")

    async def _body(self, announced: bytes, receive: Receive) -> bytes:
        too_large = ApiError(413, f"the body has more than {self.limits.body:,} bytes", "body_too_large")
        if announced.isdigit() and int(announced) > self.limits.body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > self.limits.body:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout") from None
