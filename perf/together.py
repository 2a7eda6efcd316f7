"""Two ranks in one process, for measuring what their arithmetic gives: threads that launch in turn, no link between them.

Both work on one device, each on whatever streams it likes. An exchange is an addition that either makes once both parts have
been launched, so no kernel waits for the other rank, as the mailbox's do, and one card is enough: its stream waits for the
other's part, and goes on once both have read both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ..runtime.parallel.device import check_gather, check_reduce

T = TypeVar("T")
_SECONDS = 600.0  # one rank may compile what the other waits for


class _Meeting:
    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=_SECONDS)
        self.parts: list[Tensor | None] = [None, None]
        self.launched: list[torch.cuda.Event | None] = [None, None]  # each part
        self.read: list[torch.cuda.Event | None] = [None, None]  # both parts, by each rank


class TogetherLink:
    """The DeviceCollective of one of the two: the sums and gathers of `MailboxDevice`, with the same bits."""

    size = 2
    name = "together"
    halves = False

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def reduce(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out)
        self._reduce(part, out)

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out, limited=False)
        self._reduce(part, out)

    def _reduce(self, part: Tensor, out: Tensor) -> None:
        def add(first: Tensor, second: Tensor) -> None:
            out.copy_(first.float() + second.float())

        self._meet(part, add)

    def gather(self, part: Tensor, out: Tensor) -> None:
        check_gather(part, out, self.size)

        def join(first: Tensor, second: Tensor) -> None:
            out.copy_(torch.cat((first, second), dim=1))

        self._meet(part, join)

    def _meet(self, part: Tensor, action: Callable[[Tensor, Tensor], None]) -> None:
        meeting = self._meeting
        meeting.parts[self.rank], meeting.launched[self.rank] = part, _recorded(part)
        meeting.barrier.wait()
        first, second = meeting.parts
        assert first is not None and second is not None
        _await(meeting.launched[1 - self.rank])
        action(first, second)
        meeting.read[self.rank] = _recorded(part)
        meeting.barrier.wait()
        _await(meeting.read[1 - self.rank])  # neither part is written again before both have been read

    def check(self) -> None:
        return None


def _recorded(part: Tensor) -> torch.cuda.Event | None:
    """An event of what has been launched so far on the current stream of the part's card."""
    return torch.cuda.current_stream(part.device).record_event() if part.is_cuda else None


def _await(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.wait()


class Together:
    """`both(action)` runs `action(rank)` of both ranks side by side, whose `links` meet in it."""

    def __init__(self, device: torch.device) -> None:
        self._meeting = _Meeting()
        self.links = [TogetherLink(rank, self._meeting) for rank in (0, 1)]
        self._device = device
        self._pool = ThreadPoolExecutor(2, initializer=self._begin)

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def both(self, action: Callable[[int], T]) -> Sequence[T]:
        """Both results, rank 0's first. Raises what one of them raised, which frees the other from its wait."""

        def work(rank: int) -> T:
            try:
                return action(rank)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        runs = [self._pool.submit(work, rank) for rank in (0, 1)]
        errors = [error for run in runs if (error := run.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [run.result() for run in runs]

    def close(self) -> None:
        self._pool.shutdown()
