"""One rank's weights as float32 tensors, fused the way the model multiplies them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.errors import InputError
from ...checkpoint.manifest import DRAFT_HEAD
from ...model.config import FULL, ModelConfig, VisionConfig
from ...model.inventory import DRAFT_IDS, EMBED, HEAD, LAYER, NORM, inventory
from .sources import WeightSource
from .vision import Affine, VisionBlock, VisionWeights


@dataclass(frozen=True)
class Projection:
    """A product whose input is shared out over the ranks: its result is a sum over them if `summed`."""

    weight: Tensor
    summed: bool


@dataclass(frozen=True)
class AttentionWeights:
    """`inputs`: rows of query and gate (interleaved by head), then keys, then values; [.., hidden]."""

    inputs: Tensor
    query_norm: Tensor
    key_norm: Tensor
    output: Projection


@dataclass(frozen=True)
class DeltaWeights:
    """`inputs`: rows of q, k, v, then z, then b, then a; [.., hidden]. `conv` [channels, width]."""

    inputs: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    output: Projection


@dataclass(frozen=True)
class LayerWeights:
    """`index` counts the layers of the same kind; `gate_up`: rows of gate, then up."""

    index: int
    input_norm: Tensor
    mixer: AttentionWeights | DeltaWeights
    post_norm: Tensor
    gate_up: Tensor
    down: Projection


@dataclass(frozen=True)
class MtpWeights:
    """The draft layer: fc joins the normalised embedding (first half) and hidden state (second half)."""

    fc: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True)
class DraftHead:
    """Rows of the head for the most frequent tokens: `weight` [rows, hidden], and the token of each row, int64 [rows].

    On a rank that holds a share of the rows, both are that share.
    """

    weight: Tensor
    ids: Tensor
    cut: bool


@dataclass(frozen=True)
class Sizes:
    """Heads on this rank, and the extents of a head."""

    query_heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelWeights:
    """Everything of the model. `head_cut`: this rank's head is its share of the vocabulary."""

    config: ModelConfig
    tp_size: int
    tp_rank: int
    sizes: Sizes
    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    head_cut: bool
    mtp: MtpWeights | None
    draft_head: DraftHead | None = None
    vision: VisionWeights | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.config.text.layer_types


