"""The record of a step, equal on every rank."""

import struct

import xxhash

from ..messages import StepRecord, TokenEvent
from .lane import Lane

MASK = (1 << 64) - 1


def step_record(
    kind: str, events: list[TokenEvent], lanes: list[Lane], free_pages: int, pending: int, seen: bytes
) -> StepRecord:
    """Sum up what a step gave out and where it left the lanes. `seen`: a digest of the pictures it read."""
    digest = xxhash.xxh64(seen)
    for event in events:
        number = event.request_id & MASK  # a refused request may carry any number
        digest.update(struct.pack(f"<{2 + len(event.tokens)}Q", number, len(event.tokens), *event.tokens))
    return StepRecord(
        kind=kind,
        tokens_produced=sum(len(event.tokens) for event in events),
        token_hash=digest.intdigest(),
        position=sum(lane.length for lane in lanes),
        free_pages=free_pages,
        pending=pending,
    )
