"""A slice of the 27B as a rank of two runs it, random words: four layers in one graph, and its larger launches alone.

Three gated delta layers and one of full attention, a quarter of sixteen times as many in the model; a round of one token
and three drafts, with an int8 cache of `CONTEXT` positions. Everything is read once a replay, many times the L2 cache.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from ..kernels.attention import Sequences, decode_attention
from ..kernels.delta import DeltaState, DeltaWeights, Progress, Round, delta_decode
from ..kernels.kvcache import DIM, PAGE, KVCache
from ..kernels.linear import linears, prepare, swiglu
from ..kernels.norm import gated_rms_norm, rms_norm
from ..kernels.reference import mrope_axes, rope_table
from ..kernels.reference.rope import inverse_frequencies
from ..kernels.rope import PAIRS, qkv_rope
from ..kernels.weights import Weight
from .device_timing import time_queued
from .kernels import CASES, Case, copies_of, random_weight, read_seconds
from .kernels import launches as linear_launches

TOKENS = 4  # of a round: one and three drafts
CONTEXT = 8192
HIDDEN = 5120
Q_HEADS, KV_HEADS = 12, 2
KEY_HEADS, VALUE_HEADS = 8, 24
LAYERS = 4
POOL_BYTES = 1 << 30
_CASES = ("attention in", "delta in", "mixer out", "gate up", "down", "head")
_EPS = 1e-6
Launches = list[Callable[[], object]]


class SliceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launch, or the whole slice: bytes that it reads and writes, seconds, spread of repeats.

    `floor`: seconds of a plain read of as many bytes, 0 where it was not measured. `dry`: the host was too busy to tell.
    """

    what: str
    tokens: int
    nbytes: int
    seconds: float
    spread: float
    floor: float = 0.0
    dry: bool = False

    def __post_init__(self) -> None:
        if not self.dry and self.seconds <= 0:
            raise ValueError("a row needs seconds above 0")


def measure_slice(device: torch.device, tell: Callable[[str], None]) -> list[SliceRow]:
    """All rows; `tell` gets a line each."""
    prepare(device)
    rows = []
    for case in CASES:
        if case.name in _CASES:
            rows.append(_linear(case, device))
            tell(line(rows[-1]))
    rows.append(_attention(device))
    tell(line(rows[-1]))
    rows.append(_layers(device))
    tell(line(rows[-1]))
    return rows


def line(row: SliceRow) -> str:
    """A row as printed."""
    if row.dry:
        return f"{row.what:<24} T {row.tokens}  no number: the queue ran dry, the host is too busy"
    share = f"  {100 * row.floor / row.seconds:.0f}% of a plain read" if row.floor else ""
    return (
        f"{row.what:<24} T {row.tokens}  {row.nbytes / 1e6:7.1f} MB  {row.seconds * 1e6:8.1f} us  "
        f"{row.nbytes / row.seconds / 1e9:6.0f} GB/s{share}"
    )


def _row(what: str, nbytes: int, calls: Launches, device: torch.device, floor: float = 0.0) -> SliceRow:
    for call in calls[:1]:
        call()
    timing = time_queued(calls, device)
    if timing.dry:
        return SliceRow(what, TOKENS, nbytes, 0.0, 0.0, floor, dry=True)
    return SliceRow(what, TOKENS, nbytes, timing.seconds, timing.spread, floor)


def _linear(case: Case, device: torch.device) -> SliceRow:
    first = [random_weight(*matrix, device) for matrix in case.matrices]
    nbytes = sum(weight.nbytes for weight in first)
    more = copies_of(nbytes, POOL_BYTES) - 1
    sets = [first, *([random_weight(*matrix, device) for matrix in case.matrices] for _ in range(more))]
    floor = read_seconds(nbytes, device, POOL_BYTES)
    return _row(case.name, nbytes, linear_launches(case, sets, TOKENS, device), device, floor)


def _attention(device: torch.device) -> SliceRow:
    """Decode attention alone, over as many caches as make a pool."""
    caches = [_cache(device)]
    nbytes = _cache_bytes(caches[0])
    caches += [_cache(device) for _ in range(copies_of(nbytes, POOL_BYTES) - 1)]
    query, sequences = torch.randn(TOKENS, Q_HEADS, DIM, device=device).half(), _sequences(device)
    calls: Launches = [partial(_attend, query, cache, sequences) for cache in caches]
    return _row("attention, int8, 8K", nbytes, calls, device)


def _attend(query: Tensor, cache: KVCache, sequences: Sequences) -> Tensor:
    return decode_attention(query, cache, sequences, max_tokens=TOKENS, max_positions=CONTEXT)


