"""config.json of the family as typed records; nothing about a size is hard-coded anywhere else.

Field names are Hugging Face's. Values that the engine cannot honour are refused here, with their numbers.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.directory import read_json
from ..checkpoint.errors import InputError
from ..checkpoint.manifest import Manifest

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
MODEL_TYPE = "qwen3_5"
FAMILY = "qwen3_5"
FULL, LINEAR = "full_attention", "linear_attention"
MAX_EXTENT = 1 << 24  # no dimension of a real model comes near: a larger one is a damaged or hostile file


class _Section:
    """A JSON object whose fields are taken out with their types checked."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise InputError(f"{where}: missing or not a JSON object.")
        self.value, self.where = value, where

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        found = self.value.get(key, default)
        if type(found) is not int or not least <= found <= MAX_EXTENT:
            raise InputError(f"{self.where}: {key} is {found!r}, expected a whole number from {least} to {MAX_EXTENT}.")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e12:
            raise InputError(f"{self.where}: {key} is {found!r}, expected a positive number.")
        return float(found)

    def boolean(self, key: str, default: bool) -> bool:
        found = self.value.get(key, default)
        if not isinstance(found, bool):
            raise InputError(f"{self.where}: {key} is {found!r}, expected true or false.")
        return found


@dataclass(frozen=True)
class TextConfig:
    """The language model. Extents in elements; `rope_theta` and `rms_norm_eps` as the file has them.

    `draft_rows`: rows of a draft head of reduced vocabulary, which the recipe adds; no config.json has it. 0: none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    draft_rows: int = 0

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Rows of q (and of k) in `in_proj_qkv`."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Rows of v in `in_proj_qkv`."""
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """A whole model of the family. `mtp_layers` is 0 or 1; `vision` None for a text-only checkpoint.

    `image_token`, `video_token`: the ids that stand for a part of a picture, and of a video's frames, in a prompt; None
    where the configuration names none.
    """

    text: TextConfig
    vision: VisionConfig | None
    mtp_layers: int
    tie_word_embeddings: bool
    image_token: int | None = None
    video_token: int | None = None

    @staticmethod
    def read(directory: Path) -> "ModelConfig":
        """Parse `directory`/config.json. Raises InputError."""
        path = directory / "config.json"
        return ModelConfig.from_dict(read_json(path), str(path))

    @staticmethod
    def of_stage(config: Any, manifest: Manifest, where: str) -> "ModelConfig":
        """The model that a converted or rank directory holds: its config.json, and what the recipe added.

        Raises InputError for a draft head that makes no sense.
        """
        found = ModelConfig.from_dict(config, where)
        rows = manifest.recipe.get("draft_head", 0)
        if type(rows) is not int or not 0 <= rows <= found.text.vocab_size:
            raise InputError(f"{where}: the recipe's draft_head is {rows!r}, expected up to {found.text.vocab_size}.")
        return found.with_draft_head(rows)

    def with_draft_head(self, rows: int) -> "ModelConfig":
        """The same model with a draft head of so many rows."""
        return replace(self, text=replace(self.text, draft_rows=rows))

    @staticmethod
    def from_dict(config: Any, where: str = "config.json") -> "ModelConfig":
        """Parse a configuration. Raises InputError for another architecture or values that make no sense."""
        top = _Section(config, where)
        names, model_type = top.value.get("architectures"), top.value.get("model_type")
        if names is not None and not isinstance(names, list):
            raise InputError(f"{where}: architectures is {names!r}, expected a list of names.")
        if model_type != MODEL_TYPE or (names and ARCHITECTURE not in names):
            raise InputError(
                f"{where}: architecture {names or 'unnamed'} (model_type {model_type!r}) is not supported; "
                f"duovolt converts {ARCHITECTURE} ({MODEL_TYPE}): the dense Qwen3.5, 3.6 and 3.8 models."
            )
        text_section = _Section(top.value.get("text_config"), f"{where}: text_config")
        text = _text(text_section)
        vision = _vision(top, text)
        # In a vision+text model text_config decides: the top-level value is a library default that is often wrong.
        tied = text_section.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", False))
        mtp = text_section.integer("mtp_num_hidden_layers", 0, least=0)
        if mtp > 1:
            raise InputError(f"{where}: mtp_num_hidden_layers is {mtp}; the family has one MTP layer.")
        if text_section.boolean("mtp_use_dedicated_embeddings", False):
            raise InputError(f"{where}: mtp_use_dedicated_embeddings is true; the family shares the main embedding.")
        if not text_section.boolean("attn_output_gate", True):
            raise InputError(f"{where}: attn_output_gate is false; the family's attention is gated.")
        image, video = (
            None if top.value.get(name) is None else top.integer(name, least=0)
            for name in ("image_token_id", "video_token_id")
        )
        return ModelConfig(text, vision, mtp, tied, image, video)


