"""Times of launches on a GPU that neither Python nor the L2 cache explains.

Launches are captured in a graph. The stream is held by a spinning kernel until the whole graph is queued behind it, and the
first event must not have passed by then: otherwise the host was part of the time, and the timing says so.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.errors import EnvironmentFault
from ..kernels.module import load, overlapping

PROBE = "probe.cu"
REPEATS = 15
_WARM = 2
_SHORTEST_HOLD_US = 100
_LONGEST_HOLD_US = 200_000
_NODES = (256, 2304)  # lengths of the chains whose difference gives the cost of a node


@dataclass(frozen=True)
class Timing:
    """Seconds a launch: median of repeats; spread: (largest - smallest) / median. `dry`: the queue ran dry."""

    seconds: float
    spread: float
    dry: bool = False


@dataclass(frozen=True)
class Together:
    """Two ranks that time the same launches at once: `meet` returns when both have called it, `exchange` takes both cards."""

    meet: Callable[[], object]
    exchange: Callable[[], object]


def time_queued(
    launches: Sequence[Callable[[], object]],
    device: torch.device,
    repeats: int = REPEATS,
    together: Together | None = None,
    overlap: bool = False,
) -> Timing:
    """Times a graph of the launches in order. Call each once before, so that nothing is compiled in the capture.

    `overlap`: those that can begin before the one before has ended do so, as in the engine's graphs. On a device without
    graphs the launches are called, and it is their host's time.
    """
    if device.type != "cuda":
        return _called(launches, repeats)
    probe = load(PROBE, device.index)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        launches[0]()
        probe.launch("hold", 1, 1, (1,))
    stream.synchronize()
    graph = _captured(launches, stream, overlap)
    with torch.cuda.stream(stream):
        submitted = 0.0
        for _ in range(_WARM):
            begin = time.perf_counter()
            graph.replay()
            submitted = time.perf_counter() - begin
            stream.synchronize()
        hold = _SHORTEST_HOLD_US * (1 if together is None else 4) + int(2e6 * submitted)
        times, dry = [], 0
        for _ in range(repeats):
            seconds, ran_dry = _replay(graph, stream, probe.launch, hold, together)
            if ran_dry:
                dry += 1
                hold = min(2 * hold, _LONGEST_HOLD_US)
            else:
                times.append(seconds)
    count = len(launches)
    if len(times) < max(3, repeats // 2):  # a busy host may lose a few
        return Timing(math.nan, math.nan, dry=True)
    middle = statistics.median(times)
    return Timing(middle / count, (max(times) - min(times)) / middle)


def _called(launches: Sequence[Callable[[], object]], repeats: int) -> Timing:
    times = []
    for _ in range(max(1, repeats // 5)):
        begun = time.perf_counter()
        for launch in launches:
            launch()
        times.append(time.perf_counter() - begun)
    middle = statistics.median(times)
    return Timing(middle / len(launches), (max(times) - min(times)) / middle)


def _captured(
    launches: Sequence[Callable[[], object]], stream: torch.cuda.Stream, overlap: bool
) -> torch.cuda.CUDAGraph:
    """A graph of the launches; they follow in turn where a driver does not take a graph of launches that overlap."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream), overlapping(overlap):
            for launch in launches:
                launch()
    except (RuntimeError, EnvironmentFault):
        if not overlap:
            raise
        return _captured(launches, stream, False)
    return graph


def node_cost(device: torch.device, repeats: int = REPEATS) -> Timing:
    """Seconds that a graph's node costs in a chain of kernels that do nothing."""
    probe = load(PROBE, device.index)
    short, long = (time_queued([lambda: probe.launch("empty", 1, 32, ())] * n, device, repeats) for n in _NODES)
    if short.dry or long.dry:
        return Timing(math.nan, math.nan, dry=True)
    nodes = _NODES[1] - _NODES[0]
    seconds = (long.seconds * _NODES[1] - short.seconds * _NODES[0]) / nodes
    return Timing(max(0.0, seconds), max(short.spread, long.spread))  # a disturbed clock may tell less than nothing


def start_cost(device: torch.device, node_seconds: float, repeats: int = REPEATS) -> float:
    """Seconds that a graph takes beside its nodes, as `time_queued` sees it."""
    probe = load(PROBE, device.index)
    found = time_queued([lambda: probe.launch("empty", 1, 32, ())] * _NODES[0], device, repeats)
    return max(0.0, (found.seconds - node_seconds) * _NODES[0])


def replay_cost(device: torch.device, nodes: int = 512, rounds: int = 8) -> float:
    """Seconds from the last node of a graph to the first of the next, with a small copy to the host between them."""
    probe = load(PROBE, device.index)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    probe.launch("empty", 1, 32, ())
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(nodes):
            probe.launch("empty", 1, 32, ())
    report, landed = torch.zeros(16, dtype=torch.int32, device=device), torch.zeros(16, dtype=torch.int32).pin_memory()

    def seconds(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        probe.launch("hold", 1, 1, (_LONGEST_HOLD_US // 16,))
        begin.record(stream)
        graph.replay()
        for _ in range(replays - 1):
            landed.copy_(report, non_blocking=True)
            graph.replay()
        end.record(stream)
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    with torch.cuda.stream(stream):
        seconds(2)
        one, many = (statistics.median(seconds(count) for _ in range(REPEATS)) for count in (1, 1 + rounds))
    return max(0.0, (many - one) / rounds - one)


def _replay(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    launch: Callable[..., None],
    hold: int,
    together: Together | None,
) -> tuple[float, bool]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if together is not None:
        together.meet()
    launch("hold", 1, 1, (min(hold, _LONGEST_HOLD_US),))
    if together is not None:
        together.exchange()
    begin.record(stream)
    graph.replay()
    end.record(stream)
    ran_dry = begin.query()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3, ran_dry
