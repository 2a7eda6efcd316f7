"""Bytes of a decode round, launch by launch: what the runtime asks its kernels to read and write, on one rank.

Counted is what lies in the card's memory: every matrix once a launch that multiplies by it (the head whole, the embedding
by rows), keys and values up to the position, the recurrent state read and written. Activations, logits and partial results
of a few tokens stay in the second-level cache and are not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from ..checkpoint.errors import InputError
from ..model.config import FULL
from .sheet import Layer, Matrix, Sheet, kernel_encoding

Family = Literal["linear", "head", "attention", "delta", "small", "sampling", "collective"]
FAMILIES: tuple[Family, ...] = ("linear", "head", "attention", "delta", "small", "sampling", "collective")
MAX_TOKENS, MAX_LANES, MAX_CONTEXT = 8, 4, 1 << 24  # of a sequence in a round (kernels/attention.py), and sequences
ATTENTION_ROWS = 40  # query rows that one pass over the cache serves
KV_SCALE_DIMS = 64
CANDIDATES = 64  # of a rank and row, where they are gathered (kernels/candidates.py)
SAMPLING = ("adjust", "settle")  # launches of `decide` for greedy lanes


@dataclass(frozen=True)
class Shape:
    """A round: `drafts` tokens drafted and verified with one more, `lanes` sequences, each `context` tokens deep.

    `draft_head`: drafts are drawn with the reduced head, where there is one. `head_split`: of a head that is cut over the
    ranks candidates are gathered, not whole logits.
    """

    context: int = 0
    drafts: int = 0
    lanes: int = 1
    kv: str = "int8"
    draft_head: bool = True
    head_split: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.drafts < MAX_TOKENS:
            raise InputError(f"{self.drafts} drafts: expected 0 to {MAX_TOKENS - 1}.")
        if not 1 <= self.lanes <= MAX_LANES:
            raise InputError(f"{self.lanes} lanes: expected 1 to {MAX_LANES}.")
        if not 0 <= self.context <= MAX_CONTEXT:
            raise InputError(f"a context of {self.context}: expected 0 to {MAX_CONTEXT} tokens.")
        if self.kv not in ("int8", "fp16"):
            raise InputError(f"KV form {self.kv!r}: int8 or fp16.")

    @property
    def rows(self) -> int:
        """Tokens of the verification pass."""
        return self.lanes * (1 + self.drafts)


@dataclass(frozen=True)
class Launch:
    """One kernel (or collective) of a round.

    kernel    its name in the runtime
    part      `verify`, or `draft 1` and so on
    what      the layer or the tensors it works on
    weights, kv, state   bytes read, by what they are
    written   bytes written of KV and state
    encodings of the matrices it multiplies by
    tokens    rows it works on; for attention and the delta rule, those of one sequence
    lanes     sequences
    form      the extents that decide its time beside its bytes
    message   bytes a collective carries
    within    the kernel whose time holds this one's, where that was measured as the runtime calls it
    """

    kernel: str
    family: Family
    part: str
    what: str
    weights: float = 0
    kv: int = 0
    state: int = 0
    written: int = 0
    encodings: tuple[str, ...] = ()
    tokens: int = 1
    lanes: int = 1
    form: str = ""
    message: int = 0
    within: str = ""

    @property
    def key(self) -> str:
        """Launches of one key take the same time at the same bytes."""
        return f"{self.kernel} {self.form} T{self.tokens} x{self.lanes}"

    @property
    def read(self) -> float:
        return self.weights + self.kv + self.state

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Ledger:
    """The launches of a round in their order. `label` says of what."""

    label: str
    tp: int
    shape: Shape
    launches: tuple[Launch, ...] = field(repr=False)

    @property
    def read(self) -> float:
        return sum(launch.read for launch in self.launches)

    @property
    def written(self) -> int:
        return sum(launch.written for launch in self.launches)

    def by_family(self) -> dict[str, tuple[int, float]]:
        """family -> launches, bytes read and written."""
        found: dict[str, tuple[int, float]] = {}
        for family in FAMILIES:
            mine = [launch for launch in self.launches if launch.family == family]
            if mine:
                found[family] = len(mine), sum(launch.moved for launch in mine)
        return found


def kv_bytes(heads: int, dim: int, kv: str) -> int:
    """Keys and values of a position in one layer: `heads` kv heads of `dim` (docs/kernels/attention.md)."""
    return 2 * heads * (2 * dim if kv == "fp16" else dim + 2 * -(-dim // KV_SCALE_DIMS))


def passes(tokens: int, group: int) -> int:
    """How often attention reads the cache for `tokens` tokens of `group` query heads a kv head."""
    return -(-tokens // max(1, ATTENTION_ROWS // group))


def ledger_of(sheet: Sheet, shape: Shape) -> Ledger:
    """A round of one rank. Raises InputError for drafts of a model without an MTP layer."""
    if shape.drafts and sheet.mtp is None:
        raise InputError(f"{sheet.label}: has no MTP layer, so nothing drafts: --drafts 0.")
    return Ledger(sheet.label, sheet.tp, shape, tuple(_round(sheet, shape)))


def _round(sheet: Sheet, shape: Shape) -> Iterator[Launch]:
    """As runtime/engine/cuda/round.py launches it."""
    for number in range(1, shape.drafts + 1):
        # The first draft passes the tokens that the last round kept, beside those that it did not.
        yield from _draft(sheet, shape, number, 1 + shape.drafts if number == 1 else 1)
    yield from _Pass(sheet, shape, "verify", 1 + shape.drafts).verify()


def _draft(sheet: Sheet, shape: Shape, number: int, tokens: int) -> Iterator[Launch]:
    assert sheet.mtp is not None
    run = _Pass(sheet, shape, f"draft {number}", tokens)
    yield run.small("round_rows", "lengths, slots, positions")
    if number == 1:
        yield run.small("embed_fp32", "hidden states that were kept", form=str(sheet.hidden))
    yield run.embed()
    yield run.norm("mtp embedding norm", True)
    yield run.norm("mtp hidden norm", True)
    yield run.linears("linear", "mtp.fc", sheet.mtp.fc)
    yield from run.layer(sheet.mtp.layer, True, True)
    yield run.norm("mtp.norm", False, True)
    if number == 1:
        yield run.small("embed_fp32", "the last that stands", form=str(sheet.hidden), rows=shape.lanes)
        yield from (run.small("elementwise", "to fp16", form=str(sheet.hidden), rows=shape.lanes) for _ in range(2))
    reduced = shape.draft_head and sheet.draft_head is not None
    head = sheet.draft_head if reduced and sheet.draft_head is not None else sheet.head
    yield from run.head(head, shape.lanes, reduced)


class _Pass:
    """Launches of `tokens` tokens a lane through some layers."""

    def __init__(self, sheet: Sheet, shape: Shape, part: str, tokens: int) -> None:
        self.sheet, self.shape, self.part, self.tokens = sheet, shape, part, tokens
        self.rows = shape.lanes * tokens

    def verify(self) -> Iterator[Launch]:
        yield self.small("round_rows", "lengths, slots, positions")
        yield self.embed()
        last = len(self.sheet.layers) - 1
        for index, layer in enumerate(self.sheet.layers):
            yield from self.layer(layer, index == 0, index == last)
        yield self.norm("final norm", False, True)
        yield from self.head(self.sheet.head, self.rows, False)
        yield self.small("round_advance", "lengths, states, hidden states kept")

    def embed(self) -> Launch:
        return self.small("embed", f"{self.rows} rows", self.rows * self.sheet.embed_row, form=str(self.sheet.hidden))

    def small(
        self,
        kernel: str,
        what: str,
        weights: int = 0,
        written: int = 0,
        form: str = "",
        rows: int | None = None,
        within: str = "",
    ) -> Launch:
        return Launch(
            kernel,
            "small",
            self.part,
            what,
            weights,
            written=written,
            tokens=rows or self.rows,
            form=form,
            within=within,
        )

    def norm(self, what: str, first: bool, last: bool = False) -> Launch:
        """On several ranks a norm adds what was summed over them, unless it is the `first` of a stream.

        The mailbox goes on from its sum to the norm in one launch, but for the `last` of a stream.
        """
        width = str(self.sheet.hidden)
        if first or self.sheet.tp == 1:
            return self.small("rms_norm", what, 4 * self.sheet.hidden, form=width)
        return self.small(
            "rms_norm_delta", what, 4 * self.sheet.hidden, form=width, within="" if last else "reduce_norm"
        )

    def linears(
        self, kernel: str, what: str, *matrices: Matrix, family: Family = "linear", rows: int | None = None
    ) -> Launch:
        encodings = tuple(dict.fromkeys(matrix.encoding for matrix in matrices))
        form = " ".join(f"{kernel_encoding(one)}:{one.rows}x{one.columns}" for one in matrices)
        total = sum(matrix.nbytes for matrix in matrices)
        return Launch(
            kernel, family, self.part, what, total, encodings=encodings, tokens=rows or self.rows, form=form
        )  # fmt: skip

    def reduce(self, what: str, last: bool = False) -> Iterator[Launch]:
        if self.sheet.tp > 1:
            kernel, width = "reduce" if last else "reduce_norm", self.sheet.hidden
            yield Launch(
                kernel, "collective", self.part, what, message=2 * self.rows * width, tokens=self.rows, form=str(width)
            )

    def head(self, head: Matrix, rows: int, reduced: bool) -> Iterator[Launch]:
        yield self.linears("linear", head.name.removesuffix(".weight"), head, family="head", rows=rows)
        few = self.sheet.head_cut and self.shape.head_split
        if few:
            for name in ("first", "narrow", "last"):
                yield Launch(f"candidates_{name}", "sampling", self.part, f"{rows} rows of a share", tokens=rows)
        if self.sheet.head_cut:
            columns = 2 * CANDIDATES if few else head.rows
            what, message = "candidates" if few else "logits", 4 * rows * columns
            yield Launch("gather", "collective", self.part, what, message=message, tokens=rows, form=str(columns))
        if few:
            yield Launch("candidates_spread", "sampling", self.part, "candidates to their ids", tokens=rows)
        elif reduced:
            yield self.small("round_scatter", "the draft head's logits to their ids")
        for name in SAMPLING:
            within = "" if name == SAMPLING[0] else f"sampling_{SAMPLING[0]}"
            what = f"{rows} rows of logits"
            yield Launch(f"sampling_{name}", "sampling", self.part, what, tokens=rows, within=within)

    def layer(self, layer: Layer, first: bool, last: bool) -> Iterator[Launch]:
        yield self.norm(f"{layer.name} input norm", first)
        yield from self.attention(layer) if layer.kind == FULL else self.delta(layer)
        yield self.linears("linear", f"{layer.name} output", layer.output)
        yield from self.reduce(f"{layer.name} output")
        yield self.norm(f"{layer.name} post norm", False)
        yield from self.mlp(layer)
        yield from self.reduce(f"{layer.name} mlp", last)

    def attention(self, layer: Layer) -> Iterator[Launch]:
        heads, shape = self.sheet.heads, self.shape
        position, form = kv_bytes(heads.kv, heads.dim, shape.kv), f"{heads.query}/{heads.kv}"
        yield self.linears("linears", f"{layer.name} q, k, v", *layer.inputs)
        yield self.small(f"qkv_rope_{shape.kv}", layer.name, layer.vectors, self.rows * position, form)
        read = passes(self.tokens, heads.query // heads.kv) * shape.lanes * (shape.context + self.tokens) * position
        yield Launch(
            f"attention_{shape.kv}", "attention", self.part, layer.name, kv=read, tokens=self.tokens,
            lanes=shape.lanes, form=form,
        )  # fmt: skip
        yield Launch(
            "attention_merge", "attention", self.part, layer.name, tokens=self.tokens, lanes=shape.lanes,
            within=f"attention_{shape.kv}",
        )  # fmt: skip

    def delta(self, layer: Layer) -> Iterator[Launch]:
        """Rows of the last round that stand are read again: as many as this round has, at most, are counted."""
        heads, lanes = self.sheet.heads, self.shape.lanes
        kept = lanes * (heads.conv_width - 1 + self.tokens) * heads.row_bytes
        state, form = lanes * heads.state_bytes, f"{heads.key}/{heads.value}"
        yield self.linears("linears", f"{layer.name} qkv, z, b, a", *layer.inputs)
        norm = 4 * heads.value_dim
        yield Launch(
            "delta_decode", "delta", self.part, layer.name, layer.vectors - norm, state=state + kept,
            written=state + kept, tokens=self.tokens, lanes=lanes, form=form,
        )  # fmt: skip
        yield self.small("gated_rms_norm", layer.name, norm, form=str(heads.value))

    def mlp(self, layer: Layer) -> Iterator[Launch]:
        experts = layer.experts
        if experts is not None:
            read = experts.read(self.rows)
            gates = [experts.router] if experts.shared_gate is None else [experts.router, experts.shared_gate]
            yield self.linears("linears", f"{layer.name} router", *gates)
            for kernel, nbytes in (("experts_swiglu", experts.gate_up), ("experts_down", experts.down)):
                yield Launch(kernel, "linear", self.part, f"{layer.name} experts", read * nbytes, tokens=self.rows)
        yield self.linears("swiglu", f"{layer.name} gate, up", layer.gate, layer.up)
        yield self.linears("linear", f"{layer.name} down", layer.down)


def fused(ledger: Ledger, factor: int) -> Ledger:
    """What if: every `factor` launches of linears in a row were one, with the same bytes. The head stays alone."""
    found: list[Launch] = []
    open_at, held = -1, 0
    for launch in ledger.launches:
        if launch.family != "linear":
            found.append(launch)
        elif open_at >= 0 and held < factor and found[open_at].part == launch.part:
            first, held = found[open_at], held + 1
            encodings = tuple(dict.fromkeys((*first.encodings, *launch.encodings)))
            found[open_at] = replace(first, weights=first.weights + launch.weights, encodings=encodings, form="")
        else:
            open_at, held = len(found), 1
            found.append(launch)
    return replace(ledger, launches=tuple(found))
