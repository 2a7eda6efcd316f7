"""The loop of a rank: receive, admit what both ranks have, step, agree, and only then give the events out."""

from __future__ import annotations

import sys
from collections import deque
from typing import Protocol

import zmq

from ..messages import CancelRequest, GenerateRequest, StepRecord, TokenEvent
from ..parallel.lockstep import Lockstep
from ..parallel.region import ProgressCounter
from .wire import Step, Stop, Unreadable, decode_to_rank, encode

MASK_BITS = 64
_IDLE_POLL_MS = 500  # only the sign of life depends on it: a message ends the wait at once


class SteppingEngine(Protocol):
    """What the loop needs of an engine. `overflows`: values so far that fp16 could not hold."""

    @property
    def overflows(self) -> int: ...
    def add(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def admit(self) -> list[TokenEvent]: ...
    def has_work(self) -> bool: ...
    def step(self) -> tuple[StepRecord, list[TokenEvent]]: ...


class RankLoop:
    """Requests enter the engine in the proxy's order, at a step on which both ranks agreed.

    A request's cancel bit is its place among the open requests, which is the same on both ranks; a cancel for a request
    beyond the first 64, or not yet admitted, waits until it has a bit.
    """

    def __init__(
        self, engine: SteppingEngine, lockstep: Lockstep, socket: zmq.Socket, progress: ProgressCounter
    ) -> None:
        self._engine = engine
        self._lockstep = lockstep
        self._socket = socket
        self._progress = progress
        self._received = 0
        self._admitted = 0
        self._inbox: deque[GenerateRequest | Unreadable] = deque()
        self._open: list[int] = []
        self._cancels: set[int] = set()
        self._sequence = 0
        self._stopped = False

    def run(self) -> None:
        """Until the proxy says stop. Raises what the engine and the exchanges raise."""
        while not self._stopped:
            busy = self._engine.has_work()
            self._progress.tick(busy, self._engine.overflows)
            self._receive(wait=not busy)
            if self._stopped:
                return
            if busy:
                record, events = self._engine.step()
                self._give_out(events + self._agree(record))
            elif self._received > self._admitted:
                self._give_out(self._agree(StepRecord("admit", 0, 0, 0, 0, 0)))

    def _receive(self, wait: bool) -> None:
        timeout = _IDLE_POLL_MS if wait and self._received == self._admitted else 0
        while self._socket.poll(timeout):
            timeout = 0
            match decode_to_rank(self._socket.recv()):
                case GenerateRequest() as request:
                    self._inbox.append(request)
                    self._received += 1
                case CancelRequest(request_id=request_id):
                    self._cancels.add(request_id)
                case Unreadable(request_id=None, reason=reason):
                    print(f"duovolt rank: a message cannot be read and is passed over: {reason}", file=sys.stderr)
                case Unreadable() as broken:
                    self._inbox.append(broken)
                    self._received += 1
                case Stop():
                    self._stopped = True
                    return

    def _agree(self, record: StepRecord) -> list[TokenEvent]:
        """Cancel and admit what the ranks agree on; which requests got a lane by it, and the ends of unreadable ones."""
        bits = self._open[:MASK_BITS]
        mask = sum(1 << bit for bit, request_id in enumerate(bits) if request_id in self._cancels)
        agreement = self._lockstep.agree(record, self._received, mask)
        for bit, request_id in enumerate(bits):
            if agreement.cancel_mask >> bit & 1:
                self._engine.cancel(request_id)
                self._cancels.discard(request_id)
        events: list[TokenEvent] = []
        while self._admitted < agreement.admitted:
            request = self._inbox.popleft()
            self._admitted += 1
            if isinstance(request, Unreadable):
                assert request.request_id is not None
                reason = f"the ranks cannot read this request: {request.reason}"
                events.append(TokenEvent(request.request_id, [], [], "error", 0, 0, 0, error=reason))
            else:
                self._open.append(request.request_id)
                self._engine.add(request)
                events += self._engine.admit()  # said now: the next step may read a long prompt
        return events

    def _give_out(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None and event.request_id in self._open:  # else refused at admission
                self._open.remove(event.request_id)
        waiting = {request.request_id for request in self._inbox}
        self._cancels &= waiting.union(self._open)  # the others have ended by themselves
        if events:
            self._sequence += 1
            self._socket.send(encode(Step(self._sequence, events)))
