"""Web pages of other origins that may use the API (CORS)."""

from __future__ import annotations

import re

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...checkpoint.errors import InputError

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?")
_SECONDS_KNOWN = 600


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises InputError for what no browser sends as an origin: it would never match."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"--cors-origin {origin}: expected scheme://host or scheme://host:port in small letters, without a "
                "path, such as https://chat.example.org, or * for every origin."
            )


def allow_origins(application: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The application with CORS headers for `origins`; itself if there are none. Cookies are never allowed."""
    if not origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,  # an origin that is named may come from anywhere, also to a server at home
        expose_headers=("Retry-After", "X-Request-Id"),
        max_age=_SECONDS_KNOWN,
    )
