"""The trial of a collective: exact sums of integers and of any floats, all sizes, eager and in replays of a graph.

Each rank knows what the other brings, so each judges what it received: both directions are tried. Nothing is read back
in between, as in a decode round: mistakes are counted on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...checkpoint.errors import DuovoltError
from ...kernels import mailbox as ops
from ...kernels import norm
from .device import MAX_REDUCE_BYTES, DeviceCollective, NormingCollective
from .timing import Meet

SIZES = (2, 4, 6, 30, 62, 64, 66, 128, 254, 512, 1022, 1024, 1026, 2560, 5118, 5120)
TOKENS = (2, 3, 4, 6, 7, 8, 12, 16, 24)
HIDDEN = 5120
# 2 MB, since some builds of NCCL fail from 512 KB on only; and 4.3 MB, which the copy engine may take (links.py).
LARGE = ((210, 5120), (420, 5120))
GATHERS = ((1, 1), (1, 2), (4, 3), (24, 2), (1, 513), (4, 4096), (1, 124160), (4, 124160))
_MODULUS = 2003  # sums of two stay below 2^12: exact in fp16 and in any order
CAPTURE_SECONDS = 60.0
CLOCK_SECONDS = 0.02
_LONGEST = 4.0  # times it: where another program has the card too, they take turns
EPS = 1e-6


def shapes() -> list[tuple[int, int]]:
    """[T, H] of every reduction tried, the largest allowed among them."""
    largest = MAX_REDUCE_BYTES // 2
    return [(1, size) for size in SIZES] + [(count, HIDDEN) for count in TOKENS] + [(2, largest // 2)]


def integers(shape: tuple[int, int], turn: Tensor, rank: int) -> Tensor:
    """What `rank` brings in turn `turn` (int64 [1] on the device): integers of at most 1001 in size, float32."""
    count = shape[0] * shape[1]
    index = torch.arange(count, device=turn.device)
    return ((index * (2 * rank + 3) + turn * 7919 + rank) % _MODULUS - _MODULUS // 2).float().view(shape)


def floats(shape: tuple[int, int], seed: int, rank: int) -> Tensor:
    """fp16 of all magnitudes and signs, subnormals and zeros too, nothing infinite."""
    generator = torch.Generator().manual_seed(2 * seed + rank)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.float16)
    return torch.where(values.isfinite(), values, torch.ones_like(values))


class Trial:
    """One collective under trial. `wrong` counts mistakes on the device; `faults()` reads it."""

    def __init__(self, collective: DeviceCollective, device: torch.device) -> None:
        self.collective = collective
        self.device = device
        self.wrong = torch.zeros(1, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    def reduce_once(self, shape: tuple[int, int]) -> None:
        """One exact sum of integers that differ from turn to turn."""
        self.turn += 1
        mine = integers(shape, self.turn, self.collective.rank)
        theirs = integers(shape, self.turn, 1 - self.collective.rank)
        out = torch.full(shape, float("nan"), device=self.device)
        self.collective.reduce(mine.half(), out)
        self.wrong += (out != mine + theirs).any()

    def large_once(self, shape: tuple[int, int]) -> None:
        """One exact sum of integers, as prefill makes it."""
        self.turn += 1
        mine, theirs = (integers(shape, self.turn, rank) for rank in (self.collective.rank, 1 - self.collective.rank))
        out = torch.full(shape, float("nan"), device=self.device)
        self.collective.reduce_large(mine.half(), out)
        self.wrong += (out != mine + theirs).any()

    def gather_once(self, shape: tuple[int, int]) -> None:
        """One gather of integers."""
        self.turn += 1
        parts = [integers(shape, self.turn, rank) for rank in (0, 1)]
        out = torch.full((shape[0], 2 * shape[1]), float("nan"), device=self.device)
        self.collective.gather(parts[self.collective.rank], out)
        self.wrong += (out != torch.cat(parts, dim=1)).any()

    def floats_once(self, shape: tuple[int, int], seed: int) -> None:
        """One sum of floats, compared bit for bit with rank 0's + rank 1's."""
        parts = [floats(shape, seed, rank).to(self.device) for rank in (0, 1)]
        out = torch.full(shape, float("nan"), device=self.device)
        self.collective.reduce(parts[self.collective.rank], out)
        expected = parts[0].float() + parts[1].float()
        self.wrong += (out.view(torch.int32) != expected.view(torch.int32)).any()

    def norm_once(self, collective: NormingCollective, seed: int) -> None:
        """A sum that goes on to residual and norm in one kernel, against the two that it stands for, bit for bit."""
        shape, columns = (4, HIDDEN), HIDDEN
        part = floats(shape, seed, collective.rank).to(self.device).clamp(-1e4, 1e4)
        weight = torch.linspace(-0.5, 0.5, columns, device=self.device)
        streams = [torch.linspace(-3, 3, 4 * columns, device=self.device).view(shape) for _ in range(2)]
        out, delta = torch.zeros(shape, dtype=torch.float16, device=self.device), torch.empty(shape, device=self.device)
        collective.reduce_norm(part, streams[0], weight, EPS, out, None)
        collective.reduce(part, delta)
        expected = norm.rms_norm(streams[1], weight, EPS, delta=delta)
        self.wrong += (out.view(torch.int16) != expected.view(torch.int16)).any()
        self.wrong += (streams[0].view(torch.int32) != streams[1].view(torch.int32)).any()

    def every_size(self) -> None:
        """Each size once; may be captured."""
        for shape in shapes():
            self.reduce_once(shape)
        for shape in GATHERS:
            self.gather_once(shape)

    def settle(self) -> int:
        """Wait for the device; the mistakes so far. Raises CollectiveFault if a wait expired."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.collective.check()
        return int(self.wrong.item())


