"""What overlap saves in a round, edge by edge: each call behind its real predecessors, in turn and begun early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..kernels.module import overlapping
from .device_timing import Together
from .kernels import copies_of
from .launch_file import BEHIND, Edge, unless_impossible
from .launch_record import Call

Window = tuple[Call, ...]
ABOUT = 0.05  # of bytes: the same size; passes of a round stand a few tokens apart
LEAST = (
    0.93  # of the sum of their times alone: what two or three launches in turn take at least, as these vary a little
)


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


@dataclass(frozen=True)
class _Seen:
    """A window's seconds in turn, and what it saves with all but its first call begun early; NaN if that has no number."""

    window: Window
    in_turn: float
    saved: float


@dataclass
class Edges:
    """Edges as they are found. `pool`: bytes that a graph goes through at least, `most`: of copies; `warm`: calls of a graph
    that find all they read in the second-level cache in a round too. `alone`: seconds of a call by itself, None if they are
    not known; a window that takes less in turn than its calls by themselves, or saves more, has no edge, and a line in `refused`.
    What an exchange asks for is read sooner behind it, by as much as it takes itself at most.

    Ranks of two must ask for the same windows in the same order: a window that holds an exchange takes both.
    """

    clock: Clock
    pool: int
    most: int
    warm: int
    together: Together | None = None
    found: list[Edge] = field(default_factory=list)
    alone: Callable[[Call], float | None] = lambda call: None
    refused: list[str] = field(default_factory=list)
    _seen: list[_Seen] = field(default_factory=list)

    def saved(self, some: Iterable[Window]) -> float:
        """Seconds that the last calls of these windows save together; each edge is measured once, and kept in `found`."""
        total = 0.0
        for window in some:
            edge = self._edge(window)
            if edge is None:
                whole = self._measured(window)
                before = self._measured(window[:-1]).saved if len(window) > 2 else 0.0
                if math.isnan(saved := whole.saved - before):
                    continue
                edge = unless_impossible(
                    partial(Edge, window[-1].key, _after(window), saved, bytes_of(window), whole.in_turn),
                    f"{_names(window)}: in turn {whole.in_turn * 1e6:.1f} us, saved {saved * 1e6:.1f}",
                    self.refused,
                )
                if edge is None:
                    continue
                self.found.append(edge)
            total += edge.saved
        return total

    def _edge(self, window: Window) -> Edge | None:
        key, after, nbytes = window[-1].key, _after(window), bytes_of(window)
        for edge in self.found:
            if (edge.key, edge.after) == (key, after) and abs(edge.nbytes - nbytes) <= ABOUT * nbytes:
                return edge
        return None

    def _measured(self, window: Window) -> _Seen:
        nbytes = bytes_of(window)
        for one in self._seen:
            same = [call.key for call in one.window] == [call.key for call in window]
            if same and abs(bytes_of(one.window) - nbytes) <= ABOUT * nbytes:
                return one
        rows = self._rows(window)
        together = self.together if any(call.is_exchange for call in window) else None
        in_turn, early = (
            self.clock([Placed(call, way and place > 0) for row in rows for place, call in enumerate(row)], together)
            / len(rows)
            for way in (False, True)
        )
        saved = math.nan if self._is_refused(window, in_turn) else in_turn - early
        self._seen.append(_Seen(window, in_turn, saved))
        return self._seen[-1]

    def _is_refused(self, window: Window, in_turn: float) -> bool:
        alone = [self.alone(call) for call in window]
        total = sum(one or 0.0 for one in alone)
        asking = sum(one or 0.0 for call, one in zip(window[:-1], alone, strict=False) if call.asks)
        if not all(alone) or not in_turn < LEAST * (total - asking):  # NaN has no edge anyway
            return False
        self.refused.append(f"{_names(window)}: in turn {in_turn * 1e6:.1f} us, one by one {total * 1e6:.1f}")
        return True

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


def _names(window: Window) -> str:
    return " > ".join(call.key for call in window)


def _after(window: Window) -> list[str]:
    return [one.key for one in reversed(window[:-1])]


def windows(calls: Sequence[Call]) -> Iterator[Window]:
    """Each call but the first, with the predecessors that its edge goes by, in their order."""
    for place in range(1, len(calls)):
        yield tuple(calls[max(0, place - BEHIND) : place + 1])


def bytes_of(window: Window) -> float:
    """Of keys and values."""
    return sum(call.nbytes for call in window)
