"""The page at `/`: its files, as they are sent. No build step, nothing fetched from elsewhere, no inline code."""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the browser asks, and learns from the tag that nothing has changed
}


def page_routes() -> list[Route]:
    """`/` and one path an asset, `/page/NAME`; the files are read once."""
    routes = []
    for file in resources.files(__package__).iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            routes.append(_route(path, file.read_bytes(), kind))
    return routes


def _route(path: str, content: bytes, kind: str) -> Route:
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)

    return Route(path, send, methods=["GET"])
