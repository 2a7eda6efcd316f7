"""One answer in the making, and what is counted of it on the way."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ..messages import GenerateRequest, TokenEvent
from .errors import ApiError

Events = asyncio.Queue[TokenEvent | ApiError | None]  # None: a reader's own mark of silence


@dataclass
class OpenRequest:
    """`events` gives TokenEvent, or the ApiError that ends it. Times are monotonic seconds.

    `names`: what an abort may say. `patience` gives the request up while it has no lane; `admitted`: when it got one.

    `outcome`: finished, cancelled (its client left, or an abort), failed (a fault broke it off) or expired (no lane came
    free in time); None while it is in the making.
    """

    request: GenerateRequest
    events: Events = field(default_factory=asyncio.Queue)
    names: tuple[str, ...] = ()
    patience: asyncio.TimerHandle | None = None
    started: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    cached: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    finish: str | None = None
    outcome: str | None = None

    def count(self, event: TokenEvent, now: float) -> None:
        """Take an event of the ranks into account."""
        self.stop_waiting()  # every event, an error too, says that the ranks have taken the request up
        if event.admitted:
            self.admitted, self.cached = now, event.cached_tokens
        if event.tokens:
            if self.first is None:
                self.first = now
            self.last = now
            self.tokens += len(event.tokens)
        self.proposed += event.proposed
        self.accepted += event.accepted
        self.finish = event.finish_reason

    def stop_waiting(self) -> None:
        """The request has its lane, or needs none any more."""
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None

    @property
    def seconds_per_token(self) -> float | None:
        """After the first token; None for fewer than two."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    def facts(self) -> dict[str, Any]:
        """What a log tells of an answer: numbers, never its content."""
        pace = self.seconds_per_token
        return {
            "outcome": self.outcome,
            "finish": self.finish,
            "prompt_tokens": len(self.request.prompt),
            "cached_tokens": self.cached,
            "completion_tokens": self.tokens,
            "queue_ms": None if self.admitted is None else round(1000 * (self.admitted - self.started), 3),
            "first_token_ms": None if self.first is None else round(1000 * (self.first - self.started), 3),
            "tokens_per_second": round(1 / pace, 2) if pace else None,
            "drafts_proposed": self.proposed,
            "drafts_accepted": self.accepted,
        }
