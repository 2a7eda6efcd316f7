"""What every API needs of the server: the plan, the hub, the workers; bodies read and names given."""

from __future__ import annotations

import re
import time
import uuid
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from .errors import ApiError, queue_full
from .foreign import refuse_unheeded
from .hub import Hub
from .plan import ServePlan
from .sampling import SamplingDefaults
from .schema import Body, decode_body
from .silence import within
from .supervisor import Supervisor
from .workers import Workers

MAX_BODY_BYTES = 32 << 20
_LEAST_WAITING = 64  # also where the server holds fewer answers: to count tokens asks for none
BODY_SECONDS = 60.0  # of silence in the middle of a body
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

B = TypeVar("B", bound=Body)
T = TypeVar("T")


@dataclass(frozen=True)
class Stamp:
    """What an answer is called: `name` is its own part of the id, `names` all that an abort may say."""

    name: str
    created: int
    model: str

    def names(self, prefix: str) -> tuple[str, ...]:
        return (self.name, prefix + self.name)


@dataclass
class Service:
    """Shared by all requests; prompts are made by `workers`."""

    plan: ServePlan
    hub: Hub
    supervisor: Supervisor
    workers: Workers
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.defaults = SamplingDefaults.of(self.plan.tokenizer.generation)

    async def read(self, request: Request, kind: type[B]) -> B:
        """The request's body. Raises ApiError 400, 408 (it stopped coming), 413 or 415 (compressed)."""
        _require_plain(request)
        raw = (await _read(request)).removeprefix(BOM_UTF8)  # some editors and shells begin every text with it
        body = decode_body(raw, kind)
        refuse_unheeded(raw, body)
        return body

    async def prepare(self, job: Callable[..., T], *arguments: Any) -> T:
        """What `job`, the making of a prompt, gives. Raises ApiError 429 where more wait than could be answered anyway."""
        if self.workers.waiting >= max(self.hub.capacity, _LEAST_WAITING):
            self.hub.counters.rejected += 1
            raise queue_full(f"{self.workers.waiting} requests wait to be read")
        return await self.workers.run(job, *arguments)

    def stamp(self, request: Request) -> Stamp:
        """A fresh name, or the one that the client, or a gateway before it, gives with X-Request-Id if it is a plain one."""
        given = request.headers.get("x-request-id", "")
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex[:24]
        return Stamp(name, int(time.time()), self.plan.model_id)


def _require_plain(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise ApiError(
            415, f"Content-Encoding {encoding[:40]!r}: send the body as it is, not compressed", code="encoded_body"
        )


async def _read(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large(f"the body has {announced} bytes")
    parts, size = [], 0
    stream = request.stream()
    try:
        while True:
            part = await within(anext(stream), BODY_SECONDS)
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large("the body has more bytes")
            parts.append(part)
    except StopAsyncIteration:
        return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"{size} bytes of the body came, then none for {BODY_SECONDS:g} s") from None


def _too_large(found: str) -> ApiError:
    return ApiError(
        413, f"{found}, this server takes {MAX_BODY_BYTES}", code="body_too_large", headers={"Connection": "close"}
    )
