"""Reading one answer: events of the ranks in, deltas and a summary out, the same for every API and for both ways to send."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ..messages import TokenEvent, TokenLogprob
from .assembly import AnswerStyle, Assembler, Delta
from .errors import ApiError
from .hub import Hub
from .opened import OpenRequest
from .tokenizer import TextTokenizer


@dataclass
class Update:
    """What one event added; `logprobs` belong to the tokens taken in it."""

    delta: Delta
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


@dataclass
class Tally:
    """Counts and times of one answer."""

    started: float
    prompt_tokens: int
    completion_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    first_token: float | None = None
    ended: float | None = None

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def timings(self) -> dict[str, Any]:
        """Milliseconds to the first token and from there to the last; drafts proposed and accepted."""
        end = time.monotonic() if self.ended is None else self.ended
        first = end if self.first_token is None else self.first_token
        decode = end - first
        return {
            "prompt_ms": round(1000 * (first - self.started), 2),
            "decode_ms": round(1000 * decode, 2),
            "tokens_per_second": round((self.completion_tokens - 1) / decode, 2) if decode > 0 else None,
            "drafts_proposed": self.proposed,
            "drafts_accepted": self.accepted,
            "acceptance": round(self.accepted / self.proposed, 4) if self.proposed else None,
        }


@dataclass
class AnswerReader:
    """Iterate over `updates`, then read `finish` and `tally`. Leaving the iteration early cancels the request."""

    hub: Hub
    tokenizer: TextTokenizer
    opened: OpenRequest
    style: AnswerStyle
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self._assembler = Assembler(self.tokenizer, self.style)
        self.tally = Tally(self.opened.started, len(self.opened.request.prompt))

    @property
    def finish(self) -> str | None:
        return self._assembler.finish

    async def updates(self) -> AsyncIterator[Update]:
        """Raises ApiError if the ranks broke the answer off."""
        while self.finish is None:
            event = await self.opened.events.get()
            if isinstance(event, ApiError):
                raise event
            yield self._take(event)

    def close(self) -> None:
        """No more is wanted: the ranks stop if they are still at it. Harmless when repeated."""
        self.hub.release(self.opened, complete=self.finish is not None)

    def _take(self, event: TokenEvent) -> Update:
        if event.finish_reason in ("error", "cancelled"):
            raise ApiError(503, event.error or "the answer was cancelled", kind="server_error", code="engine_error")
        before = self._assembler.tokens
        for token in event.tokens:
            self._assembler.feed(token)
        taken = self._assembler.tokens - before  # those after a stop do not count
        if event.finish_reason is not None:
            self._assembler.end(event.finish_reason)
        now = time.monotonic()
        if event.tokens and self.tally.first_token is None:
            self.tally.first_token = now
        self.tally.completion_tokens = self._assembler.tokens
        self.tally.proposed += event.proposed
        self.tally.accepted += event.accepted
        if self.finish is not None:
            self.tally.ended = now
            self.close()
        return Update(self._assembler.take(), event.logprobs[:taken], event.prompt_logprobs)
