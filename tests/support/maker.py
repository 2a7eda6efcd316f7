"""Makes converted directories with chosen words, without the converter: any shape, encoding and layout.

`converted(path, config, words=...)` asks `words(weight, part, shape, dtype)` for the canonical words of every stored
part; `random_words` and the markers below are such functions.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from duovolt.checkpoint.container import ITEMSIZE, NUMPY_DTYPE
from duovolt.checkpoint.digest import digest_bytes, digest_json
from duovolt.checkpoint.encodings import PLAIN_ENCODINGS, encoding_parts, part_name
from duovolt.checkpoint.files import file_metadata, plan_files
from duovolt.checkpoint.layouts import layout_named, stored_form
from duovolt.checkpoint.manifest import FORMAT_VERSION, FileRecord, Manifest, SourceRecord, SourceRef, TensorRecord
from duovolt.checkpoint.stage import AtomicFile, StageDirectory
from duovolt.checkpoint.writer import Planned, ShardWriter
from duovolt.model.config import FAMILY, ModelConfig
from duovolt.model.inventory import TensorSpec, inventory

Words = Callable[[str, str, tuple[int, ...], str], np.ndarray]
Choice = Callable[[TensorSpec], str]


def config(**changes: Any) -> dict[str, Any]:
    """A small configuration: four layers, text, MTP and a vision tower; `changes` go into text_config."""
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "full_attention_interval": 4,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        "mtp_num_hidden_layers": 1,
    } | changes  # fmt: skip
    text["rope_parameters"] = dict(text["rope_parameters"], mrope_section=[text["head_dim"] // 8 - 2, 1, 1])
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": text["hidden_size"],
        "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 16,
    }  # fmt: skip
    return {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": text, "vision_config": vision}


def default_encoding(spec: TensorSpec) -> str:
    """What the default recipe gives: nvfp4 in the MLP, fp8 in the other projections, the rest BF16."""
    if spec.role.startswith("mlp.") and spec.group == "text":
        return "nvfp4"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "lm_head", "mtp.fc",
                   "gate_proj", "up_proj", "down_proj")  # fmt: skip
    return "fp8_e4m3" if spec.group != "vision" and spec.role.endswith(projections) else "bf16"


def _seed(*key: str) -> int:
    return zlib.crc32("/".join(key).encode())


def random_words(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Finite random words that depend on the name alone: no NaN code, no NaN scale, positive float32 scales."""
    rng = np.random.default_rng(_seed(weight, part))
    if dtype == "F32":
        return rng.uniform(0.001, 0.1, shape).astype(np.float32)
    if dtype == "BF16":
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    words = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where((words & 0x7F) == 0x7F, np.uint8(0), words) if dtype == "F8_E4M3" else words


def _marker(shape: tuple[int, ...], dtype: str, axis: int) -> np.ndarray:
    """Every word tells its position along `axis` (modulo 101 for bytes, so that no word is a NaN)."""
    extent = shape[axis] if axis < len(shape) else 1
    position = np.arange(extent).reshape(
        [-1 if i == axis else 1 for i in range(len(shape))] if axis < len(shape) else []
    )
    if dtype == "F32":
        return np.broadcast_to(1.0 + position, shape).astype(np.float32)
    small = position % 101 + 1 if ITEMSIZE[dtype] == 1 else position + 1
    return np.broadcast_to(small, shape).astype(NUMPY_DTYPE[dtype])


