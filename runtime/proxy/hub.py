"""The open requests: numbered, sent to the ranks, fed with their events, cancelled once if the client leaves."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..messages import CancelRequest, GenerateRequest, TokenEvent
from ..parallel.waiting import MOST_A_LOOK
from .errors import ApiError, bad_request, queue_full, unavailable
from .meters import Meters
from .opened import Events, OpenRequest
from .request_log import note_answer

_RATE_WINDOW_SECONDS = 5.0
_MOST_LEAVING = 256
SUSPICIOUS_DRAFTS = 500


@dataclass
class Counters:
    """Totals since the start, for `/metrics` and the page."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    cached_prompts: int = 0
    cached_tokens: int = 0
    restarts: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why finished answers ended

    def drafts_are_dead(self) -> bool:
        """True if so many drafts were judged and none ever stood: weights of the MTP layer that are not the model's."""
        return self.proposed >= SUSPICIOUS_DRAFTS and not self.accepted


class Hub:
    """Owns the request table. `send` passes a message to all ranks; None while there are none.

    A request that has no lane after `max_wait_seconds` is given up (None: it waits for ever).
    """

    def __init__(self, lanes: int, max_waiting: int, max_wait_seconds: float | None = None) -> None:
        self._lanes = lanes
        self.capacity = lanes + max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._open: dict[int, OpenRequest] = {}
        self._leaving: set[int] = set()  # cancelled, and not yet ended by the ranks: what waits in sockets is bounded
        self._next_id = 1
        self._recent: deque[tuple[float, int]] = deque()
        self.last_event = 0.0  # monotonic time of the ranks' last word
        self.send: Callable[[GenerateRequest | CancelRequest], None] | None = None
        self.draining = False
        self.retry_after = 1
        self.counters = Counters()
        self._warned = False
        self.meters = Meters()

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def running(self) -> int:
        return min(len(self._open), self._lanes)

    @property
    def waiting(self) -> int:
        return len(self._open) - self.running

    def check_room(self, count: int = 1) -> None:
        """Raises ApiError before any work is done for a request.

        400: more answers than the server ever holds; 503: no ranks, draining; 429: queue full.
        """
        if count > self.capacity:
            raise bad_request(f"{count} answers in one request, this server holds {self.capacity} at a time", "n")
        if self.draining:
            raise unavailable("the server is stopping", 5)
        if self.send is None:
            raise unavailable("the ranks are not ready", self.retry_after)
        if len(self._leaving) > _MOST_LEAVING:
            self.counters.rejected += 1
            raise queue_full(f"{len(self._leaving)} answers whose clients have left are being ended")
        if len(self._open) + count > self.capacity:
            self.counters.rejected += 1
            more = "" if count == 1 else f", and this request asks for {count} more"
            raise queue_full(
                f"{len(self._open)} answers are running or waiting{more}; this server holds {self.capacity}"
            )

    def submit(self, requests: list[GenerateRequest], names: tuple[str, ...] = ()) -> list[OpenRequest]:
        """Number the requests and send them to all ranks; they share one queue of events.

        Raises as check_room, and what `send` raises: nothing stays open then.
        """
        self.check_room(len(requests))
        events: Events = asyncio.Queue()
        answers: list[OpenRequest] = []
        try:
            for request in requests:
                answers.append(self._send(request, events, names))
        except Exception:
            for opened in answers:
                self.release(opened, complete=False)
            raise
        return answers

    def _send(self, request: GenerateRequest, events: Events, names: tuple[str, ...]) -> OpenRequest:
        assert self.send is not None
        request.request_id = self._next_id
        self._next_id += 1
        self.send(request)  # before it is entered: no event can come before this method has returned
        opened = OpenRequest(request, events, names)
        if self._max_wait_seconds is not None:
            self._await_lane(opened, self._max_wait_seconds)
        self._open[request.request_id] = opened
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        note_answer(opened)
        return opened

    def _await_lane(self, opened: OpenRequest, seconds: float) -> None:
        """Give the request up after so many seconds in which this process ran: in a frozen container no lane comes free."""
        look = min(seconds, MOST_A_LOOK)
        then = (self._await_lane, opened, seconds - look) if seconds > look else (self._give_up, opened)
        opened.patience = asyncio.get_running_loop().call_later(look, *then)

    def _give_up(self, opened: OpenRequest) -> None:
        message = f"no lane came free within {self._max_wait_seconds:g} s"
        opened.events.put_nowait(
            ApiError(503, message, kind="server_error", code="queue_timeout", retry_after=self.retry_after)
        )
        self._leave(opened, "expired")

    def abort(self, name: str) -> int:
        """End the answers of that name with an error to their readers; how many there were."""
        named = [opened for opened in self._open.values() if name in opened.names]
        for opened in named:
            opened.events.put_nowait(ApiError(409, "the request was aborted", code="aborted"))
            self.release(opened, complete=False)
        return len(named)

    def release(self, opened: OpenRequest, complete: bool) -> None:
        """The reader of an answer is done with it: if the ranks are not, they are told to stop, once.

        `complete`: it has all it wanted (a stop string came); otherwise its client has left.
        """
        self._leave(opened, "finished" if complete else "cancelled")

    def _leave(self, opened: OpenRequest, outcome: str) -> None:
        """Out of the table before the ranks are done with it, unless it is out already."""
        if self._open.pop(opened.request.request_id, None) is None:
            return
        if outcome == "finished":
            opened.finish = "stop"
        self._close(opened, outcome)
        if self.send is not None:
            self._leaving.add(opened.request.request_id)
            self.send(CancelRequest(opened.request.request_id))

    def relay(self, events: list[TokenEvent]) -> None:
        """Pass agreed events to their readers; those of released requests have none."""
        now = self.last_event = time.monotonic()
        for event in events:
            self.counters.completion_tokens += len(event.tokens)
            self.counters.proposed += event.proposed
            self.counters.accepted += event.accepted
            self.counters.cached_prompts += event.cached_tokens > 0
            self.counters.cached_tokens += event.cached_tokens
            if not self._warned and self.counters.drafts_are_dead():
                self._warned = True
                print(
                    f"duovolt serve: WARNING: {self.counters.proposed} drafts judged, none accepted: the MTP layer's weights "
                    "are damaged or another model's. Run `duovolt verify`; `--drafts 0` serves without them.",
                    file=sys.stderr,
                    flush=True,
                )
            self._recent.append((now, len(event.tokens)))
            opened = self._open.get(event.request_id)
            if event.finish_reason is not None:
                self._leaving.discard(event.request_id)
            if opened is None:
                continue
            opened.count(event, now)
            if event.tokens:
                self.meters.count_step(len(event.tokens))
            if event.finish_reason is not None:
                del self._open[event.request_id]
                self._close(opened, "failed" if event.finish_reason == "error" else "finished")
            opened.events.put_nowait(event)
        self._forget(now)

    def fail_all(self, error: ApiError) -> None:
        """End every open answer with an error: the ranks that made them are gone."""
        for opened in self._open.values():
            opened.events.put_nowait(error)
            self._close(opened, "failed")
        self._open.clear()
        self._leaving.clear()

    def in_making(self) -> list[OpenRequest]:
        """The open answers, oldest first: those of the lanes come before those that wait."""
        return list(self._open.values())

    def tokens_per_second(self) -> float:
        """Over the last five seconds, all answers together."""
        self._forget(time.monotonic())
        return sum(count for _, count in self._recent) / _RATE_WINDOW_SECONDS

    def _close(self, opened: OpenRequest, outcome: str) -> None:
        """An answer leaves the table: count it."""
        opened.stop_waiting()
        opened.outcome = outcome
        match outcome:
            case "finished":
                self.counters.finished += 1
                self.counters.reasons[opened.finish or "stop"] += 1
            case "cancelled":
                self.counters.cancelled += 1
            case "failed":
                self.counters.failed += 1
            case "expired":
                self.counters.expired += 1
        self.meters.count_answer(opened, time.monotonic())

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _RATE_WINDOW_SECONDS:
            self._recent.popleft()
