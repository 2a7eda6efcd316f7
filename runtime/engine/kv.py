"""The reference's keys and values: pools of pages, and each lane's block table."""

import math

import numpy as np
import torch
from torch import Tensor

from .pages import PAGE, pages_for

LINE = 64  # bytes


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
    """Keys and values of `layers` attention layers, float32 [pages, PAGE, KV heads, D] each; block tables in common."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, pages: int, lanes: int) -> None:
        shape = (pages, PAGE, kv_heads, head_dim)
        self.keys = [_untouched_zeros(shape) for _ in range(layers)]
        self.values = [_untouched_zeros(shape) for _ in range(layers)]
        self._tables: list[Tensor] = [torch.empty(0, dtype=torch.int64) for _ in range(lanes)]

    def set_table(self, lane: int, pages: list[int]) -> None:
        """Say which pages a lane's tokens lie in."""
        self._tables[lane] = torch.tensor(pages, dtype=torch.int64)

    def table(self, lane: int) -> Tensor:
        """The lane's pages in the order of its tokens, int64."""
        return self._tables[lane]

    def slots(self, lane: int, start: int, count: int) -> Tensor:
        """Where tokens start .. start + count - 1 of a lane go: page * PAGE + offset, int64 [count]."""
        positions = torch.arange(start, start + count)
        assert count == 0 or pages_for(start + count) <= len(self._tables[lane]), f"lane {lane} outgrew its pages"
        return self._tables[lane][positions // PAGE] * PAGE + positions % PAGE

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every layer."""
        for pool in (*self.keys, *self.values):
            pool[target] = pool[source]
