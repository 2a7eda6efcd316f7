"""The lanes' claims on the pool of pages: what an answer may need in all is promised when it gets its lane."""

from __future__ import annotations

from .lane import Lane
from .pages import PAGE, PagePool, pages_for
from .speculation import MAX_DRAFTS

AHEAD = 2 * (1 + MAX_DRAFTS)  # tokens that two rounds may write, so that the second may begin before the first is known
GROWTH = 16  # pages a growing lane takes at a time


class Claims:
    """Hands pages out as lanes grow, and never so many promises that a lane could not be given what it was promised."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._promised: dict[int, int] = {}  # lane index -> pages in all
        self._taken: dict[int, int] = {}

    @property
    def outstanding(self) -> int:
        """Pages promised and not yet taken."""
        return sum(self._promised.values()) - sum(self._taken.values())

    def claim(self, index: int, prompt: int, tokens: int) -> list[int] | None:
        """The first pages of a lane of `tokens` tokens, `prompt` of which are known; None if it must wait."""
        total = pages_for(tokens)
        if total + self.outstanding > self._pool.free:
            return None
        pages = self._pool.take(min(total, pages_for(prompt + AHEAD)))
        self._promised[index], self._taken[index] = total, len(pages)
        return pages

    def grow(self, lane: Lane) -> bool:
        """Give a lane the pages of its next rounds; whether there were any to give."""
        total = self._promised[lane.index]
        if len(lane.pages) >= min(total, pages_for(lane.length + AHEAD)):
            return False
        lane.pages += self._pool.take(min(GROWTH, total - len(lane.pages)))
        self._taken[lane.index] = len(lane.pages)
        assert len(lane.pages) * PAGE >= min(total * PAGE, lane.length + AHEAD)
        return True

    def release(self, lane: Lane) -> None:
        """The lane has ended."""
        self._pool.drop(lane.pages)
        del self._promised[lane.index], self._taken[lane.index]
