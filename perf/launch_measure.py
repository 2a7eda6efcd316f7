"""Times of a round's own launches, each alone, what each saves by beginning early, and a few layers in a row.

All of it cold, in captured graphs that begin with what the round has left. Times alone are of launches in turn: what overlap
saves is told by edges. Launches in turn that are faster in a row than by themselves have not done their work: they are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..kernels.ops import ops_for
from ..model.inventory import inventory
from ..runtime.engine.cuda.executor import CudaExecutor
from ..runtime.engine.pages import pages_for
from ..runtime.parallel.device import DeviceCollective, SoloDevice
from .device_timing import REPEATS, Timing, Together, time_queued
from .engine import Alone, Bench
from .kernels import copies_of
from .launch_edges import Edges, Placed, windows
from .launch_file import BEHIND, Chain, Edge, LaunchTime, unless_impossible
from .launch_record import Call, Recorder, staging_call
from .launch_state import RoundState
from .model_source import Described
from .random_weights import random_weights

ABOUT = 0.05  # of bytes: the same size
# Called last, and in this order: what each leaves behind is what the next one finds in a round.
ORDER = ("round_rows", "decide", "round_advance")
LONE = ("elementwise",)  # recorded behind a round, called within it
_ROUNDS = 3  # before the one that is listened to: buffers are made, lanes have drafts that stood
_SPARE = 64
_REPEATS = 9  # of an edge's graphs, of which there are many
_PASSES = (
    4  # of a longer graph of the same calls: what it takes more is theirs, without what the beginning of a graph costs
)


@dataclass(frozen=True)
class Amounts:
    """Of a graph. `pool`: bytes that it reads at least, `most`: of copies of one call; `warm`: calls of what lies in the
    second-level cache in a round too; `exchanges`: calls of one; `telling`: times are a card's, impossible ones are refused."""

    pool: int = 3 << 29
    most: int = 24 << 30
    warm: int = 96
    exchanges: int = 64
    telling: bool = True


TO_TRY = Amounts(1, 1, 2, 2, telling=False)  # without a card


@dataclass(frozen=True)
class Wanted:
    """Rounds whose launches are measured."""

    contexts: Sequence[int]
    drafts: int = 3
    lanes: int = 1
    kv: str = "int8"
    overlap: bool = True  # also what launches save that begin as early as in the engine's graphs


@dataclass
class Found:
    """Times, edges and chains; `refused`: what has no number, and why."""

    launches: list[LaunchTime] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def of(self, call: Call) -> LaunchTime | None:
        """What was measured of its key, at about its size: passes of a round stand a few tokens apart."""
        for one in self.launches:
            if one.key == call.key and abs(one.nbytes - call.nbytes) <= ABOUT * call.nbytes:
                return one
        return None

    def alone(self, call: Call) -> float | None:
        """Its seconds by itself, if they are known."""
        one = self.of(call)
        return one.seconds or None if one is not None else None


@dataclass(frozen=True)
class Costs:
    """Of a graph: seconds that it takes beside its nodes."""

    start: float


@dataclass(frozen=True)
class Steady:
    """Calls one after the other: their seconds within a long graph, and what its beginning costs beside. `dry`: as `Timing`."""

    seconds: float
    begin: float
    spread: float
    dry: bool


def shortened(model: Described) -> Described:
    """The same model with as few of its first layers as have every kind of layer in it."""
    kinds, seen = [], set[tuple[str, ...]]()
    for number, kind in enumerate(model.config.text.layer_types):
        own = f".layers.{number}."
        parts = sorted(
            f"{name.partition(own)[2]}={word}"
            for name, word in model.encodings.items()
            if own in name and not name.startswith("mtp")
        )
        kinds.append((kind, *parts))
    last = 0
    for number, one in enumerate(kinds):
        if one not in seen:
            seen.add(one)
            last = number
    types = model.config.text.layer_types[: last + 1]
    text = replace(model.config.text, num_hidden_layers=len(types), layer_types=types)
    config = replace(model.config, text=text, vision=None)
    names = inventory(config)
    return replace(model, config=config, encodings={k: v for k, v in model.encodings.items() if k in names})


