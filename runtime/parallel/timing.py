"""The time of an exchange between two ranks, from one to the next in a captured graph, launch included."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from ...kernels import mailbox as ops
from .device import DeviceCollective

Meet = Callable[[], object]  # returns when both ranks have called it
IN_A_GRAPH = 100
REPLAYS = 15
WARM = 3


def seconds_each(action: Callable[[int], object], meet: Meet, device: torch.device, count: int = IN_A_GRAPH) -> float:
    """Median seconds of `action(i)` in a graph of `count` of them, both ranks starting together."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        action(0)
        action(1)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for index in range(count):
            action(index)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for index in range(REPLAYS + WARM):
        torch.cuda.current_stream(device).synchronize()
        meet()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= WARM:
            times.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times)


def reduce_seconds(
    collective: DeviceCollective, meet: Meet, device: torch.device, tokens: int, hidden: int = 5120
) -> float:
    """Seconds of one small reduction."""
    part = torch.ones(tokens, hidden, device=device).half()
    out = torch.empty(tokens, hidden, device=device)
    return seconds_each(lambda index: collective.reduce(part, out), meet, device)


def large_seconds(collective: DeviceCollective, meet: Meet, device: torch.device, nbytes: int) -> float:
    """Seconds of one reduction of `nbytes` of fp16 by the way for large ones."""
    part = torch.ones(nbytes // 2048, 1024, device=device).half()
    out = torch.empty(nbytes // 2048, 1024, device=device)
    return seconds_each(lambda index: collective.reduce_large(part, out), meet, device, 10)


def gather_seconds(collective: DeviceCollective, meet: Meet, device: torch.device, rows: int, columns: int) -> float:
    """Seconds of one gather."""
    part = torch.ones(rows, columns, device=device)
    out = torch.empty(rows, 2 * columns, device=device)
    return seconds_each(lambda index: collective.gather(part, out), meet, device, 20)


def skew_seconds(
    collective: DeviceCollective, meet: Meet, device: torch.device, tokens: int, late: float, hidden: int = 5120
) -> float:
    """What rank skew costs a small reduction beyond the wait itself.

    The ranks come late by `late` seconds in turn, against both coming late together: either way an exchange can end
    `late` after the one before it.
    """
    part = torch.ones(tokens, hidden, device=device).half()
    out = torch.empty(tokens, hidden, device=device)

    def exchange(index: int, lingers: bool) -> None:
        if lingers:
            ops.linger(late, device)
        collective.reduce(part, out)

    together = seconds_each(lambda index: exchange(index, True), meet, device)
    in_turn = seconds_each(lambda index: exchange(index, index % 2 == collective.rank), meet, device)
    return in_turn - together
