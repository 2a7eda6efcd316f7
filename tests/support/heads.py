"""The split written a second time, by reshaping into heads: the tests' oracle for the partition table and the splitter."""

from typing import Any

import numpy as np

from duovolt.model.config import TextConfig

# role -> (axis, heads of each section); widths follow from the extent
MIXED = "linear_attn.in_proj_qkv", "linear_attn.conv1d"
VALUE_ROWS = ("linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.A_log",
              "linear_attn.dt_bias")  # fmt: skip


def rank_part(role: str, whole: np.ndarray, text: TextConfig, tp: int, rank: int, group: str) -> np.ndarray:
    """A rank's part of any canonical stored tensor of a weight; `whole` itself if it is replicated.

    A tensor without an extent along the weight's axis (a scalar, a row scale cut along columns) is passed by the caller
    with `role=""`.
    """
    if group == "vision":
        return whole
    if role in MIXED:
        key = text.linear_num_key_heads * text.linear_key_head_dim
        value = text.linear_num_value_heads * text.linear_value_head_dim
        unit = (2 * key + value) // len(whole)
        q, k, v = whole[: key // unit], whole[key // unit : 2 * key // unit], whole[2 * key // unit :]
        return np.concatenate(
            [_heads(q, text.linear_num_key_heads, tp, rank), _heads(k, text.linear_num_key_heads, tp, rank),
             _heads(v, text.linear_num_value_heads, tp, rank)]
        )  # fmt: skip
    if role in VALUE_ROWS:
        return _heads(whole, text.linear_num_value_heads, tp, rank)
    if role == "self_attn.q_proj":
        return _heads(whole, text.num_attention_heads, tp, rank)
    if role in ("self_attn.k_proj", "self_attn.v_proj"):
        if tp > text.num_key_value_heads:
            return _heads(
                whole, text.num_key_value_heads, text.num_key_value_heads, rank * text.num_key_value_heads // tp
            )
        return _heads(whole, text.num_key_value_heads, tp, rank)
    if role in ("mlp.gate_proj", "mlp.up_proj", "lm_head"):
        return _heads(whole, tp, tp, rank)
    columns: dict[str, Any] = {
        "self_attn.o_proj": text.num_attention_heads, "linear_attn.out_proj": text.linear_num_value_heads,
        "mlp.down_proj": tp,
    }  # fmt: skip
    if role in columns:
        return np.ascontiguousarray(_heads(whole.T, columns[role], tp, rank).T)
    return whole


def _heads(array: np.ndarray, heads: int, tp: int, rank: int) -> np.ndarray:
    by_head = array.reshape(heads, len(array) // heads, *array.shape[1:])
    share = heads // tp
    mine = by_head[rank * share : (rank + 1) * share]
    return mine.reshape(-1, *array.shape[1:])
