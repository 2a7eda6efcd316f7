"""The HTTP routes. Every answer to bad input has OpenAI's error shape; nothing here ends in a 500."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..messages import GenerateRequest
from .answer import AnswerReader
from .assembly import AnswerStyle
from .chat import ChatFormat, plan_chat
from .chat_request import clean_messages
from .completion import CompletionFormat, plan_completion
from .errors import ApiError, bad_request
from .hub import Hub
from .metrics import metrics_text
from .page import page_routes
from .plan import ServePlan
from .prompt import encode_prompt
from .sampling import SamplingDefaults
from .schema import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody, decode_body
from .state import ServerState
from .supervisor import Supervisor
from .workers import Workers

MAX_BODY_BYTES = 32 << 20
_CLIENT_LEFT = 499  # never seen by anyone: the client has closed

T = TypeVar("T")
Format = ChatFormat | CompletionFormat
Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The handlers, over one plan, one hub and one supervisor; prompts are made by `workers`."""

    def __init__(self, plan: ServePlan, hub: Hub, supervisor: Supervisor, workers: Workers) -> None:
        self._plan = plan
        self._hub = hub
        self._supervisor = supervisor
        self._workers = workers
        self._defaults = SamplingDefaults.of(plan.tokenizer.generation)
        self._created = int(time.time())
        self._state = ServerState(plan, hub, supervisor)

    def application(self) -> Starlette:
        """The ASGI application."""
        open_routes: list[tuple[str, str, Handler]] = [
            ("GET", "/health/live", self.live),
            ("GET", "/health/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("GET", "/status", self.status),
        ]
        keyed_routes: list[tuple[str, str, Handler]] = [
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completion),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ]
        routes = [Route(path, self._guard(handler, False), methods=[verb]) for verb, path, handler in open_routes]
        routes += [Route(path, self._guard(handler, True), methods=[verb]) for verb, path, handler in keyed_routes]
        routes += page_routes()
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def _guard(self, handler: Handler, keyed: bool) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                if keyed:
                    self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return _error_response(error)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_LEFT)
            except Exception:
                return _error_response(_internal_error())

        return guarded

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not self._plan.keys.admits(given or request.headers.get("x-api-key", "")):
            raise ApiError(401, "wrong or missing API key", kind="authentication_error", code="invalid_api_key")

    async def chat(self, request: Request) -> Response:
        body = decode_body(await _read_body(request), ChatBody)
        self._hub.check_room()
        generate, style = await self._workers.run(plan_chat, body, self._plan, self._defaults)
        shape = ChatFormat(self._plan.tokenizer, *self._stamp(), bool(body.logprobs))
        return await self._answer(request, body, generate, style, shape)

    async def completion(self, request: Request) -> Response:
        body = decode_body(await _read_body(request), CompletionBody)
        self._hub.check_room()
        generate, style = await self._workers.run(plan_completion, body, self._plan, self._defaults)
        echo = generate.prompt if body.echo else None
        shape = CompletionFormat(self._plan.tokenizer, *self._stamp(), body.logprobs is not None, echo)
        return await self._answer(request, body, generate, style, shape)

    async def models(self, request: Request) -> Response:
        identity, facts = self._plan.identity, self._supervisor.facts
        model = {
            "id": self._plan.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "duovolt",
            "max_model_len": self._plan.max_context,
            "duovolt": {
                "conversion_id": identity.conversion_id,
                "recipe": identity.recipe,
                "ranks": self._plan.size,
                "backend": self._plan.backend.name,
                "drafts": self._plan.drafts,
                "lanes": self._plan.options.lanes,
                "max_context": self._plan.max_context,
                **facts,
            },
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        body = decode_body(await _read_body(request), TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        tokens = await self._workers.run(self._tokens_of, body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._plan.max_context})

    async def detokenize(self, request: Request) -> Response:
        body = decode_body(await _read_body(request), DetokenizeBody)
        if (largest := max(body.tokens, default=0)) >= self._plan.tokenizer.size:
            raise bad_request(f"tokens: {largest} is not below {self._plan.tokenizer.size}", "tokens")
        return JSONResponse({"prompt": self._plan.tokenizer.decode(body.tokens)})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """200 if ranks are up and their last step, or sign of idleness, is recent; else 503. The body tells more."""
        ready = self._supervisor.ready and not self._hub.draining
        counters, age = self._hub.counters, self._supervisor.step_age
        body = {
            "ready": ready,
            "ranks": self._plan.size,
            "model": self._plan.model_id,
            "running": self._hub.running,
            "waiting": self._hub.waiting,
            "tokens_per_second": round(self._hub.tokens_per_second(), 1),
            "acceptance": round(counters.accepted / counters.proposed, 3) if counters.proposed else None,
            "last_step_seconds": None if age is None else round(age, 2),
        }
        headers = {} if ready else {"Retry-After": str(self._hub.retry_after)}
        return JSONResponse(body, status_code=200 if ready else 503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics_text(self._state))

    async def status(self, request: Request) -> Response:
        """What the page shows of ranks, lanes, memory and cards; nothing of anybody's words."""
        return JSONResponse(await self._state.picture(), headers={"Cache-Control": "no-store"})

    def _tokens_of(self, body: TokenizeBody) -> list[int]:
        text = body.prompt
        if text is None:
            variables = dict(body.chat_template_kwargs or {})
            text = self._plan.template.render(clean_messages(body.messages or []), body.tools, variables)
        return encode_prompt(self._plan.tokenizer, text, self._plan.max_context)

    def _stamp(self) -> tuple[str, int, str]:
        return uuid.uuid4().hex[:24], int(time.time()), self._plan.model_id

    async def _answer(
        self, request: Request, body: SamplingBody, generate: GenerateRequest, style: AnswerStyle, shape: Format
    ) -> Response:
        reader = AnswerReader(self._hub, self._plan.tokenizer, self._hub.submit(generate), style)
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            stream = _stream(reader, shape, with_usage)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return _AnswerStream(stream, reader, media_type="text/event-stream", headers=headers)
        return await _whole(request, reader, shape)


class _AnswerStream(StreamingResponse):
    """A stream that ends with its client, also while the ranks have nothing to say yet."""

    def __init__(self, content: AsyncIterator[bytes], reader: AnswerReader, **options: Any) -> None:
        super().__init__(content, **options)
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(self.stream_response(send), receive)
        finally:
            self._reader.close()


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or None once the client has closed, with `work` cancelled."""

    async def client_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    working, gone = asyncio.create_task(work), asyncio.create_task(client_gone())
    either: list[asyncio.Future[Any]] = [working, gone]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _stream(reader: AnswerReader, shape: Format, with_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events; after an error no [DONE] follows, so that nobody takes a broken answer for a whole one."""
    usage_key: dict[str, Any] = {"usage": None} if with_usage else {}
    try:
        for chunk in shape.opening():
            yield _event(chunk | usage_key)
        async for update in reader.updates():
            for chunk in shape.chunks(update):
                yield _event(chunk | usage_key)
        for chunk in shape.closing(reader):
            yield _event(chunk | usage_key)
        if with_usage:
            yield _event(shape.usage_chunk(reader))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body())
    except Exception:  # the status is out already: an error event is the only way left to say it
        yield _event(_internal_error().body())
    finally:
        reader.close()


async def _whole(request: Request, reader: AnswerReader, shape: Format) -> Response:
    async def collect() -> Response:
        async for update in reader.updates():
            shape.collect(update)
        return JSONResponse(shape.whole(reader))

    try:
        return await _unless_gone(collect(), request.receive) or Response(status_code=_CLIENT_LEFT)
    finally:
        reader.close()


async def _read_body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
    return b"".join(parts)


def _internal_error() -> ApiError:
    """Logs the exception being handled; what the client is told of it."""
    traceback.print_exc(file=sys.stderr)
    return ApiError(503, "internal error; the server's log has it", kind="server_error")


def _too_large() -> ApiError:
    return ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed here"}
    return JSONResponse(
        ApiError(error.status_code, message.get(error.status_code, error.detail)).body(),
        status_code=error.status_code,
        headers=error.headers,
    )
