"""What is noted of each HTTP request: a count for `/metrics`, and a line of JSON where a log is kept.

A line tells who, what, how it ended and how fast, and of each answer the tokens. What was asked and answered is left
out unless `content` says otherwise; headers, and so keys, never get in.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .log_file import LogFile
from .meters import Meters
from .opened import OpenRequest

_UNLOGGED = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/status"})  # asked every few seconds
_MOST_CONTENT = 1 << 20  # bytes of a body that a line repeats
_spell = msgspec.json.Encoder().encode


@dataclass
class Entry:
    """One HTTP request in the making; `body` and `reply` stay empty where content is not logged."""

    number: int
    arrived: datetime = field(default_factory=lambda: datetime.now(UTC))
    began: float = field(default_factory=time.monotonic)
    answers: list[OpenRequest] = field(default_factory=list)
    status: int | None = None
    sent: int = 0
    body: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)


_current: ContextVar[Entry | None] = ContextVar("current request", default=None)


def note_answer(opened: OpenRequest) -> None:
    """The HTTP request being handled has asked the engine for this answer."""
    entry = _current.get()
    if entry is not None:
        entry.answers.append(opened)


class Observed:
    """An application whose requests are counted by path and status, and logged. `paths`: those that exist."""

    def __init__(
        self, application: ASGIApp, paths: frozenset[str], meters: Meters, log: LogFile | None, content: bool
    ) -> None:
        self._application = application
        self._paths = paths
        self._meters = meters
        self._log = log
        self._content = content and log is not None
        self._number = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        self._number += 1
        entry = Entry(self._number)

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            else:
                body = message.get("body", b"")
                entry.sent += len(body)
                if self._content:
                    _keep(entry.reply, body)
            await send(message)

        async def noted_receive() -> Message:
            message = await receive()
            if self._content:
                _keep(entry.body, message.get("body", b""))
            return message

        token = _current.set(entry)
        try:
            await self._application(scope, noted_receive, noted_send)
        finally:
            _current.reset(token)
            path = scope["path"]
            self._meters.count_response(path if path in self._paths else "other", entry.status)
            if self._log is not None and path not in _UNLOGGED:
                self._log.write(_line(scope, entry, self._content))


def _keep(kept: bytearray, more: bytes) -> None:
    kept += more[: _MOST_CONTENT + 1 - len(kept)]  # one byte too many tells that there was more


def _line(scope: Scope, entry: Entry, content: bool) -> str:
    client = scope.get("client")
    facts: dict[str, Any] = {
        "time": entry.arrived.isoformat(timespec="microseconds"),
        "number": entry.number,
        "client": _address(*client) if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": entry.status,
        "ms": round(1000 * (time.monotonic() - entry.began), 3),
        "sent_bytes": entry.sent,
        "answers": [
            {"prepared_ms": round(1000 * (opened.started - entry.began), 3)} | opened.facts()
            for opened in entry.answers
        ],
    }
    if content:
        facts |= {"request": _content(entry.body), "response": _content(entry.reply)}
    return _spell(facts).decode()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _content(raw: bytearray) -> Any:
    """JSON as JSON, else the text; what was too long ends with an ellipsis."""
    if len(raw) > _MOST_CONTENT:
        return raw[:_MOST_CONTENT].decode(errors="replace") + "…"
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(raw)))
    except (msgspec.DecodeError, msgspec.EncodeError, UnicodeError, RecursionError):
        return raw.decode(errors="replace")
