"""Decode linears against the plain read of the same bytes on the same card: cold, and timed in captured graphs.

Each case is launched over copies of its weights that together are many times the second-level cache, in one graph; the
floor is a kernel that only reads as many bytes, measured in the same way at the grid that suits it best.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.errors import EnvironmentFault
from ..kernels.linear import linears, prepare, swiglu
from ..kernels.module import (
    PORTABLE,
    arches_for,
    block_shared_bytes,
    forced_arch,
    load,
    multiprocessor_shared_bytes,
    overlapping,
    overlaps,
)
from ..kernels.tuning import multiprocessors, spread
from ..kernels.weights import Fp8Weight, HalfWeight, Nvfp4Weight, Weight

POOL_BYTES = 2 << 30
MOST_COPIES = 64
# Of all copies at least, however small each is, as far as MOST_COLD of them go: four times an H200's second-level cache.
COLD_BYTES = 256 << 20
MOST_COLD = 4096
REPLAYS = 15
WARM_SECONDS = 0.02
READ_THREADS = 512
READ_BLOCKS_A_SM = (1, 2, 4)
FEW_BYTES = 1 << 20  # for which fewer and smaller blocks may be better
FEW_THREADS, FEW_BLOCKS = 128, (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Case:
    """One launch of a rank of two of the 27B: matrices (encoding, N, K) that share an input."""

    name: str
    matrices: tuple[tuple[str, int, int], ...]
    swiglu: bool = False
    residual: bool = False


CASES = (
    Case("attention in", (("fp8", 6144, 5120), ("fp8", 512, 5120), ("fp8", 512, 5120))),
    Case("delta in", (("fp8", 5120, 5120), ("fp8", 3072, 5120), ("half", 24, 5120), ("half", 24, 5120))),
    Case("mixer out", (("fp8", 5120, 3072),), residual=True),
    Case("gate up", (("nvfp4", 8704, 5120), ("nvfp4", 8704, 5120)), swiglu=True),
    Case("down", (("nvfp4", 5120, 8704),), residual=True),
    Case("down fp8", (("fp8", 5120, 8704),), residual=True),
    Case("mtp fc", (("fp8", 5120, 10240),)),
    Case("draft head", (("fp8", 65536, 5120),)),
    Case("head", (("fp8", 124160, 5120),)),
    Case("head fp16", (("half", 124160, 5120),)),
)


@dataclass(frozen=True)
class Row:
    """A case at T tokens: seconds a launch, bytes of weights, seconds of a plain read of them.

    overlap        launches began before the one before had ended
    floor          the plain read, launched likewise
    floor_in_turn  the plain read, one launch after the other
    """

    case: str
    arch: str
    tokens: int
    nbytes: int
    seconds: float
    overlap: bool
    floor: float
    floor_in_turn: float
    cublas: float | None

    @property
    def ratio(self) -> float:
        """Share of the speed of the plain read that is launched likewise."""
        return self.floor / self.seconds

    @property
    def ratio_in_turn(self) -> float:
        """Share of the speed of the plain read in turn."""
        return self.floor_in_turn / self.seconds


def random_weight(encoding: str, rows: int, columns: int, device: torch.device) -> Weight:
    """A weight of random words: speed does not ask what they mean."""

    def words(*shape: int) -> Tensor:
        return torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=device)

    bands, groups = rows // 32, columns // 16
    if encoding == "nvfp4":
        return Nvfp4Weight(words(bands, groups, 32, 8), words(bands, groups, 32), torch.ones(1, device=device))
    if encoding == "fp8":
        return Fp8Weight(words(bands, groups, 32, 16), torch.ones(rows, device=device))
    return HalfWeight.of(torch.randn(rows, columns, dtype=torch.float16, device=device))


def likely_weight(encoding: str, rows: int, columns: int, device: torch.device) -> Weight:
    """A weight whose values are spread about zero as a model's: the power that products take, and so their clock, follows the
    bits that change."""
    bands, groups = rows // 32, columns // 16
    if encoding == "nvfp4":
        words = torch.randint(0, 0x100, (bands, groups, 32, 8), dtype=torch.uint8, device=device)
        scales = torch.randint(0x60, 0x7F, (bands, groups, 32), dtype=torch.uint8, device=device)
        return Nvfp4Weight(words, scales, torch.full((1,), 1e-4, device=device))
    values = (100 * torch.randn(bands, groups, 32, 16, device=device)).clamp(-448, 448)
    return Fp8Weight(values.to(torch.float8_e4m3fn).view(torch.uint8), torch.full((rows,), 1e-4, device=device))


def time_graph(launches: Sequence[Callable[[], object]], overlap: bool = False) -> float:
    """Median seconds a launch of a graph that holds them in order; `overlap`: where they can, they begin before the one before
    has ended."""
    return time_in_turn([captured(launches, overlap)], len(launches))[0]


def captured(launches: Sequence[Callable[[], object]], overlap: bool = False) -> torch.cuda.CUDAGraph:
    """A graph of the launches in order; the first is run before, so that nothing is loaded in the capture."""
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())  # on which weights were made
    with torch.cuda.stream(stream):
        launches[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), overlapping(overlap):
        for launch in launches:
            launch()
    return graph


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Of the engine's captures' priority: before what is made beside. One for all, for torch keeps a workspace of the vendor's
    products for every stream that had one."""
    return torch.cuda.Stream(device, priority=-1)


