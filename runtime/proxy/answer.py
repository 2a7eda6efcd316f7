"""Reading answers: events of the ranks in, updates and a summary out, the same for every API and for both ways to send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ..messages import GenerateRequest, TokenEvent, TokenLogprob
from .assembly import AnswerStyle, Assembler, Delta
from .errors import ApiError
from .hub import Hub
from .opened import Events, OpenRequest
from .tokenizer import TextTokenizer


@dataclass
class Update:
    """What one event added; `logprobs` belong to the tokens taken in it. `finish`: why the answer ended, with its last."""

    delta: Delta
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    finish: str | None


@dataclass
class Tally:
    """Counts and times of one answer."""

    started: float
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None

    def timings(self) -> dict[str, Any]:
        """Milliseconds in the queue, to the first token (queue included), from there to the last; drafts; cache."""
        end = time.monotonic() if self.ended is None else self.ended
        first = end if self.first_token is None else self.first_token
        decode = end - first
        return {
            "queue_ms": round(1000 * ((end if self.admitted is None else self.admitted) - self.started), 2),
            "prompt_ms": round(1000 * (first - self.started), 2),
            "decode_ms": round(1000 * decode, 2),
            "tokens_per_second": round((self.completion_tokens - 1) / decode, 2) if decode > 0 else None,
            "cached_tokens": self.cached_tokens,
            "drafts_proposed": self.proposed,
            "drafts_accepted": self.accepted,
            "acceptance": round(self.accepted / self.proposed, 4) if self.proposed else None,
        }


class AnswerReader:
    """One answer: feed it the ranks' events, read `finish`, `stop` and `tally`."""

    def __init__(self, hub: Hub, tokenizer: TextTokenizer, opened: OpenRequest, style: AnswerStyle) -> None:
        self._hub = hub
        self._opened = opened
        self._assembler = Assembler(tokenizer, style)
        self.tally = Tally(opened.started, len(opened.request.prompt))

    @property
    def finish(self) -> str | None:
        return self._assembler.finish

    @property
    def stop(self) -> str | int | None:
        """The stop string or stop id that ended the answer, if one did."""
        return self._assembler.stop

    def close(self) -> None:
        """No more is wanted: the ranks stop if they are still at it. Harmless when repeated."""
        self._hub.release(self._opened, complete=self.finish is not None)

    def take(self, event: TokenEvent) -> Update:
        """Raises ApiError if the ranks broke the answer off."""
        if event.finish_reason in ("error", "cancelled"):
            raise ApiError(503, event.error or "the answer was cancelled", kind="server_error", code="engine_error")
        now = time.monotonic()
        if event.admitted:
            self.tally.admitted, self.tally.cached_tokens = now, event.cached_tokens
        before = self._assembler.tokens
        for token in event.tokens:
            self._assembler.feed(token)
        taken = self._assembler.tokens - before  # those after a stop do not count
        if event.finish_reason is not None:
            self._assembler.end(event.finish_reason)
        if event.tokens and self.tally.first_token is None:
            self.tally.first_token = now
        self.tally.completion_tokens = self._assembler.tokens
        self.tally.reasoning_tokens = self._assembler.reasoning_tokens
        self.tally.proposed += event.proposed
        self.tally.accepted += event.accepted
        if self.finish is not None:
            self.tally.ended = now
            self.close()
        return Update(self._assembler.take(), event.logprobs[:taken], event.prompt_logprobs, self.finish)


@dataclass
class Plan:
    """The engine's requests, one for each choice of the answer in their order, and how to read every one of them.

    `prompts`: number of different prompts; the choices of one stand side by side.
    """

    requests: list[GenerateRequest]
    style: AnswerStyle
    prompts: int = 1


class Answer:
    """All choices of one HTTP request, over one queue of events. Leaving the iteration early cancels what still runs."""

    def __init__(self, hub: Hub, tokenizer: TextTokenizer, plan: Plan, names: tuple[str, ...]) -> None:
        opened = hub.submit(plan.requests, names)
        self._events = opened[0].events
        self._number = {one.request.request_id: number for number, one in enumerate(opened)}
        self._per_prompt = len(opened) // plan.prompts
        self.readers = [AnswerReader(hub, tokenizer, one, plan.style) for one in opened]

    async def updates(self, heartbeat_seconds: float | None = None) -> AsyncIterator[list[tuple[int, Update]]]:
        """All that has come since the last time, as number of a choice and what was added to it, until all have ended.

        An empty list after a silence. Raises ApiError, once what came before it has been given out.
        """
        beat = None if heartbeat_seconds is None else _Heartbeat(self._events, heartbeat_seconds)
        try:
            while any(reader.finish is None for reader in self.readers):
                events = [await self._events.get()]
                while not self._events.empty():
                    events.append(self._events.get_nowait())
                if events == [None]:
                    yield []
                    continue
                if beat is not None:
                    beat.silent = False
                batch, error = self._take(events)
                if batch:
                    yield batch
                if error is not None:
                    raise error
        finally:
            if beat is not None:
                beat.stop()

    def _take(self, events: list[TokenEvent | ApiError | None]) -> tuple[list[tuple[int, Update]], ApiError | None]:
        """The updates of the events up to the first that is an error, and that error."""
        batch: list[tuple[int, Update]] = []
        for event in events:
            if event is None:
                continue
            if isinstance(event, ApiError):
                return batch, event
            number = self._number[event.request_id]
            if self.readers[number].finish is None:
                try:
                    batch.append((number, self.readers[number].take(event)))
                except ApiError as error:
                    return batch, error
        return batch, None

    def close(self) -> None:
        """No more of any choice is wanted."""
        for reader in self.readers:
            reader.close()

    def usage(self) -> Usage:
        """Tokens of all choices; a prompt counts once, however many answers it got."""
        tallies = [reader.tally for reader in self.readers]
        firsts = tallies[:: self._per_prompt]
        return Usage(
            sum(tally.prompt_tokens for tally in firsts),
            sum(tally.cached_tokens for tally in firsts),
            sum(tally.completion_tokens for tally in tallies),
            sum(tally.reasoning_tokens for tally in tallies),
        )

    def timings(self) -> dict[str, Any]:
        """Of the only choice; of several: those of the whole, in which they ran side by side or one after the other."""
        tallies = [reader.tally for reader in self.readers]
        if len(tallies) == 1:
            return tallies[0].timings()
        whole = Tally(tallies[0].started, 0)
        whole.admitted = min((tally.admitted for tally in tallies if tally.admitted is not None), default=None)
        whole.first_token = min((tally.first_token for tally in tallies if tally.first_token is not None), default=None)
        whole.ended = max((tally.ended for tally in tallies if tally.ended is not None), default=None)
        for tally in tallies:
            whole.completion_tokens += tally.completion_tokens
            whole.cached_tokens += tally.cached_tokens
            whole.proposed += tally.proposed
            whole.accepted += tally.accepted
        return whole.timings()


@dataclass(frozen=True)
class Usage:
    """Counts of tokens; `cached` is part of `prompt`, `reasoning` of `completion`."""

    prompt: int
    cached: int
    completion: int
    reasoning: int

    def openai(self) -> dict[str, Any]:
        """As the chat and completions APIs have it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class _Heartbeat:
    """Puts None among the events after every stretch of `seconds` without one; costs nothing while tokens come."""

    def __init__(self, events: Events, seconds: float) -> None:
        self._events = events
        self._seconds = seconds
        self.silent = True
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        if self.silent:
            self._events.put_nowait(None)
        self.silent = True
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
