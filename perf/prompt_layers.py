"""A layer's linears at a prompt's chunk, as the engine calls them, against cuBLAS on plain fp16 weights, one matrix a call.

Ours give what the layer wants: input products side by side in float32, the gated product of the MLP, fp16 parts of the output
products; cuBLAS gives each product in fp16 and no more. Weights cold, at the shapes of a rank of two of the 27B. Layers follow
one another, and where the way is such their plain weights are made ahead, as in a chunk.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.plain_ahead import PlainAhead
from ..kernels.plain_kept import PlainKept
from ..kernels.prefill import linear_block, linear_blocks, swiglu_block
from ..kernels.tuning import Choice, choice_on, using
from ..kernels.weights import BAND, Weight
from .kernels import CASES, captured, likely_weight, random_weight, time_in_turn
from .prompt_linears import ring, route_choice, store

COPIES = 4
LAYERS = ("attention in", "delta in")
_REST = ("mixer out", "gate up", "down")
_PASSES, _WARM_PASSES = 9, 3
_HEAD_START = 5_000_000  # clocks in which the host gives the card a pass, so that it never waits for the next launch
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Part:
    """One launch of a layer: seconds in the chain, and by itself, by our way and by cuBLAS."""

    name: str
    seconds: float
    cublas: float
    alone: float
    cublas_alone: float

    @property
    def ratio(self) -> float:
        """Share of cuBLAS's speed in the chain."""
        return self.cublas / self.seconds

    @property
    def ratio_alone(self) -> float:
        """Share of cuBLAS's speed by itself."""
        return self.cublas_alone / self.alone


@dataclass(frozen=True)
class LayerRow:
    """Seconds of a layer's linears by one way, and of cuBLAS's products of plain weights."""

    layer: str
    tokens: int
    route: str
    flops: int
    seconds: float
    cublas: float
    parts: tuple[Part, ...]

    @property
    def ratio(self) -> float:
        """Share of cuBLAS's speed."""
        return self.cublas / self.seconds


def _weight(encoding: str, rows: int, columns: int, device: torch.device) -> Weight:
    return (random_weight if encoding == "half" else likely_weight)(encoding, rows, columns, device)


def _calls(name: str, tokens: int, device: torch.device) -> Calls:
    """Of one layer with weights of its own; what they write is scratch."""
    matrices = {case.name: case.matrices for case in CASES if case.name in (name, *_REST)}
    weights = {case: [_weight(*matrix, device) for matrix in own] for case, own in matrices.items()}
    inputs = {
        columns: torch.randn(tokens, columns, device=device).half() for own in matrices.values() for *_, columns in own
    }

    def x(case: str) -> Tensor:
        return inputs[matrices[case][0][2]]

    widths = [rows for _, rows, _ in matrices[name]]
    projection = torch.empty(tokens, sum(widths), device=device)
    calls: Calls = [
        partial(linear_blocks, x(name), weights[name], list(projection.split(widths, dim=1))),
        partial(linear_block, x("mixer out"), weights["mixer out"][0]),
        partial(swiglu_block, x("gate up"), *weights["gate up"]),
        partial(linear_block, x("down"), weights["down"][0]),
    ]
    for call in calls:
        call()  # factors are found before the graph
    return calls


def _plain_calls(name: str, tokens: int, device: torch.device) -> Calls:
    """Of one layer: a call a case, which does the products of its matrices."""
    calls: dict[str, Callable[[], object]] = {}
    for case in CASES:
        if case.name in (name, *_REST):
            products = []
            for _, rows, columns in case.matrices:
                plain = torch.randn(rows, columns, device=device, dtype=torch.float16)
                x, out = (
                    torch.randn(tokens, columns, device=device).half(),
                    torch.empty(tokens, rows, device=device).half(),
                )
                products.append(partial(torch.mm, x, plain.t(), out=out))
            calls[case.name] = partial(_each, products)
    return [calls[case] for case in (name, *_REST)]


