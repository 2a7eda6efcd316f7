"""A layer's linears at a prompt's chunk, as the engine calls them, against cuBLAS on plain fp16 weights, one matrix a call.

Ours give what the layer wants: input products side by side in float32, the gated product of the MLP, fp16 parts of the output
products; cuBLAS gives each product in fp16 and no more. Weights cold, at the shapes of a rank of two of the 27B.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..kernels.prefill import linear_block, linear_blocks, swiglu_block
from ..kernels.tuning import using
from ..kernels.weights import Weight
from .kernels import CASES, captured, likely_weight, random_weight, route_choice, time_in_turn

COPIES = 4
LAYERS = ("attention in", "delta in")
_REST = ("mixer out", "gate up", "down")


@dataclass(frozen=True)
class LayerRow:
    """Seconds of a layer's linears by one way, and of cuBLAS's products of plain weights."""

    layer: str
    tokens: int
    route: str
    flops: int
    seconds: float
    cublas: float

    @property
    def ratio(self) -> float:
        """Share of cuBLAS's speed."""
        return self.cublas / self.seconds


def _weight(encoding: str, rows: int, columns: int, device: torch.device) -> Weight:
    return (random_weight if encoding == "half" else likely_weight)(encoding, rows, columns, device)


def _calls(name: str, tokens: int, device: torch.device) -> list[Callable[[], object]]:
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
    calls: list[Callable[[], object]] = [
        partial(linear_blocks, x(name), weights[name], list(projection.split(widths, dim=1))),
        partial(linear_block, x("mixer out"), weights["mixer out"][0]),
        partial(swiglu_block, x("gate up"), *weights["gate up"]),
        partial(linear_block, x("down"), weights["down"][0]),
    ]
    for call in calls:
        call()  # factors are found before the graph
    return calls


def _plain_calls(name: str, tokens: int, device: torch.device) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for case in CASES:
        if case.name in (name, *_REST):
            for _, rows, columns in case.matrices:
                plain = torch.randn(rows, columns, device=device, dtype=torch.float16)
                x, out = (
                    torch.randn(tokens, columns, device=device).half(),
                    torch.empty(tokens, rows, device=device).half(),
                )
                calls.append(partial(torch.mm, x, plain.t(), out=out))
    return calls


def _all(layers: Sequence[Sequence[Callable[[], object]]]) -> None:
    for calls in layers:
        for call in calls:
            call()


def measure_layers(tokens: Sequence[int], device: torch.device, routes: Sequence[str]) -> Iterator[LayerRow]:
    """Each kind of layer at each T by each way and by cuBLAS, in turn."""
    for name in LAYERS:
        shapes = [matrix for case in CASES if case.name in (name, *_REST) for matrix in case.matrices]
        for count in tokens:
            plain = [_plain_calls(name, count, device) for _ in range(COPIES)]
            graphs = [captured([partial(_all, plain)])]
            layers = [_calls(name, count, device) for _ in range(COPIES)]
            for route in routes:
                with using(route_choice(route, device)):
                    graphs.append(captured([partial(_all, layers)]))
            theirs, *ours = time_in_turn(graphs, COPIES)
            flops = 2 * count * sum(rows * columns for _, rows, columns in shapes)
            for route, seconds in zip(routes, ours, strict=True):
                yield LayerRow(name, count, route, flops, seconds, theirs)
