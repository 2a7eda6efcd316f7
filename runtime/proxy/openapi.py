"""`/openapi.json`: the APIs described from the very types that read their bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from ... import __version__
from .schema import (
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    CountTokensBody,
    DetokenizeBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
)

_POSTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/abort": AbortBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_OPEN = ("/health", "/health/live", "/health/ready", "/metrics", "/status", "/openapi.json")
_GETS = ("/v1/models", *_OPEN)
_ERRORS = {
    "400": "the request is at fault; the message says where",
    "401": "wrong or missing API key",
    "409": "the request was aborted",
    "413": "the body is too large",
    "429": "the queue is full; see Retry-After",
    "503": "the ranks are not ready, or broke the answer off; see Retry-After",
}


def openapi(with_key: bool) -> dict[str, Any]:
    """The description in OpenAPI 3.1. `with_key`: the server demands a key."""
    kinds = list(_POSTS.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, kind), schema in zip(_POSTS.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        summary = (kind.__doc__ or "").split("\n")[0]
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(path)}}
    for path in _GETS:
        paths[path] = {"get": {"responses": _responses(path)}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "duovolt", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in _OPEN:
            paths[path]["get"]["security"] = []
    return document


def _responses(path: str) -> dict[str, Any]:
    good = {"200": {"description": "as the API has it"}}
    if path in _OPEN:
        return good | ({"503": {"description": "not ready"}} if path in ("/health", "/health/ready") else {})
    return good | {status: {"description": text} for status, text in _ERRORS.items()}
