"""Pages of keys and values as numbers: which are free, and who holds the others. Their storage is the executor's."""

from __future__ import annotations

import heapq

PAGE = 64  # tokens a page


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class PagePool:
    """Pages 0 .. pages - 1. The lowest free numbers are handed out first, so equal histories give equal tables.

    free  pages that nobody holds
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages for one holder."""
        assert count <= len(self._free), f"{count} pages taken of {len(self._free)} free"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, pages: list[int]) -> None:
        """One more holder for each of the pages."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: list[int]) -> None:
        """One holder less; a page without any is free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is dropped once too often"
            self._holders[page] -= 1
            if not self._holders[page]:
                heapq.heappush(self._free, page)
