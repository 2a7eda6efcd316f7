"""What overlap saves in a round, edge by edge: each call behind its real predecessors, in turn and begun early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..kernels.module import overlapping
from .device_timing import Together
from .kernels import copies_of
from .launch_file import BEHIND, Edge
from .launch_record import Call

Window = tuple[Call, ...]
ABOUT = 0.05  # of bytes: the same size; passes of a round stand a few tokens apart


@dataclass(frozen=True)
class Placed:
    """A call of a graph whose launches overlap; `early`: it may begin before the one before it has ended."""

    call: Call
    early: bool

    def __call__(self) -> object:
        with overlapping(self.early):
            return self.call()


Clock = Callable[
    [Sequence[Placed], Together | None], float
]  # seconds of all of them in one graph, NaN if there are none


@dataclass
class Edges:
    """Edges as they are found. `pool`: bytes that a graph goes through at least, `most`: of copies; `warm`: calls of a graph
    that find all they read in the second-level cache in a round too.

    Ranks of two must ask for the same windows in the same order: a window that holds an exchange takes both.
    """

    clock: Clock
    pool: int
    most: int
    warm: int
    together: Together | None = None
    found: list[Edge] = field(default_factory=list)
    _seen: list[tuple[Window, float]] = field(default_factory=list)

    def saved(self, some: Iterable[Window]) -> float:
        """Seconds that the last calls of these windows save together; each edge is measured once, and kept in `found`."""
        total = 0.0
        for window in some:
            edge = self._edge(window)
            if edge is None:
                saved = self._saved(window) - (self._saved(window[:-1]) if len(window) > 2 else 0.0)
                if math.isnan(saved):
                    continue
                edge = Edge(window[-1].key, _after(window), saved, bytes_of(window))
                self.found.append(edge)
            total += edge.saved
        return total

    def _edge(self, window: Window) -> Edge | None:
        key, after, nbytes = window[-1].key, _after(window), bytes_of(window)
        for edge in self.found:
            if (edge.key, edge.after) == (key, after) and abs(edge.nbytes - nbytes) <= ABOUT * nbytes:
                return edge
        return None

    def _saved(self, window: Window) -> float:
        """Seconds that a window saves, all but its first call begun early; NaN if the host was too busy."""
        nbytes = bytes_of(window)
        for other, saved in self._seen:
            same = [one.key for one in other] == [one.key for one in window]
            if same and abs(bytes_of(other) - nbytes) <= ABOUT * nbytes:
                return saved
        rows = self._rows(window)
        together = self.together if any(call.is_exchange for call in window) else None
        in_turn, early = (
            self.clock([Placed(call, way and place > 0) for row in rows for place, call in enumerate(row)], together)
            for way in (False, True)
        )
        self._seen.append((window, (in_turn - early) / len(rows)))
        return self._seen[-1][1]

    def _rows(self, window: Window) -> list[list[Call]]:
        """The window again and again, each over memory of its own, until a pool's bytes are through."""
        reads = sum(call.cold_reads for call in window)
        if not reads:
            return [list(window)] * max(2, self.warm // len(window))
        held = max(1, sum({id(part): part.nbytes for call in window for part in call.cold_tensors()}.values()))
        rows = [list(window)]
        for _ in range(min(copies_of(math.ceil(reads), self.pool), max(2, self.most // held)) - 1):
            made: dict[int, object] = {}
            rows.append([call.copied(made) for call in window])
        return rows


def _after(window: Window) -> list[str]:
    return [one.key for one in reversed(window[:-1])]


def windows(calls: Sequence[Call]) -> Iterator[Window]:
    """Each call but the first, with the predecessors that its edge goes by, in their order."""
    for place in range(1, len(calls)):
        yield tuple(calls[max(0, place - BEHIND) : place + 1])


def bytes_of(window: Window) -> float:
    """Of keys and values."""
    return sum(call.nbytes for call in window)
