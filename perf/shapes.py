"""Configurations whose tensors `synth` makes: the 27B, a 9B, the bundled tiny model, a narrow one, or a config.json."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from ..checkpoint.directory import read_json
from ..checkpoint.errors import InputError
from ..checkpoint.sources import without_quantisation
from ..model.config import FULL, LINEAR, ModelConfig

# config.json of Qwen3.5-27B, Qwen3.6-27B and Qwen3.8-27B, which share every extent.
QWEN_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "image_token_id": 248056, "video_token_id": 248057,
    "text_config": {
        "model_type": "qwen3_5_text", "dtype": "bfloat16", "attn_output_gate": True,
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "vocab_size": 248320,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_5_vision", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 5120, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
    },
}  # fmt: skip

# The same structure and depth, about a twentieth as wide, for one, two or four ranks.
NARROW_TEXT: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 832, "vocab_size": 4096, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 12,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "rope_parameters": QWEN_27B["text_config"]["rope_parameters"] | {"mrope_section": [2, 1, 1]},
}  # fmt: skip
NARROW_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 224, "num_heads": 2, "out_hidden_size": 256,
    "num_position_embeddings": 64,
}  # fmt: skip

# A dense model of about 9 billion parameters, in the proportions of the family's smaller ones: another shape to measure.
DENSE_9B_TEXT: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip


def _dense_9b() -> dict[str, Any]:
    text = QWEN_27B["text_config"] | DENSE_9B_TEXT
    return QWEN_27B | {"text_config": text, "vision_config": None}


def _narrow() -> dict[str, Any]:
    return QWEN_27B | {
        "text_config": QWEN_27B["text_config"] | NARROW_TEXT,
        "vision_config": QWEN_27B["vision_config"] | NARROW_VISION,
    }


def _tiny() -> dict[str, Any]:
    found = json.loads((resources.files("duovolt.tiny") / "checkpoint" / "config.json").read_text())
    return dict(found)


NAMED = {"qwen3.8-27b": lambda: QWEN_27B, "dense-9b": _dense_9b, "tiny": _tiny, "narrow": _narrow}


def configuration(name_or_file: str, layers: int | None = None) -> dict[str, Any]:
    """A config.json as a JSON value, by name or file, without what it says of quantisation.

    `layers` shortens the model: the first so many layers, so that every fourth keeps full attention. Raises InputError
    for an unknown name, a file that is no configuration of the family, or more layers than the model has.
    """
    if name_or_file in NAMED:
        found = NAMED[name_or_file]()
    elif Path(name_or_file).suffix == ".json":
        found = read_json(Path(name_or_file))
    else:
        raise InputError(
            f"--config {name_or_file!r}: neither a known name ({', '.join(NAMED)}) nor a .json file. "
            "Name a model, or give its config.json."
        )
    config = ModelConfig.from_dict(found, name_or_file)
    found = without_quantisation(found)
    types = list(config.text.layer_types)
    if layers is not None and not 1 <= layers <= len(types):
        raise InputError(f"--layers {layers}: {name_or_file} has {len(types)}; give 1 to {len(types)}.")
    types = types[:layers]
    assert set(types) <= {FULL, LINEAR}
    return found | {"text_config": found["text_config"] | {"num_hidden_layers": len(types), "layer_types": types}}
