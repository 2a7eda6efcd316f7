"""What an exchange between two ranks costs: every transport in the same run, in captured graphs.

A graph holds many exchanges in a row, so a figure is the time from one to the next, launch included. With skew, rank 0
and rank 1 come late in turn, by a known time: what an exchange costs beyond it is the price of waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..runtime.parallel.device import DeviceCollective
from ..runtime.parallel.links import exchange_bytes
from ..runtime.parallel.mailbox import Mailbox

IN_A_GRAPH = 100
REPLAYS = 15
WARM = 3


def seconds_each(
    action: Callable[[int], object], mailbox: Mailbox, device: torch.device, count: int = IN_A_GRAPH
) -> float:
    """Median seconds of `action(i)` in a graph of `count` of them, both ranks starting together."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        action(0)
        action(1)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            action(index)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for index in range(REPLAYS + WARM):
        torch.cuda.synchronize(device)
        exchange_bytes(mailbox, b"")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= WARM:
            times.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times)


def reduce_seconds(
    collective: DeviceCollective, mailbox: Mailbox, device: torch.device, tokens: int, hidden: int = 5120
) -> float:
    """Seconds of one small reduction."""
    part = torch.randn(tokens, hidden, device=device).half()
    out = torch.empty(tokens, hidden, device=device)
    return seconds_each(lambda index: collective.reduce(part, out), mailbox, device)


def gather_seconds(
    collective: DeviceCollective, mailbox: Mailbox, device: torch.device, rows: int, columns: int
) -> float:
    """Seconds of one gather."""
    part = torch.randn(rows, columns, device=device)
    out = torch.empty(rows, 2 * columns, device=device)
    return seconds_each(lambda index: collective.gather(part, out), mailbox, device, 20)


def nccl_all_reduce_seconds(mailbox: Mailbox, device: torch.device, tokens: int, hidden: int = 5120) -> float:
    """NCCL's own all-reduce of fp16, summing in fp16: what one would use otherwise."""
    part = torch.randn(tokens, hidden, device=device).half()
    return seconds_each(lambda index: dist.all_reduce(part), mailbox, device)
