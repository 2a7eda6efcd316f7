"""Errors of the HTTP APIs, in the shape of OpenAI's."""

from __future__ import annotations

from typing import Any


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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client's input is at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int) -> ApiError:
    """503: ranks are loading, down or draining."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after=retry_after)
