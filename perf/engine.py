"""A decode round, and the first token, of one rank on a card, as the engine runs them; beside the floor of their reads.

Nothing is waited for but the numbers of each round, as in serving. Depths are made by filling the cache with random keys and
values; drafts are forced to stand, so that every round does the same work.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..checkpoint.errors import EnvironmentFault
from ..model.config import FULL
from ..runtime.engine.cuda.executor import CudaExecutor
from ..runtime.engine.lane import Lane
from ..runtime.engine.pages import pages_for
from ..runtime.messages import GenerateRequest, SamplingParams
from ..runtime.parallel.device import check_gather, check_reduce
from .curve import READ, Point, Series
from .kernels import read_seconds, time_graph
from .ledger import Launch, Ledger
from .overlap import Overlap, Span, overlap_of
from .sheet import Sheet

WARM_ROUNDS = 6
PROFILED_ROUNDS = 6
CURVE_BYTES = tuple(int((1 << 18) * 2 ** (half / 2)) & ~15 for half in range(24))  # 256 KB to 0.7 GB
FAMILIES = (  # kernel family -> what its kernels' names hold; the first that fits
    ("attention", re.compile(r"attention|gather_(int8|fp16)|flash|fmha", re.I)),
    ("delta", re.compile(r"delta", re.I)),
    ("linear", re.compile(r"linear|wide_|swiglu|dequantise|gemm|cutlass|xmma|nvjet|splitK", re.I)),
    ("collective", re.compile(r"mailbox|reduce_push|nccl", re.I)),
    ("sampling", re.compile(r"sampling|judge|draw|adjust|cut|mass|decide|speculat", re.I)),
    ("small", re.compile(r"norm|rope|embed|round|widen|silu|scatter|logprob|gate", re.I)),
)


class Alone:
    """One of two ranks without its twin, for measuring: sums are its own part, gathers leave the other's place as it is."""

    halves = False

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.name = size, rank, "alone"

    def reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        check_reduce(part, out)
        out.copy_(part)

    def reduce_large(self, part: torch.Tensor, out: torch.Tensor) -> None:
        check_reduce(part, out, limited=False)
        out.copy_(part)

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        check_gather(part, out, self.size)
        width = part.shape[1]
        out[:, self.rank * width : (self.rank + 1) * width] = part

    def check(self) -> None:
        return None


@dataclass(frozen=True)
class Breakdown:
    """Of profiled passes. idle: part of the time in which no kernel ran, None: not profiled.

    families: milliseconds a round of their kernels; kernels: name -> (launches a round, milliseconds a round), longest first:
    of launches one after the other, so that together they take longer than a round whose launches overlap.
    """

    idle: float | None = None
    families: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundFigures:
    """Rounds at one depth. Milliseconds a round: median, 10th and 90th percentile."""

    context: int
    lanes: int
    drafts: int
    ms: float
    ms_low: float
    ms_high: float
    rounds: int
    seen: Breakdown


@dataclass(frozen=True)
class PrefillFigures:
    """A prompt of `tokens` read in chunks, to its answer's first token, in seconds.

    through: when the host was through with each chunk, in seconds from the beginning; the card may have been behind.
    """

    tokens: int
    chunk: int
    seconds: float
    overflows: int
    through: list[float]


