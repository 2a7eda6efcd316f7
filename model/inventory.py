"""The closed inventory: every tensor of a model of the family, with its shape and its role.

Names are Hugging Face's. What a directory holds beyond this list, or lacks, is an error: nothing is skipped silently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..checkpoint.errors import InputError
from ..checkpoint.manifest import DRAFT_HEAD
from .config import FULL, ModelConfig, TextConfig, VisionConfig

Group = Literal["text", "mtp", "vision"]
LAYER = "model.language_model.layers"
EMBED = "model.language_model.embed_tokens.weight"
NORM = "model.language_model.norm.weight"
HEAD = "lm_head.weight"
DRAFT_IDS = "draft_head.ids"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `role` is its name within a layer (`mlp.up_proj`), `group` the part of the model it belongs to."""

    name: str
    shape: tuple[int, ...]
    role: str
    group: Group


def _mlp(text: TextConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = text.hidden_size, text.intermediate_size
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def _attention(text: TextConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim = text.hidden_size, text.head_dim
    yield "self_attn.q_proj.weight", (2 * text.num_attention_heads * dim, hidden)  # query and gate, interleaved by head
    yield "self_attn.k_proj.weight", (text.num_key_value_heads * dim, hidden)
    yield "self_attn.v_proj.weight", (text.num_key_value_heads * dim, hidden)
    yield "self_attn.o_proj.weight", (hidden, text.num_attention_heads * dim)
    yield "self_attn.q_norm.weight", (dim,)
    yield "self_attn.k_norm.weight", (dim,)


def _linear_attention(text: TextConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = text.hidden_size, text.linear_num_value_heads
    mixed = 2 * text.key_dim + text.value_dim
    yield "linear_attn.in_proj_qkv.weight", (mixed, hidden)
    yield "linear_attn.in_proj_z.weight", (text.value_dim, hidden)
    yield "linear_attn.in_proj_a.weight", (heads, hidden)
    yield "linear_attn.in_proj_b.weight", (heads, hidden)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.conv1d.weight", (mixed, 1, text.linear_conv_kernel_dim)
    yield "linear_attn.norm.weight", (text.linear_value_head_dim,)
    yield "linear_attn.out_proj.weight", (hidden, text.value_dim)


def _layer(text: TextConfig, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (text.hidden_size,)
    yield from _attention(text) if kind == FULL else _linear_attention(text)
    yield "post_attention_layernorm.weight", (text.hidden_size,)
    yield from _mlp(text)


def _vision(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield "patch_embed.proj.weight", (hidden, *patch)
    yield "patch_embed.proj.bias", (hidden,)
    yield "pos_embed.weight", (vision.num_position_embeddings, hidden)
    for index in range(vision.depth):
        for layer, shape in (
            ("norm1", (hidden,)),
            ("attn.qkv", (3 * hidden, hidden)),
            ("attn.proj", (hidden, hidden)),
            ("norm2", (hidden,)),
            ("mlp.linear_fc1", (inner, hidden)),
            ("mlp.linear_fc2", (hidden, inner)),
        ):
            yield f"blocks.{index}.{layer}.weight", shape
            yield f"blocks.{index}.{layer}.bias", shape[:1]
    merged = hidden * vision.spatial_merge_size**2
    for layer, shape in (
        ("norm", (hidden,)),
        ("linear_fc1", (merged, merged)),
        ("linear_fc2", (vision.out_hidden_size, merged)),
    ):
        yield f"merger.{layer}.weight", shape
        yield f"merger.{layer}.bias", shape[:1]


def _specs(config: ModelConfig) -> Iterator[TensorSpec]:
    text = config.text
    yield TensorSpec(EMBED, (text.vocab_size, text.hidden_size), "embed_tokens", "text")
    for index, kind in enumerate(text.layer_types):
        for name, shape in _layer(text, kind):
            yield TensorSpec(f"{LAYER}.{index}.{name}", shape, name.removesuffix(".weight"), "text")
    yield TensorSpec(NORM, (text.hidden_size,), "norm", "text")
    if not config.tie_word_embeddings:
        yield TensorSpec(HEAD, (text.vocab_size, text.hidden_size), "lm_head", "text")
    if config.mtp_layers:
        yield TensorSpec("mtp.fc.weight", (text.hidden_size, 2 * text.hidden_size), "mtp.fc", "mtp")
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield TensorSpec(f"mtp.{name}.weight", (text.hidden_size,), f"mtp.{name}", "mtp")
        for name, shape in _layer(text, FULL):
            yield TensorSpec(f"mtp.layers.0.{name}", shape, name.removesuffix(".weight"), "mtp")
        yield TensorSpec("mtp.norm.weight", (text.hidden_size,), "mtp.norm", "mtp")
    if text.draft_rows:
        yield TensorSpec(DRAFT_HEAD, (text.draft_rows, text.hidden_size), "draft_head", "mtp")
        yield TensorSpec(DRAFT_IDS, (text.draft_rows,), "draft_head.ids", "mtp")
    if config.vision is not None:
        for name, shape in _vision(config.vision):
            yield TensorSpec(f"model.visual.{name}", shape, f"visual.{name}", "vision")


def inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """name -> spec of every tensor, in the order of the model: embedding, layers, norm, head, MTP, vision."""
    return {spec.name: spec for spec in _specs(config)}


def head_of(config: ModelConfig) -> str:
    """The weight whose rows give the logits: the embedding where it is tied to it."""
    return EMBED if config.tie_word_embeddings else HEAD


def check_closed(config: ModelConfig, present: dict[str, tuple[int, ...]], where: str) -> dict[str, TensorSpec]:
    """Compare the tensors a directory holds (name -> shape) with the inventory; the inventory, if they agree.

    Raises InputError that lists what is missing, unknown, and of another shape, all from headers alone.
    """
    wanted = inventory(config)
    fused = [name for name in present if name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight"))]
    if fused:
        raise InputError(
            f"{where}: {fused[0]!r} is Qwen3-Next's fused projection ({len(fused)} such tensors), whose rows are "
            "interleaved by key head; this family stores in_proj_qkv, in_proj_z, in_proj_a and in_proj_b apart."
        )
    missing = [name for name in wanted if name not in present]
    unknown = [name for name in present if name not in wanted]
    wrong = [
        f"{name} is {list(present[name])}, expected {list(spec.shape)}"
        for name, spec in wanted.items()
        if name in present and present[name] != spec.shape
    ]
    if not (missing or unknown or wrong):
        return wanted
    matched = sum(name in present for name in wanted)
    lines = [f"{where}: {matched} of {len(wanted)} tensors of the family matched"]
    for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", wrong)):
        if names:
            lines.append(f"{len(names)} {what}: {'; '.join(names[:4])}{'; ...' if len(names) > 4 else ''}")
    raise InputError(". ".join(lines) + ". Is this a complete checkpoint of the family?")