def time_in_turn(graphs: Sequence[torch.cuda.CUDAGraph], launches: int) -> list[float]:
    """Median seconds a launch of graphs of `launches` launches each, replayed in turn: at the card's limit of power its clock
    follows what ran before, which is so the same for all. They run for a while before: a card that rested is slower at first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[list[float]] = [[] for _ in graphs]
    ready = time.perf_counter() + WARM_SECONDS
    passes = 0
    while passes < REPLAYS:
        warm = time.perf_counter() >= ready
        for graph, own in zip(graphs, times, strict=True):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if warm:
                own.append(begin.elapsed_time(end) * 1e-3 / launches)
        passes += warm
    return [statistics.median(own) for own in times]


def copies_of(nbytes: int, pool: int = POOL_BYTES) -> int:
    """How many sets of weights make the pool."""
    return max(2, min(MOST_COPIES, -(-pool // nbytes)))


def cold_copies(nbytes: int, pool: int = POOL_BYTES, most: int = MOST_COPIES) -> int:
    """How many sets of so many bytes: together more than a second-level cache holds; of large ones at most `most`."""
    cold = min(MOST_COLD, -(-min(pool, COLD_BYTES) // nbytes))
    return max(2, min(most, -(-pool // nbytes)), cold)


def read_seconds(nbytes: int, device: torch.device, pool: int = POOL_BYTES, overlap: bool = False) -> float:
    """Seconds of the plain read of `nbytes` (rounded down to 16), at the best of a few grids.

    `overlap`: each begins and asks for its first bytes before the one before has ended, as the linears do; at the best, too,
    of blocks that are spread evenly and of blocks that go wherever there is room.
    """
    module = load("read.cu", device.index)
    count = nbytes // 16
    sets = cold_copies(nbytes, pool)
    data = torch.randint(0, 255, (sets, count * 16), dtype=torch.uint8, device=device)
    never = torch.zeros(1, dtype=torch.int32, device=device)
    best = float("inf")
    processors = multiprocessors(device.index)
    grids = [(blocks * processors, READ_THREADS) for blocks in READ_BLOCKS_A_SM]
    if nbytes < FEW_BYTES:
        grids += [(blocks, FEW_THREADS) for blocks in FEW_BLOCKS]
    for grid, threads in grids:
        shared = {0}
        if overlap and grid >= processors:
            limits = block_shared_bytes(device.index), multiprocessor_shared_bytes(device.index)
            shared.add(spread(0, grid, processors, *limits))
        for room in shared:
            calls = [
                partial(module.launch, "read_plain", grid, threads, (part, never, count), room, overlap)
                for part in data
            ]
            best = min(best, time_graph(calls, overlap))
    return best


def measure(
    cases: Sequence[Case],
    tokens: Sequence[int],
    arches: Sequence[str],
    device: torch.device,
    pool: int = POOL_BYTES,
    overlap: bool = False,
) -> list[Row]:
    """Every case at every T, for every architecture: sm_XY of the card, or compute_70, which a V100's code comes from.

    `overlap`: of `time_graph`, for the cases whose code can and the plain read beside them, not for cuBLAS.
    """
    rows = []
    for case in cases:
        weights = [random_weight(*matrix, device) for matrix in case.matrices]
        nbytes = sum(weight.nbytes for weight in weights)
        sets = [weights] + [
            [random_weight(*matrix, device) for matrix in case.matrices] for _ in range(copies_of(nbytes, pool) - 1)
        ]
        in_turn = read_seconds(nbytes, device, pool)
        floor = read_seconds(nbytes, device, pool, overlap=True) if overlap else in_turn
        cublas = {count: _cublas(case, count, device, pool) for count in tokens}
        for arch in arches:
            early = overlap and overlaps(arch)
            with forced_arch(arch):
                prepare(device)
                for count in tokens:
                    seconds = time_graph(launches(case, sets, count, device), overlap)
                    facts = case.name, arch, count, nbytes, seconds, early
                    rows.append(Row(*facts, floor if early else in_turn, in_turn, cublas[count]))
        del sets, weights
    return rows


def launches(case: Case, sets: list[list[Weight]], tokens: int, device: torch.device) -> list[Callable[[], object]]:
    columns = case.matrices[0][2]
    x = torch.randn(tokens, columns, device=device).half()
    if case.swiglu:
        out = torch.empty(tokens, case.matrices[0][1], dtype=torch.float16, device=device)
        return [partial(swiglu, x, gate, up, out) for gate, up in sets]
    outs = [torch.zeros(tokens, rows, device=device) for _, rows, _ in case.matrices]
    residuals = outs if case.residual else None
    return [partial(linears, x, weights, outs, residuals=residuals) for weights in sets]


def _cublas(case: Case, tokens: int, device: torch.device, pool: int) -> float:
    rows, columns = sum(matrix[1] for matrix in case.matrices), case.matrices[0][2]
    sets = min(copies_of(2 * rows * columns, pool), 16)
    plain = torch.randn(sets, rows, columns, dtype=torch.float16, device=device)
    x = torch.randn(tokens, columns, device=device).half()
    out = torch.empty(tokens, rows, dtype=torch.float16, device=device)
    return time_graph([partial(torch.mm, x, part.t(), out=out) for part in plain])


def the_device() -> torch.device:
    """The first CUDA device. Raises EnvironmentFault if there is none."""
    if not torch.cuda.is_available():
        raise EnvironmentFault("no CUDA device: kernels are measured on a GPU. `duovolt kernels report` needs none.")
    return torch.device("cuda", torch.cuda.current_device())


def loadable(device: torch.device) -> list[str]:
    """Architectures to measure: the card's own, and compute_70 where it can be compiled or was built before."""
    found = []
    for arch in arches_for(torch.cuda.get_device_capability(device)):
        try:
            with forced_arch(arch):
                prepare(device)
        except EnvironmentFault:
            if arch != PORTABLE:
                raise
            continue
        found.append(arch)
    return found
