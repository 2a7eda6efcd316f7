"""The test doors of the exchange between ranks: faults that an outside test can order by environment variable.

`DUOVOLT_MAILBOX_FAULT=RANK:STEP:KIND`, KIND a delay in ms, `drop`, `stale` or `wrap`;
`DUOVOLT_LOCKSTEP_FAULT=RANK:ROUND:KIND`, KIND `hash`, `position` or `count`;
`DUOVOLT_START_FAULT=RANK:STAGE:KIND`, KIND a delay in ms, `never` or `twice`, stage 0 the hello, 1 the ready of a rank;
`DUOVOLT_LINK_FAULT=WAY=RANK:STEP:KIND`: a mailbox fault of one way (`ipc` or `host`) between two cards, while it is tried.
Each fires once, at the first step (from 1), decode round (from 0) or stage that is not below the given one. `wrap` moves
the counters of both ranks to just below 2^32. Ranks that start again do so without faults, unless more of them stand
behind commas: the second is for the second start, and so on; an empty one is none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...checkpoint.errors import InputError
from ...checkpoint.numbers import is_count

MAILBOX_DOOR = "DUOVOLT_MAILBOX_FAULT"
LOCKSTEP_DOOR = "DUOVOLT_LOCKSTEP_FAULT"
START_DOOR = "DUOVOLT_START_FAULT"
LINK_DOOR = "DUOVOLT_LINK_FAULT"
DOORS = (MAILBOX_DOOR, LOCKSTEP_DOOR, START_DOOR, LINK_DOOR)
_KINDS = {
    MAILBOX_DOOR: ("drop", "stale", "wrap"),
    LOCKSTEP_DOOR: ("hash", "position", "count"),
    START_DOOR: ("never", "twice"),
}
_WITH_DELAY = (MAILBOX_DOOR, START_DOOR)


@dataclass
class Fault:
    """One ordered fault; `due` is true once."""

    rank: int
    at: int
    kind: str
    fired: bool = False

    def due(self, rank: int, count: int) -> bool:
        if self.fired or count < self.at or (rank != self.rank and self.kind != "wrap"):
            return False
        self.fired = True
        return True


def read_fault(door: str) -> Fault | None:
    """The fault ordered by the variable `door`. Raises InputError if it does not read as one."""
    text = os.environ.get(door)
    return _read(text, door) if text else None


def of_start(door: str, start: int) -> str:
    """What the variable `door` orders for the ranks' start number `start` (from 0); empty for none.

    Raises InputError if any of it does not read as a fault.
    """
    text = os.environ.get(door, "")
    if not text or door == LINK_DOOR:  # a link is tried before the first start, by processes of its own
        return text if start == 0 else ""
    ordered = text.split(",")
    for one in filter(None, ordered):
        _read(one, door)
    return ordered[start] if start < len(ordered) else ""


def trial_fault(way: str) -> str:
    """The mailbox fault ordered for the trial of `way`; empty if there is none. Raises InputError as `read_fault`."""
    ordered, _, text = os.environ.get(LINK_DOOR, "").partition("=")
    if not ordered or ordered != way:
        return ""
    _read(text, MAILBOX_DOOR)
    return text


def _read(text: str, door: str) -> Fault:
    kinds, delays = _KINDS[door], door in _WITH_DELAY
    parts = text.split(":")
    valid = len(parts) == 3 and parts[0] in ("0", "1") and is_count(parts[1])
    if not valid or not (parts[2] in kinds or (delays and is_count(parts[2]))):
        what = " or ".join(kinds) + (" or a delay in milliseconds" if delays else "")
        raise InputError(f"{door}={text!r}: expected RANK:NUMBER:KIND with rank 0 or 1 and kind {what}")
    return Fault(int(parts[0]), int(parts[1]), parts[2])
