"""Paged keys and values: pools of pages shared by the lanes, and each lane's block table."""

import numpy as np
import torch
from torch import Tensor

PAGE = 64  # tokens a page


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class PagedKV:
    """Keys and values of `layers` attention layers, float32 [pages, PAGE, KV heads, D] each.

    All layers share the block tables. Pages are handed out lowest number first, so equal histories give equal tables.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, pages: int, lanes: int) -> None:
        shape = (pages, PAGE, kv_heads, head_dim)
        # numpy's zeros come from untouched memory: a pool for a long context costs only what is written to it.
        self.keys = [torch.from_numpy(np.zeros(shape, np.float32)) for _ in range(layers)]
        self.values = [torch.from_numpy(np.zeros(shape, np.float32)) for _ in range(layers)]
        self._free = list(range(pages - 1, -1, -1))
        self._tables: list[Tensor] = [torch.empty(0, dtype=torch.int64) for _ in range(lanes)]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def claim(self, lane: int, tokens: int) -> bool:
        """Give an empty lane the pages for `tokens` tokens; False, and nothing changes, if too few are free."""
        assert len(self._tables[lane]) == 0, f"lane {lane} already holds pages"
        count = pages_for(tokens)
        if count > len(self._free):
            return False
        self._tables[lane] = torch.tensor([self._free.pop() for _ in range(count)], dtype=torch.int64)
        return True

    def release(self, lane: int) -> None:
        """Take back a lane's pages."""
        self._free = sorted(self._free + self._tables[lane].tolist(), reverse=True)
        self._tables[lane] = torch.empty(0, dtype=torch.int64)

    def table(self, lane: int) -> Tensor:
        """The lane's pages in the order of its tokens, int64."""
        return self._tables[lane]

    def slots(self, lane: int, start: int, count: int) -> Tensor:
        """Where tokens start .. start + count - 1 of a lane go: page * PAGE + offset, int64 [count]."""
        positions = torch.arange(start, start + count)
        assert count == 0 or pages_for(start + count) <= len(self._tables[lane]), f"lane {lane} outgrew its pages"
        return self._tables[lane][positions // PAGE] * PAGE + positions % PAGE