def clock_fault(seconds_taken: Callable[[float], float]) -> str | None:
    """None if the card's clock, by which waits are bounded, ends them neither early nor much too late; else what it does.

    Late is what a card is that takes turns at another program's kernels: waits stay bounded, by a few times their budget.
    `seconds_taken(seconds)` has the card wait by its clock and says how long that took by ours.
    """
    seconds_taken(1e-6)  # loads the kernel
    taken = min(seconds_taken(CLOCK_SECONDS) for _ in range(3))
    if 0.9 * CLOCK_SECONDS <= taken <= _LONGEST * CLOCK_SECONDS:
        return None
    return f"the card takes {1e3 * taken:.1f} ms for {1e3 * CLOCK_SECONDS:g} ms: its clock cannot bound a wait"


def _lingering(device: torch.device, seconds: float) -> float:
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    begin = time.perf_counter()
    ops.linger(seconds, device)
    stream.synchronize()
    return time.perf_counter() - begin


def replayer(action: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """A graph of `action` to be replayed; on a CPU, `action` itself."""
    if device.type != "cuda":
        return action
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        action()  # allocations and kernels come before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        action()
    return graph.replay


def try_collective(
    collective: DeviceCollective, device: torch.device, rounds: int = 1000, meet: Meet = lambda: None
) -> str | None:
    """None if every sum and gather was right, else what was not. Never raises for a fault of the link.

    `rounds` sums at least are made eagerly, and as many in replays. `meet`: for ranks that share a process, where a
    capture waits for all that runs on the device.
    """
    trial = Trial(collective, device)
    each = len(shapes())
    try:
        if device.type == "cuda" and (late := clock_fault(partial(_lingering, device))):
            return late
        for number in range(-(-rounds // each)):
            for shape in shapes():
                trial.reduce_once(shape)
            if number == 0 and (found := trial.settle()):
                return f"{found} of {each} sums of integers were wrong"
        for shape in GATHERS:
            trial.gather_once(shape)
        for _ in range(3):
            for shape in LARGE:
                trial.large_once(shape)
        if found := trial.settle():
            return f"{found} exchanges of integers were wrong"
        for seed, shape in enumerate(shapes()):
            trial.floats_once(shape, seed)
        if isinstance(collective, NormingCollective):
            for seed in range(3):
                trial.norm_once(collective, seed)
        if found := trial.settle():
            return f"{found} exchanges of floats were wrong"
        begin = time.monotonic()
        replay = replayer(trial.every_size, device)
        meet()
        if time.monotonic() - begin > CAPTURE_SECONDS:
            return f"the capture of a graph took more than {CAPTURE_SECONDS:g} s"
        for _ in range(-(-rounds // each)):
            replay()
        if found := trial.settle():
            return f"{found} exchanges in replays of a graph were wrong"
    except (DuovoltError, RuntimeError) as error:  # RuntimeError: the driver, through torch
        return str(error).strip().partition("\n")[0]
    return None