def _cache(device: torch.device) -> KVCache:
    """Random words, scales of one."""
    empty = KVCache.empty(CONTEXT // PAGE, KV_HEADS, int8=True, device=device)
    assert empty.key_scales is not None and empty.value_scales is not None
    keys, values = (
        torch.randint(0, 255, part.shape, dtype=torch.uint8, device=device) for part in (empty.keys, empty.values)
    )
    return KVCache(keys, values, torch.ones_like(empty.key_scales) / 128, torch.ones_like(empty.value_scales) / 128)


def _cache_bytes(cache: KVCache) -> int:
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return sum(part.nbytes for part in parts if part is not None)


def _sequences(device: torch.device) -> Sequences:
    tables = torch.arange(CONTEXT // PAGE, dtype=torch.int32, device=device)[None]
    return Sequences.of(tables, [CONTEXT - TOKENS], [TOKENS])


def _layers(device: torch.device) -> SliceRow:
    """Four layers in a row, residual stream and all."""
    layers: list[DeltaLayer | AttentionLayer] = [
        *(DeltaLayer(device) for _ in range(LAYERS - 1)),
        AttentionLayer(device),
    ]
    stream = torch.randn(TOKENS, HIDDEN, device=device)

    def forward() -> None:
        for layer in layers:
            layer.mix(stream)
            layer.mlp(stream)

    return _row("four layers", sum(layer.nbytes for layer in layers), [forward], device)


class Layer:
    """What both kinds share: norms, the MLP, the projections of a case."""

    def __init__(self, device: torch.device, into: str) -> None:
        matrices = {case.name: case.matrices for case in CASES}
        self.entering = [random_weight(*matrix, device) for matrix in matrices[into]]
        self.leaving = random_weight(*matrices["mixer out"][0], device)
        self.gate, self.up = (random_weight(*matrix, device) for matrix in matrices["gate up"])
        self.down = random_weight(*matrices["down"][0], device)
        self.norm = torch.zeros(HIDDEN, device=device)
        self.entered = [torch.zeros(TOKENS, weight.shape[0], device=device) for weight in self.entering]

    @property
    def weights(self) -> list[Weight]:
        return [*self.entering, self.leaving, self.gate, self.up, self.down]

    @property
    def nbytes(self) -> int:
        """Bytes that a round reads and writes."""
        return sum(weight.nbytes for weight in self.weights)

    def enter(self, stream: Tensor) -> list[Tensor]:
        """The normed stream through the entering projections."""
        return linears(rms_norm(stream, self.norm, _EPS), self.entering, self.entered)

    def leave(self, mixed: Tensor, stream: Tensor) -> None:
        """Through the leaving projection into the stream."""
        linears(mixed, [self.leaving], [stream], residuals=[stream])

    def mlp(self, stream: Tensor) -> None:
        opened = swiglu(rms_norm(stream, self.norm, _EPS), self.gate, self.up)
        linears(opened, [self.down], [stream], residuals=[stream])


class DeltaLayer(Layer):
    """Gated delta rule."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "delta in")
        channels = (2 * KEY_HEADS + VALUE_HEADS) * 128
        self.rule = DeltaWeights(
            torch.randn(channels, 4, device=device) / 2,
            torch.zeros(VALUE_HEADS, device=device),
            torch.zeros(VALUE_HEADS, device=device),
        )
        self.memory, self.progress = DeltaState.empty(1, self.rule), Progress.empty(1, device)
        self.progress.accepted.fill_(1)
        self.batch = Round.of([0], [TOKENS], device)
        self.head_norm = torch.ones(128, device=device)
        width = sum(weight.shape[0] for weight in self.entering)
        self.joined = torch.zeros(TOKENS, width, device=device)  # the parts must stand equally far apart
        self.entered = list(self.joined.split([weight.shape[0] for weight in self.entering], dim=1))

    @property
    def nbytes(self) -> int:
        return super().nbytes + 2 * self.memory.state.nbytes

    def mix(self, stream: Tensor) -> None:
        mixed, z, b, a = self.enter(stream)
        out = delta_decode(mixed, a, b, self.rule, self.memory, self.progress, self.batch)
        self.leave(gated_rms_norm(out, z, self.head_norm, _EPS), stream)


class AttentionLayer(Layer):
    """Gated full attention over the int8 cache."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "attention in")
        self.cache, self.sequences = _cache(device), _sequences(device)
        frequencies = inverse_frequencies(DIM, 2 * PAIRS / DIM, 1e7)
        cosines, sines = rope_table(CONTEXT, frequencies)
        self.tables = cosines.to(device), sines.to(device)
        self.axes = mrope_axes(PAIRS, [11, 11, 10]).int().to(device)
        last = torch.arange(CONTEXT - TOKENS, CONTEXT, dtype=torch.int32, device=device)
        self.slots, self.positions = last, last.repeat(3, 1)
        self.head_norm = torch.zeros(DIM, device=device)
        width = sum(weight.shape[0] for weight in self.entering)
        self.joined = torch.zeros(TOKENS, width, device=device)
        self.entered = list(self.joined.split([weight.shape[0] for weight in self.entering], dim=1))

    @property
    def nbytes(self) -> int:
        return super().nbytes + _cache_bytes(self.cache)

    def mix(self, stream: Tensor) -> None:
        self.enter(stream)
        norms = (self.head_norm, self.head_norm)
        query = qkv_rope(self.joined, *norms, self.tables, self.axes, self.positions, self.slots, self.cache, _EPS)
        gate = self.joined[:, : 2 * Q_HEADS * DIM].view(TOKENS, Q_HEADS, 2 * DIM)[..., DIM:]
        attended = decode_attention(
            query, self.cache, self.sequences, max_tokens=TOKENS, max_positions=CONTEXT, gate=gate
        )
        self.leave(attended, stream)
