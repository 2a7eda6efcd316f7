"""The path that a request means, however its client or a proxy before it has spelt it, and what it may have meant."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

_ADDRESS = re.compile(r"\Ahttps?://[^/]*", re.IGNORECASE)  # the path is decoded already: ? and # in it belong to it


class PlainPaths:
    """An application whose paths neither end in a slash nor carry the server's own address.

    A redirect would make clients send their body a second time, and would name whatever scheme and host the last proxy used.
    """

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": plain(scope["path"])}
        await self._application(scope, receive, send)


def plain(path: str) -> str:
    """The path of a request's target: of the absolute form (RFC 9112, 3.2.2), too, and without slashes at its end."""
    return _ADDRESS.sub("", path).rstrip("/") or "/"


def advice(path: str, known: Collection[str]) -> str:
    """What to say of a path that does not exist: clients add `/v1` to an address, or expect it there."""
    for meant in (f"/v1{path}", path.removeprefix("/v1"), "/" + path.lstrip("/")):
        if meant in known:
            return f"; {meant} is one: look at the base URL that the client was given"
    return ""
