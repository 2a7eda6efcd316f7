"""The digest of a step's events in its record."""

import struct

import xxhash

from ..messages import TokenEvent

MASK = (1 << 64) - 1


def events_hash(events: list[TokenEvent], seen: bytes) -> int:
    """xxh64 of what a step gave out. `seen`: a digest of the pictures it read, or nothing."""
    digest = xxhash.xxh64(seen)
    for event in events:
        number = event.request_id & MASK  # a refused request may carry any number
        digest.update(struct.pack(f"<{2 + len(event.tokens)}Q", number, len(event.tokens), *event.tokens))
    return digest.intdigest()
