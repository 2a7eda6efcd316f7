"""The layers on fused operations, for a round's rows and for a prompt's chunk. Residual stream in float32.

A layer is read twice here: `Layers` has what both forms share, top to bottom; `RowLayers` and `ChunkLayers` say how each
step is computed. In a round every operation gives a row the bits it would get alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ....kernels import plain_ahead, reference
from ....kernels.kvcache import DIM, KVCache
from ....kernels.linear import MAX_TOKENS
from ....kernels.norm import LARGEST
from ....kernels.ops import Ops
from ....kernels.round_state import Pass
from ....kernels.weights import Weight
from ...parallel.device import DeviceCollective, NormingCollective
from ..model import Observe
from ..weights import Sizes
from .graphs import Outside, Step
from .state import CudaState
from .weights import CudaAttention, CudaDelta, CudaLayer

MOST_CAPTURED = 1024  # tokens of a chunk; a longer one keeps the card busy for longer than the host takes to start it
Tables = tuple[Tensor, Tensor]
Walk = Generator[None, None, Tensor | None]


def in_turn(walks: list[Walk]) -> list[Tensor | None]:
    """Walk through the layers with several passes in turn, stop by stop; what each leaves to be added."""
    results: list[Tensor | None] = [None] * len(walks)
    going = list(range(len(walks)))
    while going:
        for number in list(going):
            try:
                next(walks[number])
            except StopIteration as done:
                results[number] = done.value
                going.remove(number)
    return results


class Common:
    """What every pass needs: operations, state, sizes, rotary tables."""

    def __init__(
        self, ops: Ops, state: CudaState, sizes: Sizes, eps: float, tables: Tables, axes: Tensor, link: DeviceCollective
    ) -> None:
        self.ops, self.state, self.sizes, self.eps = ops, state, sizes, eps
        self.tables, self.axes, self.link = tables, axes, link
        self.side = (
            torch.cuda.Stream(state.device, priority=-1) if link.size > 1 and state.device.type == "cuda" else None
        )
        self.observe: Observe | None = None  # never while a graph is captured


class Layers(ABC):
    """One pass of T rows through layers."""

    def __init__(self, common: Common, tokens: int, overflows: Tensor) -> None:
        """overflows int32 [T]."""
        self.common, self.ops, self.state = common, common.ops, common.state
        self.tokens, self.overflows = tokens, overflows

    def run(self, x: Tensor, layers: Sequence[CudaLayer], pools: Sequence[KVCache]) -> Tensor | None:
        """Move x float32 [T, H] through the layers, in place; what is still to be added to it, None if nothing is."""
        return in_turn([self.walk(x, layers, pools)])[0]

    def walk(self, x: Tensor, layers: Sequence[CudaLayer], pools: Sequence[KVCache]) -> Walk:
        """As `run`, with a stop wherever what the ranks have computed is on its way to be summed."""
        delta: Tensor | None = None
        for number, layer in enumerate(layers):
            mixer, normed = layer.mixer, self.norm(x, layer.input_norm, delta, then=layer.mixer.inputs)
            if isinstance(mixer, CudaAttention):
                mixed = self.attention(mixer, normed, pools[layer.index])
            else:
                mixed = self.delta(mixer, layer.index, normed)
            delta = self.project(mixer.output, mixed, x)
            yield
            normed = self.norm(x, layer.post_norm, delta, then=(layer.gate, layer.up))
            delta = self.project(layer.down, self.gated(layer, normed), x)
            yield
            if self.common.observe is not None:
                self.common.observe(number, self.stream(x, delta))
        return delta

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        delta: Tensor | None = None,
        wide: Tensor | None = None,
        then: Sequence[Weight] = (),
    ) -> Tensor:
        """x += delta; its norm in fp16 [T, H], and in float32 in `wide`. then: matrices that the next launch multiplies it by."""
        return self.ops.rms_norm(x, weight, self.common.eps, delta=delta, wide=wide, overflows=self.overflows)

    def stream(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """The residual stream with what is still to be added, for an observer."""
        return x if delta is None else x + delta

    def attention(self, weights: CudaAttention, x: Tensor, cache: KVCache) -> Tensor:
        """fp16 [T, query heads * 256], gated; keys and values are written into the cache."""
        sizes = self.common.sizes
        queries, keys = 2 * sizes.query_heads * DIM, sizes.kv_heads * DIM
        kept = self.kept("projection", queries + 2 * keys, torch.float32)
        projection = self.products(x, weights.inputs, [queries, keys, keys], kept)
        query = self.kept("query", queries // 2, torch.float16)
        query = self.ops.qkv_rope(
            *(projection, weights.query_norm, weights.key_norm, self.common.tables, self.common.axes),
            *(self.positions, self.slots, cache, self.common.eps),
            out=None if query is None else query.unflatten(1, (sizes.query_heads, DIM)),
            overflows=self.overflows,
        )
        gate = projection[:, :queries].unflatten(1, (sizes.query_heads, 2 * DIM))[..., DIM:]
        return self.attend(query, cache, gate)

    def delta(self, weights: CudaDelta, index: int, x: Tensor) -> Tensor:
        """fp16 [T, value heads * 128], gated and normalised; the lanes' states move."""
        heads = self.common.sizes.value_heads
        widths = [weights.delta.channels, heads * self.common.sizes.value_dim, heads, heads]
        projection = self.products(x, weights.inputs, widths)
        mixed, gate, b, a, *_ = projection.split([*widths, projection.shape[1] - sum(widths)], dim=1)
        out = self.recur(weights, index, mixed, a, b)
        return self.ops.gated_rms_norm(out, gate, weights.norm, self.common.eps, overflows=self.overflows)

    def products(
        self, x: Tensor, weights: Sequence[Weight], widths: list[int], projection: Tensor | None = None
    ) -> Tensor:
        """Products side by side, float32 [T, at least their widths], in rows that start at multiples of 16 bytes."""
        if projection is None:
            projection = torch.empty(x.shape[0], -(-sum(widths) // 4) * 4, device=x.device)
        parts = projection.split([*widths, projection.shape[1] - sum(widths)], dim=1)
        self.multiply(x, weights, list(parts[: len(widths)]))
        return projection

    positions: Tensor  # int32 [3, T]
    slots: Tensor  # int32 [T]

    def kept(self, name: str, width: int, dtype: torch.dtype) -> Tensor | None:
        """Memory [T, width] for what a step outside of graphs reads or writes; None: any will do."""
        return None

    @abstractmethod
    def multiply(self, x: Tensor, weights: Sequence[Weight], outs: list[Tensor]) -> None:
        """x fp16 [T, K] times each weight, into float32 [T, N]."""

    @abstractmethod
    def project(self, weight: Weight, x: Tensor, residual: Tensor) -> Tensor | None:
        """Add x times a weight, summed over the ranks, to the residual; or give what `norm` is to add."""

    @abstractmethod
    def gated(self, layer: CudaLayer, x: Tensor) -> Tensor:
        """silu(gate) * up in fp16."""

    @abstractmethod
    def attend(self, query: Tensor, cache: KVCache, gate: Tensor) -> Tensor:
        """Attention of each row over its lane's positions, times sigmoid(gate): fp16."""

    @abstractmethod
    def recur(self, weights: CudaDelta, index: int, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The gated delta rule of layer `index` among its kind: float32 [T, value heads, 128]."""


class RowLayers(Layers):
    """Rows of a round: a few tokens of a few lanes, whose numbers only the device knows."""

    def __init__(self, common: Common, rows: Pass, *, max_tokens: int, max_positions: int) -> None:
        """max_tokens: rows a sequence at most; max_positions: more than every position."""
        tokens = rows.tokens.shape[0]
        super().__init__(common, tokens, common.state.overflows[:tokens])
        self.positions, self.slots, self._rows = rows.positions, rows.slots, rows
        self._max_tokens, self._max_positions = max_tokens, max_positions

    def multiply(self, x: Tensor, weights: Sequence[Weight], outs: list[Tensor]) -> None:
        self.ops.linears(x, weights, outs)

    def project(self, weight: Weight, x: Tensor, residual: Tensor) -> Tensor | None:
        link = self.common.link
        if link.size == 1:
            self.ops.linear(x, weight, residual, residual=residual)
            return None
        return self.ops.linear(x, weight, dtype=torch.float16, overflows=self.state.counter)

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        delta: Tensor | None = None,
        wide: Tensor | None = None,
        then: Sequence[Weight] = (),
    ) -> Tensor:
        """As everywhere; what `project` left is this rank's part, and is summed here."""
        if delta is None:
            return super().norm(x, weight, None, wide)
        link = self.common.link
        if wide is None and isinstance(link, NormingCollective):
            out = torch.empty_like(delta)
            link.reduce_norm(delta, x, weight, self.common.eps, out, self.overflows, then)
            return out
        total = torch.empty_like(x)
        link.reduce(delta, total)
        return super().norm(x, weight, total, wide)

    def stream(self, x: Tensor, delta: Tensor | None) -> Tensor:
        if delta is None:
            return x
        total = torch.empty_like(x)
        self.common.link.reduce(delta, total)
        return x + total

    def gated(self, layer: CudaLayer, x: Tensor) -> Tensor:
        if layer.gate.encoding == layer.up.encoding:
            return self.ops.swiglu(x, layer.gate, layer.up, overflows=self.state.counter)
        gate, up = self.ops.linears(x, [layer.gate, layer.up])
        return (reference.silu(gate) * up).clamp(-LARGEST, LARGEST).half()

    def attend(self, query: Tensor, cache: KVCache, gate: Tensor) -> Tensor:
        return self.ops.decode_attention(
            *(query, cache, self._rows.sequences),
            max_tokens=self._max_tokens,
            max_positions=self._max_positions,
            gate=gate,
            out=self.state.attended[: self.tokens],
        )

    def recur(self, weights: CudaDelta, index: int, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        out, state = self.state.delta_out[: self.tokens], self.state
        batch = self._rows.round
        return self.ops.delta_decode(mixed, a, b, weights.delta, state.delta[index], state.progress, batch, out)


class ChunkLayers(Layers):
    """A prompt's chunk: tokens start .. start + T - 1 of one lane, whose numbers the host knows.

    Sums over the ranks run on a stream of their own, so that another chunk's products can stand beside them.
    """

    def __init__(self, common: Common, lane: int, start: int, positions: Tensor, slots: Tensor) -> None:
        tokens = slots.shape[0]
        super().__init__(common, tokens, torch.zeros(tokens, dtype=torch.int32, device=slots.device))
        self.positions, self.slots, self._lane, self._start = positions, slots, lane, start
        self._summed: tuple[torch.cuda.Event, Tensor] | None = None  # when, and what must stay until then

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        delta: Tensor | None = None,
        wide: Tensor | None = None,
        then: Sequence[Weight] = (),
    ) -> Tensor:
        self._await_sum()
        return super().norm(x, weight, delta, wide)

    def stream(self, x: Tensor, delta: Tensor | None) -> Tensor:
        self._await_sum()
        return super().stream(x, delta)

    def _await_sum(self) -> None:
        if self._summed is not None:
            self._summed[0].wait()
            self._summed = None

    def multiply(self, x: Tensor, weights: Sequence[Weight], outs: list[Tensor]) -> None:
        self.ops.linear_blocks(x, weights, outs, overflows=self.overflows)

    def project(self, weight: Weight, x: Tensor, residual: Tensor) -> Tensor | None:
        total = torch.empty_like(residual)
        link, side = self.common.link, self.common.side
        if link.size == 1:
            self.ops.linear_blocks(x, [weight], [total], overflows=self.overflows)
            return total
        part = self.ops.linear_block(x, weight)
        part.clamp_(-LARGEST, LARGEST)
        if side is None:
            link.reduce_large(part, total)
            return total
        side.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(side):
            link.reduce_large(part, total)
            event = torch.cuda.Event()
            event.record()
        self._summed = (event, part)
        return total

    def gated(self, layer: CudaLayer, x: Tensor) -> Tensor:
        return self.ops.swiglu_block(x, layer.gate, layer.up, overflows=self.overflows)

    def attend(self, query: Tensor, cache: KVCache, gate: Tensor) -> Tensor:
        table = self.state.lanes.tables[self._lane]
        return self.ops.prefill_attention(query, cache, table, self._start, gate=gate)

    def recur(self, weights: CudaDelta, index: int, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state = self.state
        memory = (state.delta[index], state.progress)
        return self.ops.delta_prefill(mixed, a, b, weights.delta, *memory, self._lane, position=self._start)


def captures(tokens: int) -> bool:
    """Whether chunks of so many tokens are worth a capture, where launches can be captured."""
    return MAX_TOKENS < tokens <= MOST_CAPTURED


class Kept:
    """Memory of chunks of T tokens that are captured: their inputs and results, and what stands between graphs.

    x, wide float32 [T, H]; positions int32 [3, T]; slots, overflows int32 [T]; staged fp16 [T, H]. One for all lanes: chunks
    follow one another on a stream.
    """

    def __init__(self, tokens: int, hidden: int, device: torch.device) -> None:
        self.x, self.wide = (torch.empty(tokens, hidden, device=device) for _ in range(2))
        self.staged = torch.empty(tokens, hidden, dtype=torch.float16, device=device)
        self.positions = torch.zeros(3, tokens, dtype=torch.int32, device=device)
        self.slots, self.overflows = (torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2))
        self._named: dict[str, Tensor] = {}

    def named(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        """[T, width], the same memory for every layer that asks by this name."""
        found = self._named.get(name)
        if found is None:
            tokens = self.slots.shape[0]
            found = self._named[name] = torch.empty(tokens, width, dtype=dtype, device=self.slots.device)
        return found

    @property
    def nbytes(self) -> int:
        own = (self.x, self.wide, self.staged, self.positions, self.slots, self.overflows)
        return sum(tensor.nbytes for tensor in (*own, *self._named.values()))


class CapturedChunk(ChunkLayers):
    """A chunk whose launches are captured but for two kinds, which differ from chunk to chunk: attention over what came
    before, and the sums over the ranks."""

    def __init__(self, common: Common, lane: int, memory: Kept) -> None:
        super().__init__(common, lane, 0, memory.positions, memory.slots)
        self.overflows, self.memory = memory.overflows, memory
        self.outside: Outside | None = None  # while it runs or is captured

    def begin(self, x: Tensor, start: int, positions: Tensor, slots: Tensor) -> None:
        """Take a chunk's inputs over: x float32 [T, H], positions int32 [3, T], slots int32 [T], its first token's number."""
        self.memory.x.copy_(x)
        self.memory.positions.copy_(positions)
        self.memory.slots.copy_(slots)
        self._start = start

    def kept(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        return self.memory.named(name, width, dtype)

    def project(self, weight: Weight, x: Tensor, residual: Tensor) -> Tensor | None:
        link = self.common.link
        if link.size == 1:
            return super().project(weight, x, residual)
        width = residual.shape[1]
        part, total = self.kept("part", width, torch.float16), self.kept("total", width, torch.float32)
        self.ops.linear_block(x, weight, part)
        part.clamp_(-LARGEST, LARGEST)
        self._outside(lambda: link.reduce_large(part, total))
        return total

    def attend(self, query: Tensor, cache: KVCache, gate: Tensor) -> Tensor:
        table = self.state.lanes.tables[self._lane]
        out = self.kept("attended", query.shape[1] * DIM, torch.float16)
        self._outside(lambda: self._attend(query, cache, table, gate, out))
        return out

    def _attend(self, query: Tensor, cache: KVCache, table: Tensor, gate: Tensor, out: Tensor) -> None:
        self.ops.prefill_attention(query, cache, table, self._start, gate=gate, out=out)

    def _outside(self, step: Step) -> None:
        assert self.outside is not None
        plain_ahead.join()  # what is made beside a graph ends with it
        self.outside(step)
