"""Bytes a rank needs beside its weights, from the configuration alone."""

from ..checkpoint.errors import InputError
from .config import FULL, ModelConfig

KV_SCALE_DIMS = 64  # int8 KV carries one fp16 scale per token, kv head and 64 dimensions


def kv_bytes_per_token(config: ModelConfig, tp: int, kv: str) -> int:
    """Keys and values of one token on one rank, MTP layer included. `kv` is `int8` or `fp16`.

    Raises InputError for another name.
    """
    text = config.text
    heads = max(1, text.num_key_value_heads // tp)
    layers = text.layer_types.count(FULL) + config.mtp_layers
    if kv == "fp16":
        head = 2 * text.head_dim
    elif kv == "int8":
        head = text.head_dim + 2 * -(-text.head_dim // KV_SCALE_DIMS)
    else:
        raise InputError(f"KV form {kv!r}: int8 or fp16.")
    return layers * heads * 2 * head


def state_bytes(config: ModelConfig, tp: int) -> int:
    """Recurrent state (float32) and convolution history (16 bits) of one sequence on one rank."""
    text = config.text
    layers = len(text.layer_types) - text.layer_types.count(FULL)
    heads = text.linear_num_value_heads // tp
    delta = heads * text.linear_key_head_dim * text.linear_value_head_dim * 4
    history = (2 * text.key_dim + text.value_dim) // tp * (text.linear_conv_kernel_dim - 1) * 2
    return layers * (delta + history)
