"""The gated delta rule on a GPU: decode with exact replay of accepted tokens, and prefill in chunks.

A round passes the tokens that the last round proved right once more, keeps the state there, and passes its own tokens
without keeping it: rejected drafts leave no trace and no state is copied. Which tokens were accepted is read on the
device, so that a captured graph can be replayed. Same bits for every T. docs/kernels/delta.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import checks, reference
from .checks import check, check_dimensions, check_rows, launch
from .delta_chunks import prefill_chunks
from .module import Module

SOURCE = "delta.cu"
APART_SOURCE = "delta_apart.cu"  # the decoding kernel where launches overlap
HEAD = 128  # dimensions of a key and of a value head
TAPS = 4  # width of the convolution
MAX_TOKENS = 8  # tokens of a sequence in a round
_KEPT = TAPS - 1
_BLOCK_ROWS, _THREADS, _APART_THREADS = 32, 128, 384  # of a block in decoding
_SCAN_ROWS, _SCAN_THREADS = 16, 64
_RUN = 64  # tokens that a block of the convolution takes
_EPS = 1e-6  # of the normalisation of queries and keys


@dataclass(frozen=True)
class DeltaWeights:
    """One layer's: conv float32 [C, 4] (C = (2 key heads + value heads) * 128), a_log and dt_bias float32 [value heads].

    Raises InputError if the parts do not fit one another.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor

    def __post_init__(self) -> None:
        check_dimensions("a_log", self.a_log, 1, "[value heads]")
        heads = self.a_log.shape[0]
        check("a_log", self.a_log, torch.float32, (heads,), self.a_log.device)
        check("dt_bias", self.dt_bias, torch.float32, (heads,), self.a_log.device)
        check_dimensions("conv", self.conv, 2, f"[C, {TAPS}]")
        check("conv", self.conv, torch.float32, (self.conv.shape[0], TAPS), self.a_log.device)
        channels = self.conv.shape[0]
        if channels % HEAD or self.key_heads < 1 or channels != self.channels or heads % self.key_heads:
            raise InputError(
                f"conv is {list(self.conv.shape)} for {heads} value heads: expected (2 key heads + value heads) * {HEAD} "
                "rows, and a whole number of value heads a key head."
            )

    @property
    def value_heads(self) -> int:
        return self.a_log.shape[0]

    @property
    def key_heads(self) -> int:
        return (self.conv.shape[0] // HEAD - self.value_heads) // 2

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * HEAD


@dataclass(frozen=True)
class Progress:
    """How far each lane is, for all layers together; int32 [lanes] on the device, set by whoever judges a round.

    accepted  how many of the last round's tokens stand (0 after a prefill)
    turn      which half of `DeltaState.rows` holds the last round's; the next round writes the other
    """

    accepted: Tensor
    turn: Tensor

    @staticmethod
    def empty(lanes: int, device: torch.device | str) -> "Progress":
        return Progress(*(torch.zeros(lanes, dtype=torch.int32, device=device) for _ in range(2)))

    def advance(self, lane: int, accepted: int) -> None:
        """After a round of a lane went through every layer: `accepted` of its tokens stand."""
        self.accepted[lane] = accepted
        self.turn[lane] ^= 1


@dataclass(frozen=True)
class DeltaState:
    """What the lanes remember of one layer.

    state  float32 [lanes, value heads, 128 (value), 128 (key)], before the last round's tokens
    rows   float32 [2, lanes, 11, C + 2 value heads, up to a multiple of 4]: the convolution's history, then the last
           round's inputs, a and b
    channels  C
    """

    state: Tensor
    rows: Tensor
    channels: int

    @staticmethod
    def empty(lanes: int, weights: DeltaWeights) -> "DeltaState":
        device, heads = weights.conv.device, weights.value_heads
        return DeltaState(
            torch.zeros(lanes, heads, HEAD, HEAD, device=device),
            torch.zeros(2, lanes, _KEPT + MAX_TOKENS, _row_width(weights.channels, heads), device=device),
            weights.channels,
        )

    def history(self, lane: int, progress: Progress) -> Tensor:
        """The convolution's last three inputs [3, C], a view, at the last accepted token; reads `progress` on the host."""
        first, turn = int(progress.accepted[lane]), int(progress.turn[lane])
        return self.rows[turn, lane, first : first + _KEPT, : self.channels]


def _row_width(channels: int, heads: int) -> int:
    return -(-(channels + 2 * heads) // 4) * 4


@dataclass(frozen=True)
class Round:
    """Which rows belong to which lane; int32 [S] on the device.

    lanes   lane of each sequence, -1: none
    counts  its tokens, 1 .. 8; 0: only move the lane to its last accepted token
    firsts  the row of its first token
    """

    lanes: Tensor
    counts: Tensor
    firsts: Tensor

    @staticmethod
    def of(lanes: list[int], counts: list[int], device: torch.device) -> "Round":
        """From host numbers, for rows in the order of the sequences."""
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        return Round(*(torch.tensor(x, dtype=torch.int32, device=device) for x in (lanes, counts, firsts)))


def delta_decode(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    progress: Progress,
    batch: Round,
    out: Tensor | None = None,
) -> Tensor:
    """A round's tokens through convolution, gates and recurrence: float32 [T, value heads, 128], before the gated norm.

    mixed float32 [T, C], a and b float32 [T, value heads]: parts of one projection (rows equally far apart). The state
    moves, in place, to each lane's last accepted token; the round's own tokens are remembered for the next one. Once all
    layers are through, `progress` must be advanced.

    Where launches overlap, the next one must not be of the same layer: it may begin before this one has kept what it keeps.

    Raises InputError where shapes, dtypes, strides or devices do not fit, EnvironmentFault if a kernel cannot start.
    """
    out, stride = _checked(mixed, a, b, weights, memory, progress, batch, out)
    module, name, threads, overlaps = _decoder(mixed.device)
    module.launch(
        name,
        (HEAD // _BLOCK_ROWS * weights.value_heads // weights.key_heads, weights.key_heads, batch.lanes.shape[0]),
        threads,
        (
            *(mixed, a, b, stride, weights.conv, weights.a_log, weights.dt_bias, memory.rows, memory.state),
            *(memory.state.shape[0], batch.lanes, progress.accepted, progress.turn, batch.counts, batch.firsts),
            *(out, _EPS),
        ),
        overlap=overlaps,
    )
    return out


def _decoder(device: torch.device) -> tuple[Module, str, int, bool]:
    """The decoding kernel for a device: its module, name and threads, and whether it overlaps. Same bits either way."""
    module = checks.module_on(SOURCE, device)
    if module.overlaps:
        apart = checks.module_on(APART_SOURCE, device)
        if apart.overlaps:
            return apart, "delta_decode_apart", _APART_THREADS, True
    return module, "delta_decode", _THREADS, False


def delta_decode_reference(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    progress: Progress,
    batch: Round,
    out: Tensor | None = None,
) -> Tensor:
    """What `delta_decode` computes, in torch on any device; reads the batch's numbers on the host."""
    out, _ = _checked(mixed, a, b, weights, memory, progress, batch, out)
    channels = weights.channels
    lanes, counts, firsts = (x.tolist() for x in (batch.lanes, batch.counts, batch.firsts))
    for lane, count, first in zip(lanes, counts, firsts, strict=True):
        if lane < 0:
            continue
        before, turn, rows = int(progress.accepted[lane]), int(progress.turn[lane]), slice(first, first + count)
        old, new = memory.rows[turn, lane], memory.rows[1 - turn, lane]
        fresh = torch.cat((mixed[rows], a[rows], b[rows]), dim=1)
        inputs = torch.cat((old[_KEPT : _KEPT + before, : fresh.shape[1]], fresh))
        convolved, joined = reference.causal_conv(inputs[:, :channels], old[:_KEPT, :channels], weights.conv)
        kept_a, kept_b = inputs[:, channels:].split(weights.value_heads, dim=1)[:2]
        heads = _split_heads(convolved, weights)
        gates = reference.delta_gates(kept_a, kept_b, weights.a_log, weights.dt_bias)
        outputs, trail = reference.delta_rule_steps(*heads, *gates, memory.state[lane])
        if before:
            memory.state[lane] = trail[before - 1]
        out[rows] = outputs[before:]
        new[:_KEPT, :channels] = joined[before : before + _KEPT]
        new[_KEPT : _KEPT + count, : fresh.shape[1]] = fresh
    return out


def delta_prefill(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    progress: Progress,
    lane: int,
    out: Tensor | None = None,
    *,
    chunked: bool = False,
    position: int = 0,
) -> Tensor:
    """A prompt's chunk of any length through the same layer; inputs, output and errors as `delta_decode`.

    The lane must stand at the end of its tokens (`accepted` 0, as after `Round` with a count of 0); it moves to the end of
    the chunk. Bits are those of decoding the tokens one by one, however the prompt is cut.

    With `chunked`, 64 tokens at a time on tensor cores: many times as fast, fp16 operands (a relative error of 1e-3 at
    most, values beyond 65504 cut off). `position` is that of the first token; bits stay where a prompt is cut at multiples of 64.
    """
    out, stride = _checked_prefill(mixed, a, b, weights, memory, progress, lane, out)
    if position < 0:
        raise InputError(f"position is {position}: expected that of the first token.")
    if chunked:
        layer = (weights.conv, weights.a_log, weights.dt_bias)
        kept = (memory.state, memory.rows, progress.turn)
        prefill_chunks(mixed, a, b, stride, layer, kept, lane, position, out)
        return out
    tokens, heads, device = mixed.shape[0], weights.value_heads, mixed.device
    lanes = memory.state.shape[0]
    convolved = torch.empty(tokens, weights.channels, device=device)
    gates = torch.empty(2, tokens, heads, device=device)
    launch(
        SOURCE,
        "delta_convolve",
        (weights.channels // HEAD + 1, -(-tokens // _RUN)),
        128,
        (
            *(mixed, a, b, stride, weights.conv, weights.a_log, weights.dt_bias, memory.rows, lanes, lane),
            *(progress.turn, convolved, gates, tokens, weights.key_heads, heads, _EPS),
        ),
        device,
    )
    launch(
        SOURCE,
        "delta_scan",
        (HEAD // _SCAN_ROWS, heads),
        _SCAN_THREADS,
        (
            *(mixed, stride, convolved, gates, memory.rows, memory.state, lanes, lane, progress.turn, out),
            *(tokens, weights.key_heads),
        ),
        device,
    )
    return out


def delta_prefill_reference(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    progress: Progress,
    lane: int,
    out: Tensor | None = None,
    *,
    chunked: bool = False,
    position: int = 0,
) -> Tensor:
    """What `delta_prefill` computes, 64 tokens at a time (the WY form), in torch on any device, in float32 either way."""
    out, _ = _checked_prefill(mixed, a, b, weights, memory, progress, lane, out)
    tokens, history = mixed.shape[0], memory.history(lane, progress)
    convolved, joined = reference.causal_conv(mixed, history, weights.conv)
    gates = reference.delta_gates(a, b, weights.a_log, weights.dt_bias)
    outputs, state = reference.delta_rule_chunked(*_split_heads(convolved, weights), *gates, memory.state[lane])
    memory.state[lane] = state
    history.copy_(joined[tokens:])
    return out.copy_(outputs)


def _checked_prefill(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    progress: Progress,
    lane: int,
    out: Tensor | None,
) -> tuple[Tensor, int]:
    if not 0 <= lane < memory.state.shape[0]:
        raise InputError(f"lane is {lane}: expected 0 to {memory.state.shape[0] - 1}.")
    return _checked(mixed, a, b, weights, memory, progress, None, out)


def _split_heads(convolved: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """[T, C] -> q, k [T, key heads, 128], L2-normalised, and v [T, value heads, 128]."""
    query, key, value = convolved.unflatten(1, (-1, HEAD)).split([weights.key_heads] * 2 + [weights.value_heads], dim=1)
    return reference.l2_normalize(query, _EPS), reference.l2_normalize(key, _EPS), value


def _checked(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    progress: Progress,
    batch: Round | None,
    out: Tensor | None,
) -> tuple[Tensor, int]:
    device, heads = weights.conv.device, weights.value_heads
    check_dimensions("mixed", mixed, 2, "[T, C]")
    tokens = mixed.shape[0]
    stride = check_rows("mixed", mixed, torch.float32, (tokens, weights.channels), device)
    for name, gate in (("a", a), ("b", b)):
        if check_rows(name, gate, torch.float32, (tokens, heads), device, 4) != stride and tokens > 1:
            raise InputError(
                f"{name}: rows are {gate.stride(0)} elements apart, those of mixed {stride}: they must be parts of one "
                "projection."
            )
    check_dimensions("state", memory.state, 4, f"[lanes, value heads, {HEAD}, {HEAD}]")
    lanes = memory.state.shape[0]
    check("state", memory.state, torch.float32, (lanes, heads, HEAD, HEAD), device)
    width = _row_width(weights.channels, heads)
    check("rows", memory.rows, torch.float32, (2, lanes, _KEPT + MAX_TOKENS, width), device)
    check("accepted", progress.accepted, torch.int32, (lanes,), device)
    check("turn", progress.turn, torch.int32, (lanes,), device)
    if batch is not None:
        check_dimensions("lanes", batch.lanes, 1, "[S]")
        for name in ("lanes", "counts", "firsts"):
            check(name, getattr(batch, name), torch.int32, tuple(batch.lanes.shape), device)
    if out is None:
        out = torch.empty(tokens, heads, HEAD, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (tokens, heads, HEAD), device)
    return out, stride
