"""Streams that must run beside each other are different ones, however many were made before. No GPU."""

import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from duovolt.perf import collective_alone
from duovolt.perf.streams import streams

POOL = 32


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch's pool: handles in turn, the same again after 32."""
    handed, turn, lock = [], count(), threading.Lock()

    def stream(device: torch.device) -> SimpleNamespace:
        with lock:
            handed.append(next(turn) % POOL)
            return SimpleNamespace(cuda_stream=handed[-1])

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    streams.cache_clear()
    yield handed
    streams.cache_clear()


@pytest.mark.parametrize("before", [0, 30, 31])
def test_no_two_are_the_same_and_later_calls_take_them_again(made: list[int], before: int) -> None:
    device = torch.device("cuda", 0)
    for _ in range(before):
        torch.cuda.Stream(device)
    first = streams(device, 3)
    assert len({stream.cuda_stream for stream in first}) == 3
    assert streams(device, 3) is first and len(made) == before + 3


def test_one_that_another_thread_pushed_round_the_pool_is_drawn_again(made: list[int]) -> None:
    device, drawn = torch.device("cuda", 0), torch.cuda.Stream

    def crowded(device: torch.device) -> SimpleNamespace:
        if len(made) == 1:
            for _ in range(POOL - 1):  # another thread's
                drawn(device)
        return drawn(device)

    torch.cuda.Stream = crowded  # type: ignore[assignment,misc] # the fixture puts torch's own back
    assert len({stream.cuda_stream for stream in streams(device, 2)}) == 2
    assert made[0] == made[POOL], "the second was the first again"


def test_sides_of_an_exchange_are_never_the_stream_of_the_capture(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one side would wait for the other's end, which waits for it."""
    captured: list[int] = []
    ran: list[int] = []
    now: list[int] = []

    class Within:
        def __init__(self, stream: SimpleNamespace, into: list[int] | None = None) -> None:
            self.stream, self.into = stream, into

        def __enter__(self) -> None:
            now.append(self.stream.cuda_stream)
            if self.into is not None:
                self.into.append(self.stream.cuda_stream)

        def __exit__(self, *error: object) -> None:
            now.pop()

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: Within(stream, captured))
    monkeypatch.setattr(torch.cuda, "stream", Within)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made_by = torch.cuda.Stream
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None, **vars(made_by(device)))
    )
    for _ in range(2 * POOL):
        collective_alone._seconds(
            [object(), object()], lambda end: lambda: ran.append(now[-1]), torch.device("cuda", 0), 1
        )
        torch.cuda.Stream(torch.device("cuda", 0))  # somebody else's
    for capture, first, second in zip(captured, ran[::2], ran[1::2], strict=True):
        assert len({capture, first, second}) == 3
