"""The scripted backend: answers from a file instead of a model, so that everything around the engine is tested alone.

FILE holds JSON lines, one an answer: `{"blocks": [[ids...], ...], "delay_ms": 0}`. The n-th request gets line n, and
the lines start over at the end. A block is what one round gives one lane. Rounds come every `delay_ms` (the largest of the
running answers), the first after that time; what a round costs is part of it, so that a script sets a pace and not a
pause. A token's probability is 1.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from ...checkpoint.errors import InputError
from ..messages import GenerateRequest, StepRecord, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from ..parallel.mailbox import Mailbox


class ScriptedAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the script."""

    blocks: list[list[int]]
    delay_ms: float = 0


def read_script(path: Path) -> list[ScriptedAnswer]:
    """The answers of FILE, at least one. Raises InputError naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"cannot read the script {path}: {error.strerror}") from error
    answers = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                answers.append(msgspec.json.decode(line, type=ScriptedAnswer))
            except msgspec.DecodeError as error:
                raise InputError(f'{path}, line {number}: {error}; expected {{"blocks": [[ids...], ...]}}') from error
    if not answers:
        raise InputError(f"{path} holds no answer; write one JSON object a line")
    return answers


_MADE_UP_ROUNDS = 25


@dataclass
class _Lane:
    request: GenerateRequest
    blocks: deque[list[int]]
    delay_seconds: float
    made: int = 0
    prefilled: bool = False


@dataclass
class ScriptedEngine:
    """The engine's interface (add, cancel, has_work, step) over a script. Its one sum a step keeps the mailbox in use."""

    answers: list[ScriptedAnswer]
    lanes: int
    mailbox: Mailbox | None
    overflows: int = 0  # nothing is computed
    _requests: int = 0
    _waiting: deque[_Lane] = field(default_factory=deque)
    _running: list[_Lane] = field(default_factory=list)
    _cancelled: set[int] = field(default_factory=set)
    _due: float = 0.0  # when the last round was to come

    def add(self, request: GenerateRequest) -> None:
        answer = self.answers[self._requests % len(self.answers)]
        self._requests += 1
        self._waiting.append(_Lane(request, deque(answer.blocks), answer.delay_ms / 1000))

    def cancel(self, request_id: int) -> None:
        self._cancelled.add(request_id)

    def admit(self) -> list[TokenEvent]:
        """Free lanes to waiting requests; the events that say so."""
        events = []
        while self._waiting and len(self._running) < self.lanes:
            lane = self._waiting.popleft()
            self._running.append(lane)
            events.append(_event(lane, [], None, admitted=True))
        return events

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> tuple[StepRecord, list[TokenEvent]]:
        """Cancels, then one prompt is taken in, or each running answer gives its next block."""
        events = self._cancel() + self.admit()
        kind = "idle"
        fresh = next((lane for lane in self._running if not lane.prefilled), None)
        if fresh is not None:
            kind, fresh.prefilled = "prefill", True
            self._due = max(self._due, time.monotonic())  # a pause between answers is not made up for
        elif self._running:
            kind = "round"
            self._keep_pace(max(lane.delay_seconds for lane in self._running))
            events += [self._advance(lane) for lane in list(self._running)]
            events += self.admit()
        words = [word for event in events for word in (event.request_id, len(event.tokens), *event.tokens)]
        self._meet(sum(words))
        record = StepRecord(
            kind=kind,
            tokens_produced=sum(len(event.tokens) for event in events),
            token_hash=xxhash.xxh64_intdigest(struct.pack(f"<{len(words)}Q", *words)),
            position=sum(len(lane.request.prompt) + lane.made for lane in self._running),
            free_pages=0,
            pending=len(self._waiting),
        )
        return record, events

    def _keep_pace(self, delay: float) -> None:
        """Wait until a round may come. Lost time is made up for, up to a number of rounds: a pace, not a pause."""
        now = time.monotonic()
        self._due = max(self._due, now - _MADE_UP_ROUNDS * delay) + delay
        if self._due > now:
            time.sleep(self._due - now)

    def _cancel(self) -> list[TokenEvent]:
        gone = [lane for lane in (*self._running, *self._waiting) if lane.request.request_id in self._cancelled]
        self._cancelled.clear()
        for lane in gone:
            (self._running if lane in self._running else self._waiting).remove(lane)
        return [_event(lane, [], "cancelled") for lane in gone]

    def _advance(self, lane: _Lane) -> TokenEvent:
        request = lane.request
        tokens: list[int] = []
        finish = None
        for token in lane.blocks.popleft() if lane.blocks else []:
            if lane.made == request.max_tokens:
                break
            tokens.append(token)
            lane.made += 1
            if token in request.stop_ids and not request.ignore_eos:
                finish = "stop"
                break
        if finish is None and lane.made >= request.max_tokens:
            finish = "length"
        if finish is None and not lane.blocks:
            finish = "stop"
        if finish is not None:
            self._running.remove(lane)
        return _event(lane, tokens, finish)

    def _meet(self, checksum: int) -> None:
        if self.mailbox is not None:
            import numpy as np

            self.mailbox.exchange(np.array([checksum % 2**20], dtype=np.float32))


def _event(lane: _Lane, tokens: list[int], finish: str | None, admitted: bool = False) -> TokenEvent:
    ask = lane.request.sampling.logprobs
    logprobs = [TokenLogprob(token, 0.0, [(token, 0.0)] * min(ask - 1, 1)) for token in tokens] if ask else []
    drafts = max(len(tokens) - 1, 0)
    return TokenEvent(
        lane.request.request_id, tokens, logprobs, finish, drafts, drafts, len(lane.request.prompt), admitted=admitted
    )
