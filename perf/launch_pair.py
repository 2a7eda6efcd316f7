"""One of two ranks that measure their launches at the same time, each on its card."""

from __future__ import annotations

from functools import partial

import msgspec
import torch

from ..checkpoint.errors import CheckFailed
from ..runtime.parallel.choice import Choice
from ..runtime.parallel.handshake import exchange_bytes
from ..runtime.parallel.ways import open_way
from .device_timing import Together
from .launch_file import Edge, LaunchTime
from .pair import MEETING_SECONDS, WAIT_SECONDS, Partner, part


class Pair:
    """Joined with the other rank. Raises as `open_way` and `Partner.meet` do."""

    def __init__(self, partner: Partner, rank: int, way: str, device: torch.device) -> None:
        self._mailbox = partner.meet(rank, MEETING_SECONDS)
        self.link = open_way(Choice.parse(way), self._mailbox, device, WAIT_SECONDS)
        self._meet = partial(exchange_bytes, self._mailbox, b"")
        piece, out = torch.zeros(1, 256, device=device).half(), torch.zeros(1, 256, device=device)
        self.together = Together(self._meet, partial(self.link.reduce, piece, out))

    def slower(self, launches: list[LaunchTime]) -> list[LaunchTime]:
        """Of each launch the slower rank's time; a round waits for it. Raises CheckFailed if the ranks measured other things."""
        theirs = msgspec.json.decode(
            exchange_bytes(self._mailbox, msgspec.json.encode(launches)), type=list[LaunchTime]
        )
        if [one.key for one in theirs] != [one.key for one in launches]:
            raise CheckFailed("the ranks have measured different launches.")
        return [
            mine if not mine.seconds or mine.seconds >= other.seconds > 0 else other
            for mine, other in zip(launches, theirs, strict=True)
        ]

    def lesser(self, edges: list[Edge]) -> list[Edge]:
        """Of each edge what it saves on the rank where that is less; those that both have measured."""
        theirs = msgspec.json.decode(exchange_bytes(self._mailbox, msgspec.json.encode(edges)), type=list[Edge])
        table = {(one.key, *one.after, one.nbytes): one for one in theirs}
        pairs = ((one, table.get((one.key, *one.after, one.nbytes))) for one in edges)
        return [min(mine, other, key=lambda one: one.saved) for mine, other in pairs if other is not None]

    def close(self) -> None:
        """Part from the other rank, once both have come to it."""
        part(self.link, self._meet)
