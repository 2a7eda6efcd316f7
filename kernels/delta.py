"""The gated delta rule on a GPU: decode with exact replay of accepted tokens, and prefill in chunks.

A round passes the tokens that the last round proved right once more, keeps the state there, and passes its own tokens
without keeping it: rejected drafts leave no trace and no state is copied. Which tokens were accepted is read on the
device, so that a captured graph can be replayed. Same bits for every T. docs/kernels/delta.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import reference
from .checks import check, check_dimensions, check_rows, launch

SOURCE = "delta.cu"
HEAD = 128  # dimensions of a key and of a value head
TAPS = 4  # width of the convolution
MAX_TOKENS = 8  # tokens of a sequence in a round
_KEPT = TAPS - 1
_STEPS = 2 * MAX_TOKENS
_BLOCK_ROWS, _THREADS = 16, 64
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
class DeltaState:
    """What the lanes remember of one layer.

    state     float32 [lanes, value heads, 128 (value), 128 (key)], before the last round's tokens
    rows      float32 [lanes, 11, C + 2 value heads]: the convolution's history, then the last round's inputs, a and b
    accepted  int32 [lanes], how many of the last round's tokens stand (0 after a prefill); set by whoever judges the round
    """

    state: Tensor
    rows: Tensor
    accepted: Tensor

    @staticmethod
    def empty(lanes: int, weights: DeltaWeights) -> "DeltaState":
        device, heads = weights.conv.device, weights.value_heads
        return DeltaState(
            torch.zeros(lanes, heads, HEAD, HEAD, device=device),
            torch.zeros(lanes, _KEPT + MAX_TOKENS, weights.channels + 2 * heads, device=device),
            torch.zeros(lanes, dtype=torch.int32, device=device),
        )

    def history(self, lane: int) -> Tensor:
        """The convolution's last three inputs [3, C] at the last accepted token; reads `accepted` on the host."""
        first = int(self.accepted[lane])
        return self.rows[lane, first : first + _KEPT, : self.rows.shape[2] - 2 * self.state.shape[1]]


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
    batch: Round,
    out: Tensor | None = None,
) -> Tensor:
    """A round's tokens through convolution, gates and recurrence: float32 [T, value heads, 128], before the gated norm.

    mixed float32 [T, C], a and b float32 [T, value heads]: parts of one projection (rows equally far apart). `memory`
    moves, in place, to each lane's last accepted token; the round's own tokens are remembered for the next one.

    Raises InputError where shapes, dtypes, strides or devices do not fit, EnvironmentFault if a kernel cannot start.
    """
    out, stride = _checked(mixed, a, b, weights, memory, batch, out)
    count, heads, device = batch.lanes.shape[0], weights.value_heads, mixed.device
    convolved = torch.empty(count, _STEPS, weights.channels, device=device)
    gates = torch.empty(count, _STEPS, 2, heads, device=device)
    members = (batch.lanes, memory.accepted, batch.counts, batch.firsts)
    launch(
        SOURCE,
        "delta_inputs",
        (weights.channels // HEAD + 1, count),
        HEAD,
        (
            *(mixed, a, b, stride, weights.conv, weights.a_log, weights.dt_bias, memory.rows, *members),
            *(convolved, gates, weights.key_heads, heads, _EPS),
        ),
        device,
    )
    launch(
        SOURCE,
        "delta_steps",
        (HEAD // _BLOCK_ROWS, heads, count),
        _THREADS,
        (convolved, gates, memory.state, *members, out, weights.key_heads),
        device,
    )
    return out


def delta_decode_reference(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    batch: Round,
    out: Tensor | None = None,
) -> Tensor:
    """What `delta_decode` computes, in torch on any device; reads the batch's numbers on the host."""
    out, _ = _checked(mixed, a, b, weights, memory, batch, out)
    channels = weights.channels
    lanes, counts, firsts = (x.tolist() for x in (batch.lanes, batch.counts, batch.firsts))
    for lane, count, first in zip(lanes, counts, firsts, strict=True):
        if lane < 0:
            continue
        before, rows, own = int(memory.accepted[lane]), slice(first, first + count), memory.rows[lane]
        fresh = torch.cat((mixed[rows], a[rows], b[rows]), dim=1)
        inputs = torch.cat((own[_KEPT : _KEPT + before], fresh))
        convolved, joined = reference.causal_conv(inputs[:, :channels], own[:_KEPT, :channels].clone(), weights.conv)
        kept_a, kept_b = inputs[:, channels:].split(weights.value_heads, dim=1)
        heads = _split_heads(convolved, weights)
        gates = reference.delta_gates(kept_a, kept_b, weights.a_log, weights.dt_bias)
        outputs, trail = reference.delta_rule_steps(*heads, *gates, memory.state[lane])
        if before:
            memory.state[lane] = trail[before - 1]
        out[rows] = outputs[before:]
        own[:_KEPT, :channels] = joined[before : before + _KEPT]
        own[_KEPT : _KEPT + count] = fresh
    return out


def delta_prefill(
    mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, memory: DeltaState, lane: int, out: Tensor | None = None
) -> Tensor:
    """A prompt's chunk of any length through the same layer, 64 tokens at a time (the WY form); output as delta_decode.

    The lane must stand at the end of its tokens (`accepted` 0); it moves to the end of the chunk. On any device.
    """
    tokens = mixed.shape[0]
    convolved, joined = reference.causal_conv(mixed, memory.history(lane).clone(), weights.conv)
    gates = reference.delta_gates(a, b, weights.a_log, weights.dt_bias)
    outputs, state = reference.delta_rule_chunked(*_split_heads(convolved, weights), *gates, memory.state[lane])
    memory.state[lane] = state
    memory.rows[lane, :_KEPT, : weights.channels] = joined[tokens:]
    return outputs if out is None else out.copy_(outputs)


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
    batch: Round,
    out: Tensor | None,
) -> tuple[Tensor, int]:
    device, heads = weights.conv.device, weights.value_heads
    check_dimensions("mixed", mixed, 2, "[T, C]")
    tokens = mixed.shape[0]
    stride = check_rows("mixed", mixed, torch.float32, (tokens, weights.channels), device, 4)
    for name, gate in (("a", a), ("b", b)):
        if check_rows(name, gate, torch.float32, (tokens, heads), device, 4) != stride and tokens > 1:
            raise InputError(
                f"{name}: rows are {gate.stride(0)} elements apart, those of mixed {stride}: they must be parts of one "
                "projection."
            )
    check_dimensions("state", memory.state, 4, f"[lanes, value heads, {HEAD}, {HEAD}]")
    lanes = memory.state.shape[0]
    check("state", memory.state, torch.float32, (lanes, heads, HEAD, HEAD), device)
    width = weights.channels + 2 * heads
    check("rows", memory.rows, torch.float32, (lanes, _KEPT + MAX_TOKENS, width), device)
    check("accepted", memory.accepted, torch.int32, (lanes,), device)
    check_dimensions("lanes", batch.lanes, 1, "[S]")
    for name in ("lanes", "counts", "firsts"):
        check(name, getattr(batch, name), torch.int32, tuple(batch.lanes.shape), device)
    if out is None:
        out = torch.empty(tokens, heads, HEAD, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (tokens, heads, HEAD), device)
    return out, stride