def row_marker(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Words that tell their row."""
    return _marker(shape, dtype, 0)


def column_marker(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Words that tell their column."""
    return _marker(shape, dtype, 1)


def stored_parts(spec: TensorSpec, encoding: str, family: str) -> list[tuple[str, str, str, tuple[int, ...], Planned]]:
    """(part, layout, dtype, canonical shape, stored form) of every tensor that stores a weight."""
    if encoding in PLAIN_ENCODINGS:
        dtype = PLAIN_ENCODINGS[encoding]
        return [("plain", "canonical", dtype, spec.shape, Planned(spec.name, dtype, spec.shape))]
    found = []
    for part in encoding_parts(encoding) or ():
        shape = part.shape(*spec.shape)
        layout, stored = stored_form(family, encoding, part.name, shape)
        found.append((part.name, layout, part.dtype, shape, Planned(part_name(spec.name, part), part.dtype, stored)))
    return found


SIDE_FILES = {"chat_template.jinja": b"{{ messages }}", "foo_config.json": b'{"unknown": true}'}


def _source_ref(
    words: Words, spec: TensorSpec, part: str, layout: str, dtype: str, shape: tuple[int, ...], stored: Planned
) -> SourceRef:
    """The source tensor that a stored part is made from: the same words, canonical, under the same name."""
    digest = digest_bytes(np.ascontiguousarray(words(spec.name, part, shape, dtype)).reshape(-1).view(np.uint8).data)
    return SourceRef(name=stored.name, dtype=dtype, shape=list(shape), digest=digest)


def converted(
    path: Path,
    config_json: dict[str, Any],
    *,
    words: Words = random_words,
    encoding: Choice = default_encoding,
    layout: str = "v100",
    max_shard_bytes: int = 1 << 30,
    note: str = "",
    source_files: dict[str, FileRecord] | None = None,
) -> Manifest:
    """Write a converted directory; `note` makes the conversion id another one. Returns its manifest.

    `source_files`: what it says of the shards it was made from; `quantised_source` returns them.
    """
    model = ModelConfig.from_dict(config_json)
    recipe = {"name": "made", "layout": layout, "max_shard_bytes": max_shard_bytes, "rules": [], "note": note}
    groups = [
        [(spec, *part) for part in stored_parts(spec, encoding(spec), layout)] for spec in inventory(model).values()
    ]
    parts = {item[-1].name: item for group in groups for item in group}
    files = plan_files([[item[-1] for item in group] for group in groups], max_shard_bytes)
    records: dict[str, TensorRecord] = {}
    sources = {name: _source_ref(words, *item) for name, item in parts.items()}
    side_files = {"config.json": json.dumps(config_json, indent=1).encode()} | SIDE_FILES
    identity = digest_json({
        "format_version": FORMAT_VERSION, "family": FAMILY, "recipe": recipe,
        "tensors": {ref.name: [ref.dtype, ref.shape, ref.digest] for ref in sources.values()},
        "side_files": {name: digest_bytes(content) for name, content in side_files.items()},
    })  # fmt: skip
    weights = {
        group: sum(spec.group == group for spec in inventory(model).values()) for group in ("text", "mtp", "vision")
    }
    with StageDirectory(path, f"made {identity}") as stage:
        for file, tensors in files:
            with stage.create(file) as handle:
                writer = ShardWriter(handle, tensors, file_metadata(identity))
                for tensor in tensors:
                    spec, part, layout_name, dtype, shape, _ = parts[tensor.name]
                    canonical = words(spec.name, part, shape, dtype)
                    tile = layout_named(layout_name)
                    writer.write(canonical if tile is None else tile.apply(canonical))
                record = writer.close()
            stage.finished(file, record)
            for tensor in tensors:
                spec, part, layout_name, dtype, shape, _ = parts[tensor.name]
                digest = writer.digests[tensor.name]
                records[tensor.name] = TensorRecord(
                    weight=spec.name, part=part, encoding=encoding(spec), layout=layout_name, dtype=dtype,
                    shape=list(tensor.shape), canonical_shape=list(shape), file=file, digest=digest,
                    sources=[sources[tensor.name]],
                )  # fmt: skip
        stage.put_index(
            {name: record.file for name, record in records.items()}, sum(p[-1].nbytes for p in parts.values())
        )
        for name, content in side_files.items():
            stage.put(name, content)
        return stage.seal(
            Manifest(
                format_version=FORMAT_VERSION,
                stage="converted",
                family=FAMILY,
                conversion_id=identity,
                recipe=recipe,
                tp_size=None,
                tp_rank=None,
                tensors=records,
                files=stage.files,
                source=SourceRecord(quantization_config=None, hf_quant_config=None, files=source_files or {}),
                provenance={"made": "by a test", "weights": weights},
            )
        )


def quantised_source(path: Path, config_json: dict[str, Any], words: Words = random_words) -> dict[str, FileRecord]:
    """The source that `converted` claims to come from: the same parts, canonical, under the same names; its shards."""
    specs = inventory(ModelConfig.from_dict(config_json)).values()
    parts = [(spec, *part) for spec in specs for part in stored_parts(spec, default_encoding(spec), "canonical")]
    tensors = [item[-1] for item in parts]
    path.mkdir()
    with AtomicFile(path / "model.safetensors") as handle:
        writer = ShardWriter(handle, tensors, {})
        for spec, part, _, dtype, shape, _ in parts:
            writer.write(words(spec.name, part, shape, dtype))
        record = writer.close()
    (path / "config.json").write_text(json.dumps(config_json, indent=1))
    for name, content in SIDE_FILES.items():
        (path / name).write_bytes(content)
    return {"model.safetensors": record}


def plain_source(path: Path, config_json: dict[str, Any], max_shard_bytes: int = 1 << 30) -> None:
    """A source of BF16 weights in several shards with an index, as a hub has it."""
    groups = [
        [Planned(spec.name, "BF16", spec.shape)] for spec in inventory(ModelConfig.from_dict(config_json)).values()
    ]
    files = plan_files(groups, max_shard_bytes)
    path.mkdir()
    for file, tensors in files:
        with AtomicFile(path / file) as handle:
            writer = ShardWriter(handle, tensors, {"format": "pt"})
            for tensor in tensors:
                writer.write(random_words(tensor.name, "plain", tensor.shape, "BF16"))
            writer.close()
    weight_map = {tensor.name: file for file, tensors in files for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config_json, indent=1))
    (path / "chat_template.jinja").write_text("{{ messages }}")


def plain_record(name: str, dtype: str, shape: tuple[int, ...]) -> TensorRecord:
    """The record of a tensor that is stored as it is."""
    return TensorRecord(
        weight=name, part="plain", encoding="bf16", layout="canonical", dtype=dtype, shape=list(shape),
        canonical_shape=list(shape), file="x", digest="0" * 32, sources=[],
    )  # fmt: skip
