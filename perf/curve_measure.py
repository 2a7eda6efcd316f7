"""Measuring a curve: the plain read and the decode linears, cold, at many sizes, row lengths and token counts.

A pool of random words many times the L2 cache is cut into as many weights as fit, and a graph launches the kernel on each in
turn: no byte comes from the cache. What the cache or the host could explain gets no number.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.errors import EnvironmentFault
from ..kernels.linear import linears, prepare
from ..kernels.module import arches_for, forced_arch, load
from ..kernels.tuning import multiprocessors
from ..kernels.weights import BAND, GROUP, Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight, Weight
from .curve import READ, Curve, Point, Refused, Series
from .device_timing import REPEATS, Timing, node_cost, time_queued
from .kernels import READ_BLOCKS_A_SM, READ_THREADS
from .machine import Machine, read_machine

ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half")
KERNELS = (READ, *ENCODINGS)
SMALLEST, LARGEST = 1 << 19, 1 << 30  # bytes a kernel
COLUMNS = 5120  # of the main series: the 27B's hidden size
ROW_LENGTHS = (1024, 4096, 16384)
ROW_LENGTH_BYTES = (4 << 20, 32 << 20)
TOKENS = (1, 2, 4, 8)
TOKEN_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
POOL_CACHES = 40  # a pool holds as many L2 caches
LEAST_CACHES = 16  # fewer, and the cache may hold a share of the bytes that shows
_SHARE_OF_FREE = 0.8  # of the card's memory: randint needs some beside
_ALIGNMENT = 256
_BLOCK = 128
Launches = list[Callable[[], object]]


@dataclass(frozen=True)
class Wanted:
    """What to measure: kernels, sizes an octave, and whether row length and tokens are varied too."""

    kernels: tuple[str, ...] = KERNELS
    steps: int = 2
    variations: bool = True
    repeats: int = REPEATS
    pool_bytes: int | None = None
    arch: str | None = None


def sizes(steps: int, smallest: int = SMALLEST, largest: int = LARGEST) -> list[int]:
    """Bytes from the smallest to the largest, `steps` an octave."""
    octaves = (largest // smallest).bit_length() - 1
    return [round(smallest * 2 ** (index / steps)) for index in range(octaves * steps + 1)]


def measure_curve(device: torch.device, wanted: Wanted, tell: Callable[[str], None]) -> Curve:
    """Measures; `tell` gets a line a series. Raises EnvironmentFault if kernels cannot be had or the host is too busy."""
    machine = read_machine(device)
    known = arches_for(machine.capability)
    if wanted.arch is not None and wanted.arch not in known:
        raise EnvironmentFault(f"--arch {wanted.arch}: this card runs {' or '.join(known)}.")
    with forced_arch(wanted.arch) if wanted.arch else contextlib.nullcontext():
        prepare(device)
        node = node_cost(device, wanted.repeats)
        if node.dry:
            raise EnvironmentFault(
                "the queue ran dry while empty kernels were timed: the host is too busy. Stop what else runs, and try again."
            )
        bench = Bench(device, machine, node.seconds, random_pool(device, machine, wanted.pool_bytes), wanted.repeats)
        found = []
        for kernel in wanted.kernels:
            for columns, tokens, chosen in _plan(kernel, wanted):
                found.append(bench.series(kernel, columns, tokens, chosen))
                tell(summary(found[-1]))
    return Curve(machine, 1e6 * node.seconds, node.spread, bench.pool.numel(), wanted.repeats, found)


def random_pool(device: torch.device, machine: Machine, nbytes: int | None = None) -> Tensor:
    """Random bytes uint8, `nbytes` or as many as the rules ask for and the card has free."""
    if nbytes is None:
        nbytes = max(POOL_CACHES * machine.l2_bytes, 2 * LARGEST)
    nbytes = min(nbytes, int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_FREE))
    # Below 0x7C a byte is finite in E4M3, and in fp16 as the upper one of two.
    return torch.randint(0, 0x7C, (nbytes // _ALIGNMENT * _ALIGNMENT,), dtype=torch.uint8, device=device)


def _plan(kernel: str, wanted: Wanted) -> list[tuple[int, int, Sequence[int]]]:
    """(columns, tokens, sizes) of each series of a kernel."""
    full = sizes(wanted.steps)
    if kernel == READ:
        return [(0, 0, full)]
    plan: list[tuple[int, int, Sequence[int]]] = [(COLUMNS, 1, full)]
    if wanted.variations:
        plan += [(columns, 1, ROW_LENGTH_BYTES) for columns in ROW_LENGTHS]
        plan += [(COLUMNS, tokens, TOKEN_BYTES) for tokens in TOKENS[1:]]
    return plan


class Bench:
    """A card, its pool of random words, and what a graph's node costs there in seconds."""

    def __init__(self, device: torch.device, machine: Machine, node: float, pool: Tensor, repeats: int) -> None:
        self.device, self.machine, self.node, self.pool, self.repeats = device, machine, node, pool, repeats
        self._never = torch.zeros(1, dtype=torch.int32, device=device)

    def series(self, kernel: str, columns: int, tokens: int, chosen: Sequence[int]) -> Series:
        """One kernel at several sizes."""
        points: dict[int, Point] = {}
        refused = []
        for target in chosen:
            if 2 * target > self.pool.numel():
                refused.append(Refused(target, f"pool too small: two do not fit its {self.pool.numel() / 1e6:.0f} MB"))
                continue
            nbytes, timing, walked = self._time(kernel, columns, tokens, target)
            why = refusal(nbytes, timing, walked, self.machine)
            if why is not None:
                refused.append(Refused(nbytes, why))
            elif nbytes not in points:  # two targets may round to the same rows
                points[nbytes] = as_point(nbytes, timing, self.node)
        ordered = [points[nbytes] for nbytes in sorted(points)]
        return Series(kernel, self._arch(kernel), ordered, columns, tokens, refused)

    def _time(self, kernel: str, columns: int, tokens: int, target: int) -> tuple[int, Timing, int]:
        if kernel == READ:
            return self._time_read(target)
        rows = max(BAND, round(target / bytes_a_row(kernel, columns) / BAND) * BAND)
        weights = cut(self.pool, kernel, rows, columns)
        nbytes = weights[0].nbytes
        x = torch.randn(tokens, columns, device=self.device).half()
        out = [torch.empty(tokens, rows, device=self.device)]
        calls: Launches = [partial(linears, x, [weight], out) for weight in weights]
        return nbytes, time_queued(calls, self.device, self.repeats), nbytes * len(weights)

    def _time_read(self, target: int) -> tuple[int, Timing, int]:
        """The plain read at the grid that suits it best."""
        nbytes = target // _ALIGNMENT * _ALIGNMENT
        copies = self.pool.numel() // nbytes
        parts = self.pool[: copies * nbytes].view(copies, nbytes)
        module = load("read.cu", self.device.index)
        best = Timing(float("inf"), 0.0)
        for blocks in READ_BLOCKS_A_SM:
            grid = blocks * multiprocessors(self.device.index)
            calls: Launches = [
                partial(module.launch, "read_plain", grid, READ_THREADS, (part, self._never, nbytes // 16))
                for part in parts
            ]
            timing = time_queued(calls, self.device, self.repeats)
            if timing.dry:
                return nbytes, timing, copies * nbytes
            best = min(best, timing, key=lambda one: one.seconds)
        return nbytes, best, copies * nbytes

    def _arch(self, kernel: str) -> str:
        return load("read.cu" if kernel == READ else "linear_8.cu", self.device.index).arch


def as_point(nbytes: int, timing: Timing, node: float) -> Point:
    """A point from a time a launch; without the node's cost the kernel is left at least a tenth of its time."""
    net = max(timing.seconds - node, 0.1 * timing.seconds)
    return Point(nbytes, nbytes / timing.seconds / 1e9, nbytes / net / 1e9, timing.spread)


def refusal(nbytes: int, timing: Timing, walked: int, machine: Machine) -> str | None:
    """Why a time must not be printed as a bandwidth; None if nothing but the memory explains it.

    `walked`: bytes read before any is read again.
    """
    if timing.dry:
        return "queue ran dry: the card waited for the host between launches, so that Python would be measured"
    if walked < LEAST_CACHES * machine.l2_bytes:
        return (
            f"pool too small: {walked / 1e6:.0f} MB are read before the first again, and the L2 cache keeps "
            f"{machine.l2_bytes / 1e6:.0f}; at least {LEAST_CACHES} times as much is needed"
        )
    gbps = nbytes / timing.seconds / 1e9
    if machine.peak_gbps and gbps > machine.peak_gbps:
        return f"{gbps:.0f} GB/s is more than the memory gives on paper ({machine.peak_gbps:.0f}): the L2 cache has answered"
    return None


def bytes_a_row(encoding: str, columns: int) -> float:
    """Bytes that a product reads a row of a matrix."""
    return {
        "nvfp4": columns / 2 + columns / GROUP,
        "fp8": columns + 4,
        "fp8_blocks": columns + columns / _BLOCK * 4 / _BLOCK,
        "half": 2 * columns + 4,
    }[encoding]


def cut(pool: Tensor, encoding: str, rows: int, columns: int) -> list[Weight]:
    """As many weights [rows, columns] of an encoding as the pool holds, side by side without overlap."""
    tiles = (rows // BAND, columns // GROUP)
    offset = 0

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal offset
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        part = pool[offset : offset + nbytes].view(dtype).view(shape)
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return part

    def one() -> Weight:
        if encoding == "nvfp4":
            words = take((*tiles, BAND, 8), torch.uint8)
            return Nvfp4Weight(words, take((*tiles, BAND), torch.uint8), take((1,), torch.float32))
        if encoding == "fp8":
            return Fp8Weight(take((*tiles, BAND, 16), torch.uint8), take((rows,), torch.float32))
        if encoding == "half":
            return HalfWeight(take((*tiles, 2, BAND, 8), torch.float16), take((rows,), torch.float32))
        grid = (-(-rows // _BLOCK), -(-columns // _BLOCK))
        return Fp8BlockWeight(take((*tiles, BAND, 16), torch.uint8), take(grid, torch.float32), (_BLOCK, _BLOCK))

    first = one()
    return [first] + [one() for _ in range(pool.numel() // offset - 1)]


def summary(series: Series) -> str:
    """A series in one line."""
    what = f"{series.kernel:<10} {series.arch}"
    if series.columns:
        what += f"  K {series.columns:<5} T {series.tokens}"
    if not series.points:
        return f"{what}  no number: {series.refused[0].why}"
    best = max(series.points, key=lambda point: point.gbps)
    return f"{what}  {len(series.points)} sizes, up to {best.gbps:.0f} GB/s at {best.nbytes / 1e6:.0f} MB"