class Bench:
    """Lanes of an executor that are put at any depth."""

    def __init__(self, executor: CudaExecutor, lanes: int, max_context: int) -> None:
        self.executor = executor
        self._most, self._context = lanes, max_context
        self._share = executor.pages // lanes

    def rounds(self, depth: int, lanes: int, drafts: int, count: int, profile: bool = True) -> RoundFigures:
        """`count` timed rounds of `lanes` lanes from `depth` on, each of which keeps `drafts` drafts and one more."""
        steps = WARM_ROUNDS + count + (2 * (PROFILED_ROUNDS + 2) if profile else 0)
        with self.opened(depth, lanes, drafts, steps) as opened:
            for _ in range(WARM_ROUNDS):
                self.round(opened)
            times = []
            for _ in range(count):
                begun = time.perf_counter()
                self.round(opened)
                times.append((time.perf_counter() - begun) * 1e3)
            seen = self._profile(opened) if profile else Breakdown()
        times.sort()
        tenth = len(times) // 10
        return RoundFigures(
            depth, lanes, drafts, statistics.median(times), times[tenth], times[-1 - tenth], count, seen
        )

    @contextmanager
    def opened(self, depth: int, lanes: int, drafts: int, steps: int) -> Iterator[list[Lane]]:
        """Lanes at `depth`, with room for `steps` rounds that keep `drafts` drafts each."""
        opened = [self._at(number, depth, drafts, steps) for number in range(lanes)]
        try:
            yield opened
        finally:
            for lane in opened:
                self.executor.close(lane)
            self._settle()

    def prefill(self, tokens: int, chunk: int, seed: int = 0) -> PrefillFigures:
        """Read a random prompt and draw a token."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.executor.model.vocabulary
        prompt = torch.randint(0, vocabulary, (tokens,), generator=generator).tolist()
        lane = self._lane(0, prompt, 8)
        self.executor.open(lane)
        self._settle()
        begun, through = time.perf_counter(), []
        while lane.read < tokens:
            count = min(chunk, tokens - lane.read)
            self.executor.prefill(lane, lane.read, count)
            lane.read += count
            through.append(time.perf_counter() - begun)
        outcome = self.executor.first(lane)
        seconds = time.perf_counter() - begun
        self.executor.close(lane)
        if outcome.fault is not None:
            raise EnvironmentFault(f"the first token after {tokens} tokens: {outcome.fault}")
        return PrefillFigures(tokens, chunk, seconds, self.executor.overflows, through)

    def chunk_overlap(self, start: int, chunk: int, seed: int = 0) -> Overlap | None:
        """Where the exchanges of a prompt's chunk from `start` on stand: beside computation, or by themselves."""
        from torch.profiler import ProfilerActivity, profile

        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, self.executor.model.vocabulary, (start + 2 * chunk,), generator=generator).tolist()
        lane = self._lane(0, prompt, 8)
        self.executor.open(lane)
        self.executor.fill(lane, start, token=1)
        self.executor.prefill(lane, start, chunk)
        self._settle()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            self.executor.prefill(lane, start + chunk, chunk)
            self._settle()
        self.executor.close(lane)
        spans = sorted(_spans(recorded.events()))
        return overlap_of(spans, {name for _, _, name in spans if family_of(name) == "collective"})

    def _settle(self) -> None:
        """Wait for the card."""
        if self.executor.state.device.type == "cuda":
            torch.cuda.synchronize()

    def _at(self, number: int, depth: int, drafts: int, steps: int) -> Lane:
        lane = self._lane(number, [1] * depth, 1 + steps * (1 + drafts))
        self.executor.open(lane)
        self.executor.fill(lane, depth, token=1, seed=number)
        self.executor.force(lane, drafts)
        lane.read = depth
        lane.tokens.append(1)
        return lane

    def _lane(self, number: int, prompt: list[int], limit: int) -> Lane:
        request = GenerateRequest(number, prompt, limit, [], True, SamplingParams(temperature=0.0))
        pages = range(number * self._share, number * self._share + min(self._share, pages_for(len(prompt) + limit + 8)))
        return Lane(number, request, limit, list(pages))

    def round(self, lanes: list[Lane]) -> None:
        """One round; the lanes take what it made."""
        for lane, outcome in zip(lanes, self.executor.round(lanes), strict=True):
            if outcome.fault is not None:
                raise EnvironmentFault(f"a round at {lane.length} tokens: {outcome.fault}")
            lane.rounds += 1
            lane.add(outcome.tokens)

    def _profile(self, lanes: list[Lane]) -> Breakdown:
        """Kernels of some rounds, by the profiler: it makes short kernels look longer, so it has passes of its own.

        An overlapping kernel lasts from its placing on, waits included: kernels are those of rounds without, idle is not.
        """
        idle = self._profiled(lanes).idle
        with self.executor.in_turn():
            return replace(self._profiled(lanes), idle=idle)

    def _profiled(self, lanes: list[Lane]) -> Breakdown:
        from torch.profiler import ProfilerActivity, profile

        self.round(lanes)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(PROFILED_ROUNDS):
                self.round(lanes)
        spans = sorted(_spans(recorded.events()))
        return breakdown(spans, PROFILED_ROUNDS)


