"""A synthetic source of the family for benchmarks: the 27B's matrices, as many layers as fill the wanted size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.encodings.plain import to_bf16
from ..checkpoint.files import plan_files
from ..checkpoint.stage import StageDirectory, disk_errors, require_space
from ..checkpoint.writer import Planned, ShardWriter
from ..model.config import ModelConfig
from ..model.inventory import inventory

SHARD_BYTES = 1 << 30
_VALUES = 8 << 20  # random values drawn; every tensor takes them from another place on


def configuration(layers: int) -> dict[str, Any]:
    """A config.json with the 27B's layer sizes, a small vocabulary, one MTP layer and no vision tower."""
    text = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": layers, "vocab_size": 32768,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
        "full_attention_interval": min(4, layers), "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    }  # fmt: skip
    return {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": text}


def _tensors(layers: int) -> list[Planned]:
    config = ModelConfig.from_dict(configuration(layers))
    return [Planned(spec.name, "BF16", spec.shape) for spec in inventory(config).values()]


def layers_for(nbytes: int) -> int:
    """The number of layers, at least two (one of each kind), whose checkpoint comes nearest to `nbytes` from below."""
    layers = 2
    while sum(tensor.nbytes for tensor in _tensors(layers + 1)) <= nbytes:
        layers += 1
    return layers


def _words(values: np.ndarray, tensor: Planned, place: int) -> Iterator[np.ndarray]:
    left, at = tensor.nbytes // 2, place * 1_000_003 % len(values)
    while left:
        piece = values[at : at + left]
        yield piece
        left, at = left - len(piece), 0


def write_source(directory: Path, nbytes: int, seed: int = 0) -> int:
    """Write a source of about `nbytes` into a new directory; the bytes of its tensors.

    Raises InputError if the directory is not empty, EnvironmentFault if the disk is too small.
    """
    layers = layers_for(nbytes)
    tensors = _tensors(layers)
    total = sum(tensor.nbytes for tensor in tensors)
    require_space(directory, total)
    values = to_bf16(np.random.default_rng(seed).standard_normal(_VALUES, np.float32) * np.float32(0.02))
    with StageDirectory(directory, f"specimen {layers} {seed}") as stage, disk_errors(directory):
        files = plan_files([[tensor] for tensor in tensors], SHARD_BYTES)
        for file, contents in files:
            with stage.create(file) as handle:
                writer = ShardWriter(handle, contents, {"format": "pt"})
                for place, tensor in enumerate(contents):
                    for words in _words(values, tensor, place + len(stage.files)):
                        writer.write(words)
                record = writer.close()
            stage.finished(file, record)
        stage.put_index({tensor.name: file for file, contents in files for tensor in contents}, total)
        stage.put("config.json", json.dumps(configuration(layers), indent=1).encode())
        stage.finish()
    return total
