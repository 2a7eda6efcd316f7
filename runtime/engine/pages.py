"""Paged keys and values: pools of pages shared by the lanes, and each lane's block table."""

import math

import numpy as np
import torch
from torch import Tensor

PAGE = 64  # tokens a page
LINE = 64  # bytes


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


def _untouched_zeros(shape: tuple[int, ...]) -> Tensor:
    """float32 zeros that start on a cache line and cost memory only where something is written.

    numpy's zeros come from untouched memory, but not aligned as torch's own: products over a page in place must have
    the bits of products over a copy of it.
    """
    count = math.prod(shape)
    memory = np.zeros(count + LINE // 4, np.float32)
    skipped = -memory.ctypes.data % LINE // 4
    return torch.from_numpy(memory[skipped : skipped + count].reshape(shape))


class PagedKV:
    """Keys and values of `layers` attention layers, float32 [pages, PAGE, KV heads, D] each.

    All layers share the block tables. Pages are handed out lowest number first, so equal histories give equal tables.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, pages: int, lanes: int) -> None:
        shape = (pages, PAGE, kv_heads, head_dim)
        self.keys = [_untouched_zeros(shape) for _ in range(layers)]
        self.values = [_untouched_zeros(shape) for _ in range(layers)]
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