class _Taker:
    """Hands out every weight exactly once, with its shape checked."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.left = set(inventory(source.config))

    def take(self, *names: str) -> Tensor:
        """float32 tensor of one weight, or of several stacked along their rows."""
        parts = []
        for name in names:
            if name not in self.left:
                raise InputError(f"{self.source.where}: weight {name!r} is asked for twice or is not the model's.")
            self.left.remove(name)
            values = self.source.read(name)
            if values.shape != self.source.shapes[name]:
                raise InputError(
                    f"{self.source.where}: weight {name!r} is {list(values.shape)}, rank {self.source.tp_rank} of "
                    f"{self.source.tp_size} should hold {list(self.source.shapes[name])}. Run `duovolt shard` again."
                )
            parts.append(torch.from_numpy(values))
        # cat copies into memory of torch's own alignment, so products do not depend on where numpy put the array.
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def projection(self, name: str) -> Projection:
        return Projection(self.take(name), name in self.source.summed)

    def layer(self, prefix: str, kind: str, index: int) -> LayerWeights:
        input_norm = self.take(f"{prefix}.input_layernorm.weight")
        mixer = self.attention(f"{prefix}.self_attn") if kind == FULL else self.delta(f"{prefix}.linear_attn")
        return LayerWeights(
            index=index,
            input_norm=input_norm,
            mixer=mixer,
            post_norm=self.take(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.take(f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"),
            down=self.projection(f"{prefix}.mlp.down_proj.weight"),
        )

    def attention(self, prefix: str) -> AttentionWeights:
        return AttentionWeights(
            inputs=self.take(*(f"{prefix}.{name}_proj.weight" for name in "qkv")),
            query_norm=self.take(f"{prefix}.q_norm.weight"),
            key_norm=self.take(f"{prefix}.k_norm.weight"),
            output=self.projection(f"{prefix}.o_proj.weight"),
        )

    def delta(self, prefix: str) -> DeltaWeights:
        return DeltaWeights(
            inputs=self.take(*(f"{prefix}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))),
            conv=self.take(f"{prefix}.conv1d.weight")[:, 0],
            a_log=self.take(f"{prefix}.A_log"),
            dt_bias=self.take(f"{prefix}.dt_bias"),
            norm=self.take(f"{prefix}.norm.weight"),
            output=self.projection(f"{prefix}.out_proj.weight"),
        )

    def mtp(self) -> MtpWeights:
        return MtpWeights(
            fc=self.take("mtp.fc.weight"),
            embedding_norm=self.take("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self.take("mtp.pre_fc_norm_hidden.weight"),
            layer=self.layer("mtp.layers.0", FULL, 0),
            norm=self.take("mtp.norm.weight"),
        )

    def affine(self, name: str) -> Affine:
        return Affine(self.take(f"{name}.weight"), self.take(f"{name}.bias"))

    def vision(self, config: VisionConfig) -> VisionWeights:
        prefix = "model.visual"
        patch = self.affine(f"{prefix}.patch_embed.proj")
        blocks = []
        for index in range(config.depth):
            names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
            blocks.append(VisionBlock(*(self.affine(f"{prefix}.blocks.{index}.{name}") for name in names)))
        return VisionWeights(
            config.num_heads,
            Affine(patch.plain.flatten(1), patch.bias),
            self.take(f"{prefix}.pos_embed.weight"),
            blocks,
            *(self.affine(f"{prefix}.merger.{name}") for name in ("norm", "linear_fc1", "linear_fc2")),
        )


def sizes_of(source: WeightSource) -> Sizes:
    """Heads on this rank, read off the shapes of its own matrices."""
    text, shapes = source.config.text, source.shapes

    def rows(suffix: str) -> int:
        return next((shape[0] for name, shape in shapes.items() if name.endswith(suffix)), 0)

    value_heads = rows("linear_attn.A_log")
    keys = rows("linear_attn.in_proj_qkv.weight") - value_heads * text.linear_value_head_dim
    return Sizes(
        query_heads=rows("self_attn.q_proj.weight") // (2 * text.head_dim),
        kv_heads=rows("self_attn.k_proj.weight") // text.head_dim,
        head_dim=text.head_dim,
        key_heads=keys // (2 * text.linear_key_head_dim),
        value_heads=value_heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        conv_width=text.linear_conv_kernel_dim,
    )


def _tied_head(embed: Tensor, source: WeightSource) -> tuple[Tensor, bool]:
    """This rank's rows of the shared embedding, or all of them where they cannot be shared out evenly."""
    rows, size = embed.shape[0], source.tp_size
    if size == 1 or rows % size:
        return embed, False
    share = rows // size
    return embed[source.tp_rank * share : (source.tp_rank + 1) * share], True


def load_weights(source: WeightSource) -> ModelWeights:
    """Read every weight exactly once, after its digest. Raises InputError naming a weight of a wrong shape or left over, and
    CheckFailed for a damaged one."""
    source.check()
    config, taker = source.config, _Taker(source)
    embed = taker.take(EMBED)
    counts = dict.fromkeys(config.text.layer_types, 0)
    layers = []
    for number, kind in enumerate(config.text.layer_types):
        layers.append(taker.layer(f"{LAYER}.{number}", kind, counts[kind]))
        counts[kind] += 1
    norm = taker.take(NORM)
    if config.tie_word_embeddings:
        head, head_cut = _tied_head(embed, source)
    else:
        head, head_cut = taker.take(HEAD), HEAD in source.cut and source.tp_size > 1
    mtp = taker.mtp() if config.mtp_layers else None
    draft = None
    if config.text.draft_rows:
        ids = taker.take(DRAFT_IDS).long()
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < config.text.vocab_size):
            raise InputError(f"{source.where}: {DRAFT_IDS} names tokens beyond the vocabulary. Run `duovolt verify`.")
        draft = DraftHead(taker.take(DRAFT_HEAD), ids, DRAFT_HEAD in source.cut and source.tp_size > 1)
    vision = None if config.vision is None else taker.vision(config.vision)
    if taker.left:
        raise InputError(f"{source.where}: no use for {len(taker.left)} weights: {', '.join(sorted(taker.left)[:4])}.")
    return ModelWeights(
        config,
        source.tp_size,
        source.tp_rank,
        sizes_of(source),
        embed,
        layers,
        norm,
        head,
        head_cut,
        mtp,
        draft,
        vision,
    )
