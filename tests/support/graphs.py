"""Graphs that only note what they would have captured, so that an engine on a CPU takes the way of captured chunks."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from duovolt.runtime.engine.cuda.graphs import Graphs, Outside, Step


class Written(Graphs):
    """Stands for captured work on a CPU: notes what ran, and lets the steps between graphs run in their place."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), enabled=False)
        self.wanted = self.enabled = True
        self.ran: list[Any] = []
        self.steps = 0

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        work()

    def run_parts(self, key: Hashable, work: Callable[[Outside], None], *, known: bool = False) -> None:
        def outside(step: Step) -> None:
            self.steps += 1
            step()

        self.ran.append(key)
        assert known == (len(set(self.ran)) > 1)  # the first lane's first chunk loads what a capture must not
        work(outside)


class Failing(Written):
    """The capture of chunk number `at` fails: it is read as it is written."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def run_parts(self, key: Hashable, work: Callable[[Outside], None], *, known: bool = False) -> None:
        super().run_parts(key, work, known=known)
        if len(self.ran) == self._at:
            self.parts_fault = "no memory is left"