class Subject:
    """A short form of a model on a card, whose rounds are listened to."""

    def __init__(
        self, model: Described, rank: int, link: DeviceCollective, wanted: Wanted, device: torch.device
    ) -> None:
        self.model, self.wanted, self.device = model, wanted, device
        self.amounts = Amounts() if device.type == "cuda" else TO_TRY
        short = shortened(model)
        weights = random_weights(short.config, _plain(short.encodings), model.tp, rank, device)
        most = short.config.text.max_position_embeddings
        steps = (_ROUNDS + 2) * (1 + wanted.drafts) + _SPARE
        self._context = min(most, max(wanted.contexts) + steps)
        self._recorder = Recorder()
        self.executor = CudaExecutor(
            weights,
            self._recorder.link(link),
            max_context=self._context,
            lanes=wanted.lanes,
            drafts=wanted.drafts,
            n_sampleable=short.config.text.vocab_size,
            pages=wanted.lanes * pages_for(self._context),
            int8=wanted.kv == "int8",
            graphs=False,
            ahead=False,
            ops=self._recorder.ops(ops_for(device)),
        )
        self.bench = Bench(self.executor, wanted.lanes, self._context)
        self._state: RoundState | None = None

    def rounds(self) -> Iterator[list[Call]]:
        """The calls of a round at each depth; they hold while the loop is at that depth."""
        wanted, hidden = self.wanted, self.model.config.text.hidden_size
        for context in wanted.contexts:
            depth = min(context, self._context - (_ROUNDS + 2) * (1 + wanted.drafts) - 8)
            with self.bench.opened(depth, wanted.lanes, wanted.drafts, _ROUNDS + 2) as lanes:
                for _ in range(_ROUNDS):
                    self.bench.round(lanes)
                with self._recorder.listening() as calls:
                    self.bench.round(lanes)
                own = list(calls)
                if wanted.drafts:
                    own.append(staging_call(hidden, wanted.lanes, self.device))
                self._state = RoundState(own)
                yield own
                self._state.restore()  # lanes are closed as the round has left them

    def timed(
        self,
        launches: Sequence[Callable[[], object]],
        repeats: int = REPEATS,
        together: Together | None = None,
        overlap: bool = False,
    ) -> Timing:
        """`time_queued` of calls of a round, each called once before; they begin with what the round has left."""
        if self._state is not None:
            self._state.restore()
        return time_queued(launches, self.device, repeats, together=together, overlap=overlap)

    def steady(
        self, launches: Sequence[Callable[[], object]], together: Together | None = None, overlap: bool = False
    ) -> Steady:
        """As `timed`, of the launches as they are where many others stand before and behind them."""
        once, often = (self.timed([*launches] * passes, together=together, overlap=overlap) for passes in (1, _PASSES))
        whole = once.seconds * len(launches)
        seconds = max((often.seconds * _PASSES * len(launches) - whole) / (_PASSES - 1), 0.2 * whole)
        return Steady(seconds, whole - seconds, often.spread, once.dry or often.dry)


def _plain(encodings: dict[str, str]) -> dict[str, str]:
    return {name: "nvfp4" if word.startswith("nvfp4") else word for name, word in encodings.items()}


def measure_subject(
    subject: Subject, found: Found, costs: Costs, together: Together | None, tell: Callable[[LaunchTime], None]
) -> None:
    """Every call of the subject's rounds that `found` does not have, their edges, and a chain at the first depth."""
    exchanging = together is not None
    amounts = subject.amounts
    edges = Edges(
        partial(_queued, subject, costs), amounts.pool, amounts.most, amounts.warm, together, found.edges,
        alone=found.alone if amounts.telling else lambda call: None, refused=found.refused,
    )  # fmt: skip
    for number, calls in enumerate(subject.rounds()):
        mine = [call for call in calls if exchanging or not call.is_exchange]
        for call in sorted(mine, key=lambda one: ORDER.index(one.op) if one.op in ORDER else -1):
            if found.of(call) is None:
                one = _alone(call, subject, together, found.refused)
                found.launches.append(one)
                tell(one)
                _release(subject.device)
        if subject.wanted.overlap:  # what is called between rounds has no place among them
            edges.saved(windows([call for call in mine if call.op not in LONE]))
        if number == 0 and (chain := _chain(subject, mine, found, edges)) is not None:
            if chain.fault and amounts.telling:
                found.refused.append(f"{chain.model}, {chain.tp} ranks, {chain.lanes} lanes: {chain.fault}")
            else:
                found.chains.append(chain)


