"""The lanes' claims on the pool of pages: what an answer may need in all is promised when it gets its lane."""

from __future__ import annotations

from dataclasses import dataclass

from .lane import Lane
from .pages import PagePool, pages_for
from .prefix import Prefix, PrefixCache
from .speculation import MAX_DRAFTS

AHEAD = 2 * (1 + MAX_DRAFTS)  # tokens that two rounds may write, so that the second may begin before the first is known
GROWTH = 16  # pages a growing lane takes at a time


@dataclass(frozen=True)
class Claim:
    """`pages`: a lane's first ones; `copies`: (source, target) pages to copy before anything else is done."""

    pages: list[int]
    copies: list[tuple[int, int]]


class Claims:
    """Hands pages out as lanes grow, and never so many promises that a lane could not be given what it was promised.

    Pages that only prefixes hold count as free: prefixes are let go when their pages are needed.
    """

    def __init__(self, pool: PagePool, prefixes: PrefixCache | None = None) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._promised: dict[int, int] = {}  # lane index -> pages in all
        self._taken: dict[int, int] = {}

    @property
    def outstanding(self) -> int:
        """Pages promised and not yet taken."""
        return sum(self._promised.values()) - sum(self._taken.values())

    def claim(self, index: int, prompt: int, tokens: int, prefix: Prefix | None = None) -> Claim | None:
        """The first pages of a lane of `tokens` tokens, `prompt` of which are known; None if it must wait."""
        shared, copied = ([], []) if prefix is None else (prefix.shared, prefix.copied)
        total = pages_for(tokens)
        fresh = min(total, pages_for(prompt + AHEAD)) - len(shared)
        there = self._pool.free + self._pool.idle - self._pool.idle_of(shared)
        if total - len(shared) + self.outstanding > there or fresh > there - self._pool.idle_of(copied):
            return None
        self._pool.hold(shared + copied)
        pages = shared + self._take(fresh)
        self._pool.drop(copied)
        self._promised[index], self._taken[index] = total, len(pages)
        return Claim(pages, list(zip(copied, pages[len(shared) :], strict=False)))

    def grow(self, lane: Lane) -> bool:
        """Give a lane the pages of its next rounds; whether there were any to give."""
        total = self._promised[lane.index]
        if len(lane.pages) >= min(total, pages_for(lane.length + AHEAD)):
            return False
        lane.pages += self._take(min(GROWTH, total - len(lane.pages)))
        self._taken[lane.index] = len(lane.pages)
        return True

    def release(self, lane: Lane) -> None:
        """The lane has ended."""
        self._pool.drop(lane.pages)
        del self._promised[lane.index], self._taken[lane.index]

    def _take(self, count: int) -> list[int]:
        while self._prefixes is not None and self._pool.free < count:
            self._prefixes.evict()
        return self._pool.take(count)
