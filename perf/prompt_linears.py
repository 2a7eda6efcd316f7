"""Linears of many tokens, one matrix at a time, against cuBLAS on plain fp16 weights: cold, in captured graphs, at the shapes of
a rank of two of the 27B.

By a way that makes plain weights ahead, a matrix is measured as a chunk runs it: in a long run of matrices of its shape, each
dequantised beside the products before it, in a ring of the engine's size. The first of the run is hidden by nothing, and counts.
Where plain weights stay nothing is dequantised, and the run takes what its products take.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from ..kernels.plain_ahead import PlainAhead
from ..kernels.plain_kept import PlainKept
from ..kernels.prefill import ahead_elements, linear_block
from ..kernels.tuning import AHEAD, MOST_WIDE, Choice, choice, choice_on, using
from .kernels import CASES, captured, likely_weight, time_in_turn

COPIES = 8
ROUNDS = 4  # of the copies in a run: the second-level cache holds none of them until it comes again
PREFILL = (("nvfp4", 17408, 5120), ("nvfp4", 5120, 8704), ("fp8", 7168, 5120), ("fp8", 5120, 3072))
# Those that other layers have, and gate or up by itself.
MORE = (("nvfp4", 8704, 5120), ("fp8", 8192, 5120), ("fp8", 5120, 8704), ("fp8", 5120, 10240))
# Ways of a linear of many tokens: this card's own, the decode linear and dequantised weights only, the wide linear at every T,
# dequantising beside the vendor's product, the next linears' weights beside this one's product, and weights that stay.
ROUTES = ("chosen", "narrow", "wide", "beside", "ahead", "kept")
_LAYER = ("delta in", "mixer out", "gate up", "down")  # the largest
Calls = Sequence[Callable[[], object]]


def route_choice(route: str, device: torch.device) -> Choice:
    """The card's choice, but for the way that is asked for."""
    own = choice(device.index)
    layers = own.plain_ahead or AHEAD
    narrow = msgspec.structs.replace(own, wide_up_to=0, overlap_dequantising=False, plain_ahead=0)
    return {
        "chosen": own,
        "narrow": narrow,
        "wide": msgspec.structs.replace(own, wide_from=1, wide_up_to=MOST_WIDE, plain_ahead=0),
        "beside": msgspec.structs.replace(narrow, overlap_dequantising=True),
        "kept": narrow,
        "ahead": msgspec.structs.replace(narrow, plain_ahead=layers),
    }[route]


def ring(layer: int, largest: int, device: torch.device) -> PlainAhead | None:
    """Room for weights that are made ahead, where the present choice is such; `layer`, `largest`: values of the largest
    layer and matrix."""
    if device.type != "cuda":
        return None
    layers = choice_on(device).layers_ahead(torch.cuda.get_device_capability(device))
    return PlainAhead(ahead_elements(layer, largest, layers), device) if layers else None


def store(route: str, values: int, device: torch.device) -> PlainKept | None:
    """Room for so many weights that stay, by the route that has it."""
    return PlainKept(values, values, device) if route == "kept" and device.type == "cuda" else None


def run_of(calls: Calls, ahead: PlainAhead | None, kept: PlainKept | None = None) -> None:
    """All in order, as a pass of a chunk where weights are made ahead, or stay."""
    with kept.serving() if kept else nullcontext(), ahead.reading("run") if ahead else nullcontext():
        for call in calls:
            call()


@dataclass(frozen=True)
class PrefillRow:
    """`linear_block` by one way against cuBLAS on plain fp16 weights, seconds, weights cold."""

    encoding: str
    rows: int
    columns: int
    tokens: int
    route: str
    seconds: float
    cublas: float

    @property
    def ratio(self) -> float:
        """Share of cuBLAS's speed."""
        return self.cublas / self.seconds


def measure_prefill(
    tokens: Sequence[int],
    device: torch.device,
    routes: Sequence[str] = ROUTES[:1],
    shapes: Sequence[tuple[str, int, int]] = PREFILL,
) -> Iterator[PrefillRow]:
    """Each shape (encoding, N, K) at each T by each way and by cuBLAS, in turn; so are copies of the weights, that none is in a
    cache."""
    layer = sum(rows * columns for case in CASES if case.name in _LAYER for _, rows, columns in case.matrices)
    largest = max(n * k for _, n, k in PREFILL)
    for encoding, rows, columns in shapes:
        weights = [likely_weight(encoding, rows, columns, device) for _ in range(COPIES)] * ROUNDS
        plain = torch.randn(COPIES, rows, columns, device=device, dtype=torch.float16)
        for count in tokens:
            x = torch.randn(count, columns, device=device).half()
            out = torch.empty(count, rows, dtype=torch.float16, device=device)
            products = [partial(torch.mm, x, part.t(), out=out) for part in plain] * ROUNDS
            graphs = [captured([partial(run_of, products, None)])]
            rings: list[PlainAhead | PlainKept | None] = []  # which graphs go on using
            for route in routes:
                with using(route_choice(route, device)):
                    ahead, kept = ring(layer, largest, device), store(route, COPIES * rows * columns, device)
                    rings += [ahead, kept]
                    calls = [partial(linear_block, x, weight, out) for weight in weights]
                    # Run once before it is captured, so that factors and order are found.
                    graphs.append(captured([partial(run_of, calls, ahead, kept)]))
            theirs, *ours = time_in_turn(graphs, len(weights))
            for route, seconds in zip(routes, ours, strict=True):
                yield PrefillRow(encoding, rows, columns, count, route, seconds, theirs)
