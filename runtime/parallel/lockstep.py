"""The lockstep record: what both ranks must agree on after each step, before a token of it leaves the process.

The record says what was done; its twin rides along and is combined instead of compared: how many messages of the proxy
each rank has received (the smaller count is admitted by both) and which requests it was asked to cancel (OR).
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Protocol

import xxhash
from msgspec.structs import astuple, replace

from ...checkpoint.errors import CheckFailed
from ..messages import StepRecord
from .faults import LOCKSTEP_DOOR, read_fault
from .region import RECORD_WORDS, Region
from .turns import Turns
from .waiting import wait_for

KINDS = ("admit", "prefill", "round", "idle")
# Sequence; the record's fields, of which the kind is a number; received, cancel mask; then zeros up to the own hash.
_FIELDS = len(StepRecord.__struct_fields__)
_BODY = struct.Struct(f"<{_FIELDS + 3}Q{8 * (RECORD_WORDS - 1 - _FIELDS - 3)}x")
_HASH = struct.Struct("<Q")
_COMPARED = slice(8, 8 + 8 * _FIELDS)  # bytes of the words that must be equal


@dataclass(frozen=True)
class Agreement:
    """What both ranks now hold: messages to admit in total, and the requests to cancel as a mask of 64 bits."""

    admitted: int
    cancel_mask: int


class LockstepFailure(CheckFailed):
    """The ranks have parted; both must stop."""


class LockstepTimeout(CheckFailed):
    """The peer's record did not come in time."""


class Lockstep(Protocol):
    """Agreement over the ranks, one call a step."""

    def agree(self, record: StepRecord, received: int, cancel_mask: int) -> Agreement: ...


class SoloLockstep:
    """One rank agrees with itself, and leaves its records where the proxy looks for them."""

    def __init__(self, region: Region | None = None) -> None:
        self._mine = None if region is None else _buffers(region, 0)
        self._sequence = 0

    def agree(self, record: StepRecord, received: int, cancel_mask: int) -> Agreement:
        self._sequence += 1
        if self._mine is not None:
            self._mine[self._sequence % 2][:] = _pack(self._sequence, record, received, cancel_mask)
        return Agreement(received, cancel_mask)


class SharedLockstep:
    """Two ranks through the shared file. A record is valid by its sequence number and its own hash, so no fence is needed.

    Double-buffered by parity: a rank writes record s + 2 only after it has read the peer's s + 1.
    """

    def __init__(self, region: Region, rank: int, timeout_seconds: float) -> None:
        self.rank = rank
        self._mine = _buffers(region, rank)
        self._theirs = _buffers(region, 1 - rank)
        self._timeout_seconds = timeout_seconds
        self._turns = Turns(region, rank)
        self._sequence = 0
        self._rounds = 0
        self._fault = read_fault(LOCKSTEP_DOOR)

    def agree(self, record: StepRecord, received: int, cancel_mask: int) -> Agreement:
        """Exchange records. Raises LockstepFailure with both records if they differ, LockstepTimeout if none comes."""
        began_ns = time.monotonic_ns()
        self._sequence += 1
        sent = self._with_fault(record)
        mine = _pack(self._sequence, sent, received, cancel_mask)
        self._mine[self._sequence % 2][:] = mine
        buffer, sequence = self._theirs[self._sequence % 2], mine[:8]

        def look() -> bytes | None:
            if buffer[:8] != sequence:
                return None
            data = bytes(buffer)
            return data if _is_whole(data) else None

        data = wait_for(look, self._timeout_seconds)
        if data is None:
            self._turns.take(began_ns, self._timeout_seconds)
            raise LockstepTimeout(
                f"rank {self.rank}: no lockstep record {self._sequence} from rank {1 - self.rank} "
                f"within {self._timeout_seconds:g} s; own record: {sent}"
            )
        if data[_COMPARED] != mine[_COMPARED]:
            theirs = _unpack(data)
            first, second = (sent, theirs) if self.rank == 0 else (theirs, sent)
            raise LockstepFailure(
                f"TP2 LOCKSTEP FAILURE at record {self._sequence} (seen by rank {self.rank})\n"
                f"  rank 0: {first}\n  rank 1: {second}"
            )
        their_received, their_mask = _BODY.unpack_from(data)[1 + _FIELDS :]
        return Agreement(min(received, their_received), cancel_mask | their_mask)

    def _with_fault(self, record: StepRecord) -> StepRecord:
        if record.kind == "round":
            due = self._fault is not None and self._fault.due(self.rank, self._rounds)
            self._rounds += 1
            if due and self._fault is not None:
                match self._fault.kind:
                    case "hash":
                        return replace(record, token_hash=record.token_hash ^ 1)
                    case "position":
                        return replace(record, position=record.position + 1)
                    case "count":
                        return replace(record, tokens_produced=record.tokens_produced + 1)
        return record


def last_record(region: Region, rank: int) -> tuple[int, StepRecord | None]:
    """How many records a rank has given, and the last that is whole; (0, None) before the first.

    Reads what the rank may be writing: a record counts only if its hash is right.
    """
    whole = [data for data in map(bytes, _buffers(region, rank)) if any(data[:8]) and _is_whole(data)]
    if not whole:
        return 0, None
    data = max(whole, key=lambda candidate: int(_BODY.unpack_from(candidate)[0]))
    sequence, kind = _BODY.unpack_from(data)[:2]
    if kind >= len(KINDS):
        return 0, None
    return sequence, _unpack(data)


def _buffers(region: Region, rank: int) -> list[memoryview]:
    """The bytes of both of a rank's records in the shared file."""
    return [memoryview(words).cast("B") for words in region.records[rank]]


def _hash(body: bytes) -> bytes:
    return _HASH.pack(xxhash.xxh64_intdigest(body))


def _is_whole(data: bytes) -> bool:
    return _hash(data[: _BODY.size]) == data[_BODY.size :]


def _pack(sequence: int, record: StepRecord, received: int, cancel_mask: int) -> bytes:
    kind, *numbers = astuple(record)
    body = _BODY.pack(sequence, KINDS.index(kind), *numbers, received, cancel_mask)
    return body + _hash(body)


def _unpack(data: bytes) -> StepRecord:
    kind, *fields = _BODY.unpack_from(data)[1 : 1 + _FIELDS]
    return StepRecord(KINDS[kind], *fields)
