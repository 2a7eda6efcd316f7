"""The lockstep record: what both ranks must agree on after each step, before a token of it leaves the process.

The record says what was done; its twin rides along and is combined instead of compared: how many messages of the proxy
each rank has received (the smaller count is admitted by both) and which requests it was asked to cancel (OR).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from msgspec.structs import replace

from ...checkpoint.errors import CheckFailed
from ..messages import StepRecord
from .faults import LOCKSTEP_DOOR, read_fault
from .region import RECORD_WORDS, Region
from .waiting import wait_for

KINDS = ("admit", "prefill", "round", "idle")


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
        self._mine = None if region is None else region.records[0]
        self._sequence = 0

    def agree(self, record: StepRecord, received: int, cancel_mask: int) -> Agreement:
        self._sequence += 1
        if self._mine is not None:
            self._mine[self._sequence % 2] = _pack(self._sequence, record, received, cancel_mask)
        return Agreement(received, cancel_mask)


class SharedLockstep:
    """Two ranks through the shared file. A record is valid by its sequence number and its own hash, so no fence is needed.

    Double-buffered by parity: a rank writes record s + 2 only after it has read the peer's s + 1.
    """

    def __init__(self, region: Region, rank: int, timeout_seconds: float) -> None:
        self.rank = rank
        self._mine = region.records[rank]
        self._theirs = region.records[1 - rank]
        self._timeout_seconds = timeout_seconds
        self._sequence = 0
        self._rounds = 0
        self._fault = read_fault(LOCKSTEP_DOOR)

    def agree(self, record: StepRecord, received: int, cancel_mask: int) -> Agreement:
        """Exchange records. Raises LockstepFailure with both records if they differ, LockstepTimeout if none comes."""
        self._sequence += 1
        sent = self._with_fault(record)
        self._mine[self._sequence % 2] = _pack(self._sequence, sent, received, cancel_mask)
        buffer, sequence = self._theirs[self._sequence % 2], np.uint64(self._sequence)

        def look() -> np.ndarray | None:
            if buffer[0] != sequence:
                return None
            words = buffer.copy()
            return words if words[-1] == _hash(words[:-1]) else None

        words = wait_for(look, self._timeout_seconds)
        if words is None:
            raise LockstepTimeout(
                f"rank {self.rank}: no lockstep record {self._sequence} from rank {1 - self.rank} "
                f"within {self._timeout_seconds:g} s; own record: {sent}"
            )
        theirs, their_received, their_mask = _unpack(words)
        if theirs != sent:
            first, second = (sent, theirs) if self.rank == 0 else (theirs, sent)
            raise LockstepFailure(
                f"TP2 LOCKSTEP FAILURE at record {self._sequence} (seen by rank {self.rank})\n"
                f"  rank 0: {first}\n  rank 1: {second}"
            )
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
    whole = [words for words in region.records[rank].copy() if words[0] and words[-1] == _hash(words[:-1])]
    if not whole:
        return 0, None
    words = max(whole, key=lambda candidate: int(candidate[0]))
    if int(words[1]) >= len(KINDS):
        return 0, None
    return int(words[0]), _unpack(words)[0]


def _hash(words: np.ndarray) -> np.uint64:
    return np.uint64(xxhash.xxh64_intdigest(words.tobytes()))


def _pack(sequence: int, record: StepRecord, received: int, cancel_mask: int) -> np.ndarray:
    words = np.zeros(RECORD_WORDS, dtype=np.uint64)
    words[:9] = (
        sequence, KINDS.index(record.kind), record.tokens_produced, record.token_hash, record.position, record.free_pages,
        record.pending, received, cancel_mask,
    )  # fmt: skip
    words[-1] = _hash(words[:-1])
    return words


def _unpack(words: np.ndarray) -> tuple[StepRecord, int, int]:
    kind, *fields, received, cancel_mask = (int(word) for word in words[1:9])
    return StepRecord(KINDS[kind], *fields), received, cancel_mask
