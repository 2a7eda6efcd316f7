"""What one rank holds of a model, matrix by matrix, in the bytes that its kernels read: the input of `ledger`.

Everything follows from a configuration and from the encoding of each weight; no weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..checkpoint.encodings import tile_of, tile_ranges, words_of
from ..checkpoint.errors import InputError
from ..checkpoint.manifest import DRAFT_HEAD
from ..model.config import FULL, ModelConfig
from ..model.inventory import EMBED, HEAD, LAYER, TensorSpec, inventory
from ..model.partition import split_of

TILE_ROWS, TILE_COLUMNS = 32, 16  # what does not fill such tiles is held in fp16 (kernels/weights.py)
BLOCK_COLUMNS = 64  # scales of finer blocks are multiplied in, which leaves fp16 too
PLAIN_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] as a rank holds it. `nbytes`: what one product reads of it, scales included."""

    name: str
    rows: int
    columns: int
    encoding: str
    nbytes: int


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer: `used` of `count` a token. `gate_up`, `down`: bytes of one expert on this rank."""

    count: int
    used: int
    gate_up: int
    down: int
    router: Matrix
    shared_gate: Matrix | None

    def read(self, tokens: int) -> float:
        """Experts that `tokens` tokens read, each once: the mean for tokens that choose independently."""
        return self.count * (1 - (1 - self.used / self.count) ** tokens)


@dataclass(frozen=True)
class Layer:
    """One layer. `inputs` share one launch, `vectors`: bytes of convolution, gates and head norms (float32).

    With `experts`, gate, up and down are the shared expert's.
    """

    name: str
    kind: str
    inputs: tuple[Matrix, ...]
    output: Matrix
    vectors: int
    gate: Matrix
    up: Matrix
    down: Matrix
    experts: Experts | None = None


@dataclass(frozen=True)
class Mtp:
    """The draft layer with its projection of embedding and hidden state."""

    fc: Matrix
    layer: Layer


@dataclass(frozen=True)
class Heads:
    """Heads on this rank and their extents."""

    query: int
    kv: int
    dim: int
    key: int
    value: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def state_bytes(self) -> int:
        """The recurrent state of a layer and a sequence, float32."""
        return 4 * self.value * self.key_dim * self.value_dim

    @property
    def row_bytes(self) -> int:
        """A token's row that the delta rule remembers: convolution's channels and two gates, float32."""
        return 4 * (2 * self.key * self.key_dim + self.value * self.value_dim + 2 * self.value)


@dataclass(frozen=True)
class Sheet:
    """One rank of a model. `embed_row`: bytes of an embedding; `head_cut`: the head is a share of the vocabulary."""

    label: str
    tp: int
    hidden: int
    heads: Heads
    embed_row: int
    layers: tuple[Layer, ...]
    head: Matrix
    head_cut: bool
    mtp: Mtp | None
    draft_head: Matrix | None

    @property
    def held(self) -> int:
        """Bytes of weights that a rank keeps on its card, the vision tower and vectors of norms left out."""
        layers = [*self.layers, *([self.mtp.layer] if self.mtp else [])]
        matrices = [self.head, *([self.mtp.fc] if self.mtp else []), *([self.draft_head] if self.draft_head else [])]
        total = sum(one.nbytes for one in matrices) + self.embed_row * self.head.rows * (
            self.tp if self.head_cut else 1
        )
        for layer in layers:
            total += sum(one.nbytes for one in (*layer.inputs, layer.output, layer.gate, layer.up, layer.down))
            if layer.experts:
                total += (
                    layer.experts.count * (layer.experts.gate_up + layer.experts.down) + layer.experts.router.nbytes
                )
        return total

    def with_draft_head(self, rows: int) -> "Sheet":
        """The same model with a draft head of `rows` rows in all, in the head's encoding. 0: without one."""
        if not rows:
            return replace(self, draft_head=None)
        share = rows // self.tp if self.head_cut else rows
        nbytes = device_bytes(self.head.encoding, share, self.head.columns)
        return replace(self, draft_head=Matrix(DRAFT_HEAD, share, self.head.columns, self.head.encoding, nbytes))

    def with_whole_head(self) -> "Sheet":
        """The same rank with every row of the head, so that no logits are gathered."""
        if not self.head_cut:
            return self
        rows, columns, encoding = self.head.rows * self.tp, self.head.columns, self.head.encoding
        head = replace(self.head, rows=rows, nbytes=device_bytes(encoding, rows, columns))
        draft = self.draft_head
        if draft is not None:
            rows = draft.rows * self.tp
            draft = replace(draft, rows=rows, nbytes=device_bytes(draft.encoding, rows, columns))
        return replace(self, head=head, head_cut=False, draft_head=draft)


