"""Work captured in CUDA graphs: the first time it runs as it is written, from the second on as a graph."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ....checkpoint.errors import EnvironmentFault
from ....kernels.module import overlapping


class Graphs:
    """Runs functions of no arguments by key; each must always do the same launches on the same memory.

    Graphs share a pool of memory, so what one leaves in memory of its own is gone when another runs. Where a capture of
    launches that overlap fails, none overlaps from then on; where that fails, too, everything runs uncaptured, and `fault`
    says why. Results have the same bits either way.
    """

    def __init__(self, device: torch.device, *, enabled: bool, overlap: bool = True) -> None:
        """overlap: a captured launch may begin before the one before it has ended, where the card can."""
        self.enabled = enabled and device.type == "cuda"
        self.overlap = overlap
        self.fault: str | None = None
        self._device = device
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Graphs captured."""
        return len(self._graphs)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within it no launch overlaps, so that each can be timed by itself."""
        wanted, self.overlap = self.overlap, False
        try:
            yield
        finally:
            self.overlap = wanted

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work of `key` on the current stream."""
        if not self.enabled:
            work()
            return
        graph = self._graphs.get((key, self.overlap))
        if graph is None and key in self._seen:
            graph = self._capture(key, work)
        self._seen.add(key)  # the first run loads what a capture must not
        if graph is None:
            work()
        else:
            graph.replay()

    def _capture(self, key: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    with overlapping(self.overlap):
                        work()
                finally:
                    graph.capture_end()
        except (RuntimeError, EnvironmentFault) as error:
            if self.overlap:  # a driver may know graphs, but not these
                self.overlap = False
                return self._capture(key, work)
            self.enabled, self.fault = False, str(error).splitlines()[0]
            self._graphs.clear()
            return None
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._graphs[key, self.overlap] = graph
        return graph
