"""Pages of keys and values as numbers: which are free, and who holds the others. Their storage is the executor's."""

from __future__ import annotations

import heapq

PAGE = 64  # tokens a page


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class PagePool:
    """Pages 0 .. pages - 1. The lowest free numbers are handed out first, so equal histories give equal tables.

    A page is held by lanes (`hold`, `drop`), by prefixes kept for later prompts (`keep`, `forget`), or free.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))
        self._lanes = [0] * pages
        self._prefixes = [0] * pages
        self._idle = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only prefixes hold."""
        return self._idle

    def idle_of(self, pages: list[int]) -> int:
        """How many of `pages`, all different, only prefixes hold."""
        return sum(not self._lanes[page] and self._prefixes[page] > 0 for page in pages)

    def take(self, count: int) -> list[int]:
        """`count` free pages for one lane."""
        assert count <= len(self._free), f"{count} pages taken of {len(self._free)} free"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._lanes[page] = 1
        return taken

    def hold(self, pages: list[int]) -> None:
        """One more lane for each of the pages, which lanes or prefixes hold already."""
        for page in pages:
            assert self._lanes[page] or self._prefixes[page], f"page {page} is free"
            self._idle -= not self._lanes[page]
            self._lanes[page] += 1

    def drop(self, pages: list[int]) -> None:
        """One lane less for each of the pages."""
        for page in pages:
            assert self._lanes[page] > 0, f"page {page} is dropped once too often"
            self._lanes[page] -= 1
            if not self._lanes[page]:
                if self._prefixes[page]:
                    self._idle += 1
                else:
                    heapq.heappush(self._free, page)

    def keep(self, pages: list[int]) -> None:
        """One more prefix for each of the pages, which a lane holds."""
        for page in pages:
            assert self._lanes[page], f"page {page} belongs to no lane"
            self._prefixes[page] += 1

    def forget(self, pages: list[int]) -> None:
        """One prefix less for each of the pages."""
        for page in pages:
            assert self._prefixes[page] > 0, f"page {page} is forgotten once too often"
            self._prefixes[page] -= 1
            if not self._prefixes[page] and not self._lanes[page]:
                self._idle -= 1
                heapq.heappush(self._free, page)
