"""Errors of the HTTP APIs: one exception, and its shape in each API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_LONGEST_MESSAGE = 1000  # characters: a message may repeat what a body holds, and a body is large


class ApiError(Exception):
    """An answer other than 200: one message, a type, the parameter at fault and headers such as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = (headers or {}) | ({} if retry_after is None else {"Retry-After": str(retry_after)})

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same in the words of another API: for each name of a parameter, longer ones first, that API's.

        In the message where it stands as a name: before a bracket, dot, colon or quote.
        `param` becomes the outermost: text of text.format.
        """
        message = self.message
        for name, other in names.items():
            message = re.sub(rf"(?<![\w.]){re.escape(name)}(?=[\[.:)]| ')", other, message)
        param = None if self.param is None else names.get(self.param, self.param).partition(".")[0]
        return ApiError(self.status, message, kind=self.kind, param=param, code=self.code, headers=self.headers)

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's shape, whose types follow from the status; a fault of the server's own is an api_error."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.status == 503 and self.code not in ("unavailable", "queue_timeout"):
            kind = "api_error"
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client's input is at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int) -> ApiError:
    """503: ranks are loading, down or draining."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after=retry_after)


def queue_full(why: str) -> ApiError:
    """429: there is no room for this request now."""
    return ApiError(429, f"{why}. Try again later", kind="rate_limit_error", code="queue_full", retry_after=1)
