"""HTTP connections whose clients must get to the point: a request's head that does not come whole is not waited for.

And no more of them than leave open files to the rest of the server: ranks that start again need some.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import sys
import time
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError

ACCEPTED_AT_ONCE = 128  # connections in one turn of the loop
_MOST_FILES = 1 << 16
_OTHER_FILES = 256  # for ranks, workers, uploads, and what one turn accepts beyond the bound
_NEWS_SECONDS = 10.0
_LOOKS = 4  # while a head has its time
_FULL = (b"503 Service Unavailable\r\nRetry-After: 5", "server_error", "this server holds no more connections")
_NO_HTTP = (b"400 Bad Request", "invalid_request_error", "this is no HTTP/1.1 request, or a malformed one")
_SAID = b"""HTTP/1.1 %b\r
Connection: close\r
Content-Type: application/json\r
Content-Length: %d\r
\r
%b"""


def _said(status: bytes, kind: str, message: str) -> bytes:
    """A whole response for what never becomes a request, in the shape of the API's errors."""
    body = ApiError(int(status[:3]), message, kind=kind).body()
    raw = msgspec.json.encode(body)
    return _SAID % (status, len(raw), raw)


def most_connections() -> int:
    """Connections that leave room for other files. Raises this process's limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(files - _OTHER_FILES, files // 3)


class FileShortage:
    """A handler of the loop's exceptions that tells of a lack of open files now and then, not thousands of times a second."""

    def __init__(self) -> None:
        self._told = -_NEWS_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told >= _NEWS_SECONDS:
            self._told = time.monotonic()
            print(f"duovolt serve: no connection can be accepted: {error.strerror}.", file=sys.stderr, flush=True)


class PatientProtocol(H11Protocol):
    """uvicorn's own protocol with an end to its patience (its limit of 64 KiB for a head stands).

    Idle connections between requests are closed by its keep-alive timeout, bodies that stop by the reader of bodies.
    """

    head_seconds = 20.0
    most: int | None = None  # connections at a time; one more is told so and closed

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_looks: int | None = 0  # a look counts as much after a pause of the whole machine as without
        self._watch = self._next_look()
        if self.most is not None and len(self.connections) > self.most:
            transport.write(_said(*_FULL))
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._head_looks is None and self._between_requests():
            self._head_looks = 0
        super().data_received(data)
        if not self._between_requests():
            self._head_looks = None

    def send_400_response(self, msg: str) -> None:
        """The connection's last words; none where an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_said(*_NO_HTTP))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _next_look(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.head_seconds / _LOOKS, self._look)

    def _look(self) -> None:
        if self._head_looks is not None:
            self._head_looks += 1
        late = self._head_looks is not None and self._head_looks > _LOOKS
        if late and not self.transport.is_closing():
            self.transport.close()
        else:
            self._watch = self._next_look()