def _queued(subject: Subject, costs: Costs, placed: Sequence[Placed], together: Together | None) -> float:
    """Seconds of a graph of calls that begin early or not."""
    for one in placed[:3]:
        one()
    timing = subject.timed(placed, _REPEATS, together, overlap=True)
    return math.nan if timing.dry else timing.seconds * len(placed) - costs.start


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _alone(call: Call, subject: Subject, together: Together | None, refused: list[str]) -> LaunchTime:
    amounts = subject.amounts
    calls: list[Callable[[], object]]
    if call.is_exchange:
        calls = [call] * amounts.exchanges
    elif call.cold_reads:
        count = min(copies_of(math.ceil(call.cold_reads), amounts.pool), max(2, amounts.most // call.cold_bytes))
        calls = [call, *(call.copied({}) for _ in range(count - 1))]
    else:
        calls = [call] * amounts.warm
    for one in calls[:2]:
        one()
    timing = subject.steady(calls, together if call.is_exchange else None)
    parts = 2 if call.op == "elementwise" else 1
    if timing.dry:
        return LaunchTime(call.key, call.nbytes, 0.0, why="the queue ran dry: the host is too busy")
    seconds = timing.seconds / len(calls) / parts
    return unless_impossible(
        lambda: LaunchTime(call.key, call.nbytes, seconds, timing.spread),
        f"{call.key}: {seconds * 1e6:.1f} us",
        refused,
    ) or LaunchTime(call.key, call.nbytes, 0.0, why="an impossible time: the clock was disturbed")


def layers_of(calls: Sequence[Call]) -> list[Call]:
    """The calls of the verification pass between the embedding and the head."""
    embeds = [number for number, call in enumerate(calls) if call.op == "embed" and call.key.startswith("embed ")]
    deciding = [number for number, call in enumerate(calls) if call.op == "decide"]
    if not embeds or not deciding:
        return []
    inside = list(calls[embeds[-1] + 1 : deciding[-1]])
    products = [number for number, call in enumerate(inside) if call.op == "linear"]
    return inside[: products[-1]] if products else []


def _chain(subject: Subject, calls: Sequence[Call], found: Found, edges: Edges) -> Chain | None:
    """Both of two ranks time it, whatever else either has measured: each exchange takes both."""
    inside = layers_of(calls)
    if not inside:
        return None
    # The last layers of one copy stand before the first of the next: so many edges as calls.
    circle, overlap = [*inside[-BEHIND:], *inside], subject.wanted.overlap
    saved = edges.saved(one for one in windows(circle) if len(one) > BEHIND) if overlap else 0.0
    cold = sum({id(part): part.nbytes for call in inside for part in call.cold_tensors()}.values())
    count = max(2, min(copies_of(cold, subject.amounts.pool), subject.amounts.most // cold))
    rows: list[list[Call]] = [inside]
    for _ in range(count - 1):
        made: dict[int, object] = {}
        rows.append([call.copied(made) for call in inside])
    launches = list(itertools.chain(*rows))
    ways = (False, True) if overlap else (False,)
    timings = [subject.steady(launches, edges.together, way) for way in ways]
    del rows, launches
    _release(subject.device)
    alone = [known for call in inside if (known := found.alone(call)) is not None]
    if any(timing.dry for timing in timings) or len(alone) < len(inside):
        return None
    seconds = [timing.seconds / count for timing in timings]
    asking = sum(found.alone(call) or 0.0 for call in inside if call.asks)
    model, wanted = subject.model, subject.wanted
    return unless_impossible(
        lambda: Chain(
            model.label, model.tp, len(inside), seconds[0], sum(alone), wanted.lanes, wanted.drafts,
            overlapped=seconds[1] if overlap else 0.0, saved=saved, begin=timings[0].begin, asking=asking,
        ),
        f"{model.label}, {model.tp} ranks, {wanted.lanes} lanes: {len(inside)} calls in a row {seconds[0] * 1e6:.1f} us, "
        f"one by one {sum(alone) * 1e6:.1f}, saved {saved * 1e6:.1f}",
        found.refused,
    )  # fmt: skip


def lone(model: Described, rank: int = 0) -> DeviceCollective:
    """A link for one rank without its twin."""
    return SoloDevice() if model.tp == 1 else Alone(model.tp, rank)