def without_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration without an MTP layer: what a checkpoint is whose exporter dropped it."""
    return config | {"text_config": config["text_config"] | {"mtp_num_hidden_layers": 0}}


def _text(section: _Section) -> TextConfig:
    where = section.where
    layers = section.integer("num_hidden_layers")
    if layers > 4096:
        raise InputError(f"{where}: num_hidden_layers is {layers}; at most 4096 are read.")
    types = section.value.get("layer_types")
    if types is None:
        interval = section.integer("full_attention_interval", 4)
        types = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, LINEAR}:
        raise InputError(f"{where}: layer_types must name {layers} layers, each {FULL} or {LINEAR}.")
    rope = _Section(section.value.get("rope_parameters"), f"{where}: rope_parameters")
    mrope = rope.value.get("mrope_section", [11, 11, 10])
    text = TextConfig(
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_hidden_layers=layers,
        vocab_size=section.integer("vocab_size"),
        num_attention_heads=section.integer("num_attention_heads"),
        num_key_value_heads=section.integer("num_key_value_heads"),
        head_dim=section.integer("head_dim"),
        layer_types=tuple(types),
        linear_num_key_heads=section.integer("linear_num_key_heads"),
        linear_num_value_heads=section.integer("linear_num_value_heads"),
        linear_key_head_dim=section.integer("linear_key_head_dim"),
        linear_value_head_dim=section.integer("linear_value_head_dim"),
        linear_conv_kernel_dim=section.integer("linear_conv_kernel_dim"),
        rope_theta=rope.number("rope_theta"),
        partial_rotary_factor=rope.number("partial_rotary_factor", section.value.get("partial_rotary_factor", 0.25)),
        mrope_section=tuple(mrope) if isinstance(mrope, list) else (),
        rms_norm_eps=section.number("rms_norm_eps"),
        max_position_embeddings=section.integer("max_position_embeddings"),
    )
    if text.num_attention_heads % text.num_key_value_heads:
        raise InputError(
            f"{where}: {text.num_attention_heads} attention heads are no multiple of {text.num_key_value_heads} kv heads."
        )
    if text.linear_num_value_heads % text.linear_num_key_heads:
        raise InputError(
            f"{where}: {text.linear_num_value_heads} linear value heads are no multiple of "
            f"{text.linear_num_key_heads} key heads."
        )
    if len(text.mrope_section) != 3 or not all(type(n) is int and n >= 0 for n in text.mrope_section):
        raise InputError(f"{where}: mrope_section is {mrope!r}, expected three whole numbers.")
    if (
        text.rotary_dim % 2
        or not 0 < text.rotary_dim <= text.head_dim
        or sum(text.mrope_section) != text.rotary_dim // 2
    ):
        raise InputError(
            f"{where}: mrope_section {list(text.mrope_section)} must add up to half of the {text.rotary_dim} rotary "
            f"dimensions of a head of {text.head_dim}."
        )
    return text


def _vision(top: _Section, text: TextConfig) -> VisionConfig | None:
    if top.value.get("vision_config") is None:
        return None
    section = _Section(top.value["vision_config"], f"{top.where}: vision_config")
    vision = VisionConfig(
        depth=section.integer("depth"),
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_heads=section.integer("num_heads"),
        out_hidden_size=section.integer("out_hidden_size"),
        in_channels=section.integer("in_channels", 3),
        patch_size=section.integer("patch_size"),
        temporal_patch_size=section.integer("temporal_patch_size"),
        spatial_merge_size=section.integer("spatial_merge_size"),
        num_position_embeddings=section.integer("num_position_embeddings"),
    )
    if vision.depth > 4096:
        raise InputError(f"{section.where}: depth is {vision.depth}; at most 4096 are read.")
    if vision.out_hidden_size != text.hidden_size:
        raise InputError(
            f"{section.where}: out_hidden_size {vision.out_hidden_size} is not the text's hidden size {text.hidden_size}."
        )
    return vision
