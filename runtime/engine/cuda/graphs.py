"""Work captured in CUDA graphs: the first time it runs as it is written, from the second on as a graph, or as several with
steps between them that run as they are written each time."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ....checkpoint.errors import EnvironmentFault
from ....kernels.module import overlapping

Step = Callable[[], None]
Outside = Callable[[Step], None]  # does a step now, or leaves it for each replay


class Graphs:
    """Runs functions of no arguments by key; each must always do the same launches on the same memory.

    Graphs share a pool of memory, so what one leaves in memory of its own is gone when another runs. Where a capture of
    launches that overlap fails, none overlaps from then on; where that fails, too, everything runs uncaptured, and `fault`
    says why. Where work in parts cannot be captured (`parts_fault`), it alone is not: it is the larger. Results have the same
    bits either way, and work is done as many times: one rank may capture what another cannot. `wanted`: what was asked for,
    the same on every rank, whatever came of it.
    """

    def __init__(self, device: torch.device, *, enabled: bool, overlap: bool = True) -> None:
        """overlap: a captured launch may begin before the one before it has ended, where the card can."""
        self.wanted = self.enabled = enabled and device.type == "cuda"
        self.overlap = overlap
        self.fault: str | None = None
        self.parts_fault: str | None = None
        self._device = device
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._parts: dict[Hashable, list[Step]] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        """Pieces of work captured."""
        return len(self._graphs) + len(self._parts)

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

    def run_parts(self, key: Hashable, work: Callable[[Outside], None], *, known: bool = False) -> None:
        """As `run`, for work whose steps given to `outside` are no part of a graph: they run each time, in their place.

        What a step reads and writes must be memory that work keeps from run to run. known: a run of other work has loaded
        all that this needs, so it may be captured at once.
        """
        if not self.enabled or self.parts_fault is not None:
            work(_at_once)
            return
        parts = self._parts.get(key)
        if parts is None and (known or key in self._seen):
            parts = self._capture_parts(key, work)
        self._seen.add(key)
        if parts is None:
            work(_at_once)
            return
        for part in parts:
            part()

    def _capture_parts(self, key: Hashable, work: Callable[[Outside], None]) -> list[Step] | None:
        parts: list[Step] = []
        graph: torch.cuda.CUDAGraph | None = None

        def begin() -> None:
            nonlocal graph
            begun = torch.cuda.CUDAGraph()
            begun.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            graph = begun

        def end() -> None:
            nonlocal graph
            assert graph is not None
            ended, graph = graph, None
            ended.capture_end()
            parts.append(ended.replay)

        def outside(step: Step) -> None:
            end()
            parts.append(step)
            begin()

        stream = self._own_stream()
        try:
            with torch.cuda.stream(stream), overlapping(False), _undisturbed():
                begin()
                try:
                    work(outside)
                finally:
                    if graph is not None:
                        end()
        except (RuntimeError, EnvironmentFault) as error:
            self.parts_fault = str(error).splitlines()[0]
            self._drop(self._parts)
            return None
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._parts[key] = parts
        return parts

    def _own_stream(self) -> torch.cuda.Stream:
        """Where work is captured, behind what the current stream has been given."""
        if self._stream is None:
            # What is captured goes before work beside it of torch's usual priority, the lowest.
            self._stream, self._pool = torch.cuda.Stream(self._device, priority=-1), torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream

    def _give_up(self, error: Exception) -> None:
        self.enabled, self.fault = False, str(error).splitlines()[0]
        self._drop(self._graphs)
        self._drop(self._parts)

    def _drop(self, captured: dict[Any, Any]) -> None:
        """They may still be running."""
        if captured:
            torch.cuda.synchronize(self._device)
        captured.clear()

    def _capture(self, key: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        stream = self._own_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream), _undisturbed():
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
            self._give_up(error)
            return None
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graphs[key, self.overlap] = graph
        return graph


def _at_once(step: Step) -> None:
    step()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within it no garbage is collected: among it may be graphs, and destroying one breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