def _spans(events: object) -> Iterator[Span]:
    for event in events:  # type: ignore[attr-defined]
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Memset"):
            yield event.time_range.start, event.time_range.end, event.name


def breakdown(spans: list[Span], rounds: int) -> Breakdown:
    """From kernels' times, sorted by their begin."""
    if not spans:
        return Breakdown()
    busy, reached = 0.0, spans[0][0]
    families: dict[str, float] = {}
    kernels: dict[str, tuple[float, float]] = {}
    for begin, end, name in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
        family = family_of(name)
        families[family] = families.get(family, 0.0) + (end - begin) / 1e3 / rounds
        launches, ms = kernels.get(name, (0.0, 0.0))
        kernels[name] = launches + 1 / rounds, ms + (end - begin) / 1e3 / rounds
    whole = reached - spans[0][0]
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    return Breakdown(1 - busy / whole if whole > 0 else 0.0, families, dict(longest))


def family_of(kernel: str) -> str:
    """Family of a kernel by its name; `rest` for what is torch's own."""
    return next((family for family, pattern in FAMILIES if pattern.search(kernel)), "rest")


def read_curve_here(device: torch.device, sizes: Sequence[int] = CURVE_BYTES) -> Series:
    """Plain reads of some sizes on this card, now: what the floor is measured with."""
    points = []
    for nbytes in sizes:
        seconds = read_seconds(nbytes, device)
        gbps = nbytes / seconds / 1e9
        points.append(Point(nbytes, gbps, gbps, 0.0))
    major, minor = torch.cuda.get_device_capability(device)
    return Series(READ, f"sm_{major}{minor}", points)


def product_rate(device: torch.device, rows: int = 4096, columns: int = 8192) -> float:
    """Operations a second of the vendor's fp16 product [rows, columns] x [columns, columns] on this card, now."""
    x = torch.randn(rows, columns, device=device).half()
    weight = torch.randn(columns, columns, device=device).half()
    out = torch.empty(rows, columns, dtype=torch.float16, device=device)
    seconds = time_graph([partial(torch.mm, x, weight.t(), out=out)] * 4)
    return 2 * rows * columns * columns / seconds


def prompt_operations(sheet: Sheet, tokens: int) -> float:
    """Multiplications and additions of a prompt on one rank: every product of its layers, and causal attention.

    The delta rule, about 2 % of the products, is left out, as are heads: one row of a prompt needs logits.
    """
    total, layers = 0.0, [*sheet.layers, *([] if sheet.mtp is None else [sheet.mtp.layer])]
    for layer in layers:
        matrices = (*layer.inputs, layer.output, layer.gate, layer.up, layer.down)
        total += 2.0 * tokens * sum(matrix.rows * matrix.columns for matrix in matrices)
        if layer.kind == FULL:
            total += 2.0 * tokens * tokens * sheet.heads.query * sheet.heads.dim
    return total


def floor_of(ledger: Ledger, curve: Series, exchange: Callable[[Launch], float] = lambda launch: 0.0) -> float:
    """Milliseconds of a round if every large read were a plain read of its bytes, and nothing else took time.

    Reads of linears, heads, attention and the delta rule, each over the curve at its size; `exchange`: seconds of a
    collective.
    """
    total = 0.0
    for launch in ledger.launches:
        if launch.family == "collective":
            total += exchange(launch)
        elif launch.family in ("linear", "head", "attention", "delta") and launch.read > 0:
            total += curve.seconds(launch.read)
    return total * 1e3
