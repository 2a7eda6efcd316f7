"""What travels on the socket between the proxy and a rank, one msgpack record a message.

Proxy to rank: GenerateRequest, CancelRequest (of `runtime.messages`), Stop. Rank to proxy: Hello, Ready, Step, Failed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from ..messages import CancelRequest, GenerateRequest, TokenEvent


class Stop(Struct, tag="stop"):
    """End the process now."""


class Hello(Struct, tag="hello"):
    """First message of a rank, before it loads: who it is, read from its own weights, and with what it runs."""

    rank: int
    size: int
    pid: int
    conversion_id: str
    recipe: str
    tokenizer_digest: str
    config_digest: str
    versions: dict[str, str]
    backend: str


class Ready(Struct, tag="ready"):
    """Weights loaded, shared memory mapped. `facts`: choices for the start log line and `/v1/models`."""

    rank: int
    facts: dict[str, str]


class Step(Struct, tag="step"):
    """The events of one agreed step; `sequence` counts them from 1 and is equal on all ranks."""

    sequence: int
    events: list[TokenEvent]


class Failed(Struct, tag="failed"):
    """Last message of a rank that gives up; `exit_code` as the command line's."""

    rank: int
    message: str
    exit_code: int


ToRank = GenerateRequest | CancelRequest | Stop
ToProxy = Hello | Ready | Step | Failed


@dataclass(frozen=True)
class Unreadable:
    """A message that is none of ToRank. `request_id`: that of the answer it asked for, None if that cannot be told."""

    request_id: int | None
    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_to_proxy = msgspec.msgpack.Decoder(ToProxy).decode
_decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def decode_to_rank(data: bytes) -> ToRank | Unreadable:
    """The message, or what can be told of it: it reaches every rank alike, so none may die of it alone or together."""
    try:
        return _decode_to_rank(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return Unreadable(_request_id(data), str(error))


def _request_id(data: bytes) -> int | None:
    try:
        message = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    found = message.get("request_id") if isinstance(message, dict) and message.get("type") == "generate" else None
    return found if type(found) is int and 0 <= found < 1 << 64 else None