def device_bytes(encoding: str, rows: int, columns: int, tile: tuple[int, int] | None = None) -> int:
    """Bytes that a product reads of a matrix in `encoding`: `nbytes` of its form in kernels/weights.py.

    `tile`: rows and columns of a tile scale, if a split made them finer than the encoding says. Raises InputError for an
    encoding that no kernel reads.
    """
    words = words_of(encoding)
    fills = rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0
    tile = tile or tile_of(encoding)
    fills = fills and (tile is None or (tile[0] % TILE_ROWS == 0 and tile[1] % BLOCK_COLUMNS == 0))
    if words in PLAIN_BYTES or not fills:
        padded = -(-rows // TILE_ROWS) * TILE_ROWS
        return 2 * padded * columns + 4 * rows  # whatever the source's width: fp16 and a scale a row
    if words == "nvfp4":
        return rows * columns // 2 + rows * columns // 16 + 4
    if words == "fp8_e4m3":
        if tile is None:
            return rows * columns + 4 * rows
        return rows * columns + 4 * -(-rows // tile[0]) * -(-columns // tile[1])
    raise InputError(f"encoding {encoding!r}: no kernel reads it. Convert the checkpoint, or name a --recipe.")


def kernel_encoding(matrix: Matrix) -> str:
    """What the kernels call the form that a matrix is held in (kernels/task.py)."""
    words, tile = words_of(matrix.encoding), tile_of(matrix.encoding)
    quantised = matrix.nbytes < 2 * matrix.rows * matrix.columns
    if not quantised:
        return "half"
    return words if words == "nvfp4" else "fp8" if tile is None else "fp8_blocks"


class _Rank:
    """Matrices of one rank of a configuration, by name."""

    def __init__(self, config: ModelConfig, encodings: Mapping[str, str], tp: int) -> None:
        self.config, self.encodings, self.tp = config, encodings, tp
        self.specs = inventory(config)

    def shape(self, spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, int] | None]:
        """Rank 0's shape (all ranks have the same) and the extents of a tile scale, if there are any."""
        split, shape, tile = split_of(spec, self.config, self.tp), list(spec.shape), tile_of(self.encodings[spec.name])
        if split.axis is not None:
            if tile is not None:
                finer, _ = tile_ranges(tile[split.axis], shape[split.axis], split.ranges[0])
                tile = (finer, tile[1]) if split.axis == 0 else (tile[0], finer)
            shape[split.axis] = sum(stop - start for start, stop in split.ranges[0])
        return tuple(shape), tile

    def matrix(self, name: str) -> Matrix:
        (rows, columns), tile = self.shape(self.specs[name])
        encoding = self.encodings[name]
        return Matrix(name, rows, columns, encoding, device_bytes(encoding, rows, columns, tile))

    def vectors(self, prefix: str, names: tuple[str, ...]) -> int:
        """Bytes of small weights, which the runtime holds in float32."""
        total = 0
        for name in names:
            shape, _ = self.shape(self.specs[f"{prefix}.{name}"])
            count = 4
            for extent in shape:
                count *= extent
            total += count
        return total

    def layer(self, prefix: str, kind: str) -> Layer:
        inputs: tuple[str, ...]
        small: tuple[str, ...]
        if kind == FULL:
            mixer, inputs, output = "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"
            small = ("q_norm.weight", "k_norm.weight")
        else:
            mixer, inputs, output = "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"
            small = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        gate, up, down = (self.matrix(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        return Layer(
            prefix,
            kind,
            tuple(self.matrix(f"{prefix}.{mixer}.{name}.weight") for name in inputs),
            self.matrix(f"{prefix}.{mixer}.{output}.weight"),
            self.vectors(f"{prefix}.{mixer}", small),
            gate,
            up,
            down,
        )

    def head(self) -> tuple[Matrix, bool]:
        """The head's rows on this rank. A tied one is cut where its rows can be shared out (engine/weights.py)."""
        if not self.config.tie_word_embeddings:
            return self.matrix(HEAD), self.tp > 1
        rows, columns = self.specs[EMBED].shape
        cut = self.tp > 1 and rows % self.tp == 0
        share = rows // self.tp if cut else rows
        return Matrix(EMBED, share, columns, self.encodings[EMBED], device_bytes("bf16", share, columns)), cut


def sheet_of(label: str, config: ModelConfig, encodings: Mapping[str, str], tp: int) -> Sheet:
    """One of `tp` ranks of a dense model whose weights have `encodings` (name -> encoding).

    Raises InputError for weights without an encoding, an encoding that no kernel reads, or a split that cannot be.
    """
    rank, text = _Rank(config, encodings, tp), config.text
    missing = [name for name, spec in rank.specs.items() if spec.group != "vision" and name not in encodings]
    if missing:
        raise InputError(f"{label}: {len(missing)} weights are missing: {', '.join(missing[:4])}.")
    embedding = PLAIN_BYTES.get(encodings[EMBED])
    if embedding is None:
        raise InputError(f"{label}: the embedding is {encodings[EMBED]}; it is read by rows, in 16 or 32 bits.")
    layers = [rank.layer(f"{LAYER}.{index}", kind) for index, kind in enumerate(text.layer_types)]
    head, head_cut = rank.head()
    mtp = Mtp(rank.matrix("mtp.fc.weight"), rank.layer("mtp.layers.0", FULL)) if config.mtp_layers else None
    draft = rank.matrix(DRAFT_HEAD) if text.draft_rows else None
    return Sheet(
        label, tp, text.hidden_size, _heads(config, tp), embedding * text.hidden_size, tuple(layers), head, head_cut,
        mtp, draft,
    )  # fmt: skip


def _heads(config: ModelConfig, tp: int) -> Heads:
    text = config.text
    return Heads(
        query=text.num_attention_heads // tp,
        kv=max(1, text.num_key_value_heads // tp),
        dim=text.head_dim,
        key=text.linear_num_key_heads // tp,
        value=text.linear_num_value_heads // tp,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        conv_width=text.linear_conv_kernel_dim,
    )


def norm_bytes(sheet: Sheet) -> int:
    """Bytes of one norm over the hidden state, float32."""
    return 4 * sheet.hidden
