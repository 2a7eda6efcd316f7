"""Sending an answer, whole or as server-sent events, and noticing that its client has left."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .answer import Answer, Update
from .errors import ApiError

CLIENT_LEFT = 499  # never seen by anyone: the client has closed
HEARTBEAT_SECONDS = 15.0  # of silence, as while a long prompt is read: proxies close connections that say nothing

T = TypeVar("T")
_spell = msgspec.json.Encoder().encode  # a fifth of the library's own time, and a token's greatest cost here


@dataclass(frozen=True)
class Event:
    """A server-sent event: JSON data, or a text that is sent as it stands."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        data = self.data.encode() if isinstance(self.data, str) else _spell(self.data)
        name = f"event: {self.name}\n".encode() if self.name else b""
        return b"%bdata: %b\n\n" % (name, data)


class Shape(Protocol):
    """An API's form of one answer. A stream calls opening, events of every update, closing; a body collect and whole."""

    def opening(self) -> list[Event]:
        """Before the first update."""

    def events(self, choice: int, update: Update) -> list[Event]:
        """Of one update; none if it shows nothing yet."""

    def closing(self) -> list[Event]:
        """After all choices have ended."""

    def failure(self, error: ApiError) -> Event:
        """The last event of a stream that is broken off."""

    def heartbeat(self) -> bytes:
        """What is sent after a long silence."""

    def collect(self, choice: int, update: Update) -> None:
        """Keep an update for the body."""

    def whole(self) -> dict[str, Any]:
        """The body."""


async def deliver(request: Request, answer: Answer, shape: Shape, stream: bool, headers: dict[str, str]) -> Response:
    """The response. Raises ApiError for a whole answer that is broken off."""
    if stream:
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _Stream(_encoded(answer, shape), answer, media_type="text/event-stream", headers=fixed | headers)

    async def collect() -> Response:
        async for batch in answer.updates():
            for update in batch:
                shape.collect(*update)
        return JSONResponse(shape.whole(), headers=headers)

    try:
        return await _unless_gone(collect(), request.receive) or Response(status_code=CLIENT_LEFT)
    finally:
        answer.close()


class _Stream(StreamingResponse):
    """A stream that ends with its client, also while the ranks have nothing to say yet."""

    def __init__(self, content: AsyncIterator[bytes], answer: Answer, **options: Any) -> None:
        super().__init__(content, **options)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(self.stream_response(send), receive)
        finally:
            self._answer.close()


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


def _joined(events: list[Event]) -> bytes:
    """One write to the client, however many events a turn of the loop has brought."""
    return b"".join([event.encode() for event in events])


async def _encoded(answer: Answer, shape: Shape) -> AsyncIterator[bytes]:
    """After an error nothing follows, so that nobody takes a broken answer for a whole one."""
    try:
        yield _joined(shape.opening())
        async for batch in answer.updates(HEARTBEAT_SECONDS):
            if not batch:
                yield shape.heartbeat()
            elif events := [event for update in batch for event in shape.events(*update)]:
                yield _joined(events)
        yield _joined(shape.closing())
    except ApiError as error:
        yield shape.failure(error).encode()
    except Exception:  # the status is out already: an error event is the only way left to say it
        yield shape.failure(internal_error()).encode()
    finally:
        answer.close()


def internal_error() -> ApiError:
    """Logs the exception being handled; what the client is told of it."""
    traceback.print_exc(file=sys.stderr)
    return ApiError(503, "internal error; the server's log has it", kind="server_error")