def _each(calls: Calls) -> None:
    for call in calls:
        call()


def _all(layers: Sequence[Calls], ahead: PlainAhead | None = None, kept: PlainKept | None = None) -> None:
    with kept.serving() if kept else nullcontext(), ahead.reading("layers") if ahead else nullcontext():
        for calls in layers:
            _each(calls)


@dataclass(frozen=True)
class Way:
    """Layers' launches, the choice that they run with, and room for weights that are made ahead, and for those that stay."""

    layers: Sequence[Calls]
    chosen: Choice
    ahead: PlainAhead | None = None
    kept: PlainKept | None = None


def in_chain(ways: Sequence[Way]) -> list[list[float]]:
    """By way median seconds of each call of a layer, from the end of the call before to its own, in passes through all layers
    that are launched one by one, each way's in turn; the first layer, before which nothing stands, does not count."""
    count = len(ways[0].layers[0])
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    times: list[list[list[float]]] = [[[] for _ in range(count)] for _ in ways]
    with torch.cuda.stream(stream):
        for number in range(-_WARM_PASSES, _PASSES):
            for way, own in zip(ways, times, strict=True):
                with using(way.chosen):
                    each = _timed_pass(way)
                if number >= 0:
                    for place, seconds in enumerate(each[count:]):
                        own[place % count].append(seconds)
    return [[statistics.median(one) for one in own] for own in times]


def _timed_pass(way: Way) -> list[float]:
    """Seconds of every call of one pass on the current stream, which the host gives it before it begins."""
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    calls = [call for own in way.layers for call in own]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    with (
        way.kept.serving() if way.kept else nullcontext(),
        way.ahead.reading("layers") if way.ahead else nullcontext(),
    ):
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) * 1e-3 for begin, end in pairwise(events)]


def _alone(way: Way) -> list[float]:
    """Seconds of each call of a layer when none but its like are launched."""
    found = []
    with using(way.chosen), way.kept.serving() if way.kept else nullcontext():
        for same in zip(*way.layers, strict=True):
            found += time_in_turn([captured(same)], len(same))
    return found


def measure_layers(
    tokens: Sequence[int], device: torch.device, routes: Sequence[str], *, parts: bool = True
) -> Iterator[LayerRow]:
    """Each kind of layer at each T by each way and by cuBLAS, in turn; `parts`: its launches, too."""
    for name in LAYERS:
        cases = {case.name: case.matrices for case in CASES if case.name in (name, *_REST)}
        shapes = [matrix for own in cases.values() for matrix in own]
        values = [sum(rows * columns for _, rows, columns in own) for own in cases.values()]
        for count in tokens:
            plain = [_plain_calls(name, count, device) for _ in range(COPIES)]
            graphs = [captured([partial(_all, plain)])]
            layers = [_calls(name, count, device) for _ in range(COPIES)]
            ways = [Way(plain, choice_on(device))]
            for route in routes:
                with using(route_choice(route, device)):
                    ahead = ring(sum(values), max(values), device)
                    kept = store(route, COPIES * (sum(values) + BAND * max(columns for *_, columns in shapes)), device)
                    graphs.append(captured([partial(_all, layers, ahead, kept)]))  # run once before: its order is noted
                    ways.append(Way(layers, choice_on(device), ahead, kept))
            found: list[tuple[Part, ...]] = []
            if parts:
                chains, alone = in_chain(ways), [_alone(way) for way in ways]
                for chain, by_itself in zip(chains[1:], alone[1:], strict=True):
                    each = zip((name, *_REST), chain, chains[0], by_itself, alone[0], strict=True)
                    found.append(tuple(Part(*one) for one in each))
            theirs, *ours = time_in_turn(graphs, COPIES)
            flops = 2 * count * sum(rows * columns for _, rows, columns in shapes)
            for number, (route, seconds) in enumerate(zip(routes, ours, strict=True)):
                yield LayerRow(name, count, route, flops, seconds, theirs, found[number] if found else ())
