"""From the attention projection to queries and cache, on a GPU, in one kernel.

Norm of queries and keys, partial rotary embedding with interleaved position axes, staging of queries to fp16, and the
write of keys and values into the paged cache. Same bits for every T. docs/kernels/elementwise.md.
"""

import torch
from torch import Tensor

from . import reference
from .checks import check, check_dimensions, check_rows, launch
from .kvcache import DIM, PAGE, KVCache, hadamard
from .norm import LARGEST, staged

SOURCE = "rope.cu"
_FEW = 64  # tokens
_FEW_THREADS = 96  # two warps for a head, one for its angles
_THREADS = 128
_HEADS = 2  # a warp, where there are many tokens
_RUN = 16  # positions whose values a block takes
PAIRS = 32  # pairs (j, j + 32) turn, of the family's 256 dimensions


def qkv_rope(
    projection: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    tables: tuple[Tensor, Tensor],
    axes: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: KVCache,
    eps: float,
    *,
    out: Tensor | None = None,
    overflows: Tensor | None = None,
) -> Tensor:
    """Queries fp16 [T, Q heads, 256] for attention over `cache`, into which keys and values are written.

    projection    float32 [T, (2 Q heads + 2 KV heads) * 256]: [query | gate] a head, keys, values; rows may stand apart
    *_weight      float32 [256], zero-centred norm
    tables        cosines and sines, float32 [positions, 32] (`reference.rope_table`)
    axes          int32 [32], the axis of each pair (`reference.mrope_axes`)
    positions     int32 [3, T]; one outside of the tables gives NaN
    slots         int32 [T], page * 64 + offset; outside of the pool (-1): key and value are dropped
    overflows     int32 [T], gains the number of elements that fp16 cannot hold and that became +-65504

    Where launches overlap, the launch before must have waited before it admitted this one, as products do: tables, positions and
    slots are read before it has ended.

    Raises InputError where shapes, dtypes, strides or devices do not fit, EnvironmentFault if the kernel cannot start.
    """
    out, stride = _checked(projection, query_weight, key_weight, tables, axes, positions, slots, cache, out, overflows)
    tokens, q_heads, _ = out.shape
    arguments = (
        *(projection, stride, query_weight, key_weight, *tables, tables[0].shape[0], positions, axes, slots),
        *(cache.keys, cache.key_scales, cache.values, cache.value_scales, cache.pages),
        *(out, overflows, q_heads, cache.kv_heads, float(eps)),
    )
    cached = "int8" if cache.is_int8 else "fp16"
    if tokens <= _FEW:  # a head a block
        heads = q_heads + 2 * cache.kv_heads
        launch(SOURCE, f"qkv_rope_{cached}", (tokens, heads), _FEW_THREADS, arguments, projection.device, overlap=True)
        return out
    # And a block for every run of positions of a head's values.
    runs = (tokens + 2 * _RUN - 2) // _RUN * cache.kv_heads
    parts = -(-(q_heads + cache.kv_heads) * 32 // (_THREADS * _HEADS))
    name = f"qkv_rope_many_{cached}"
    launch(SOURCE, name, (runs + tokens, parts), _THREADS, (*arguments, tokens), projection.device, overlap=True)
    return out


def qkv_rope_reference(
    projection: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    tables: tuple[Tensor, Tensor],
    axes: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: KVCache,
    eps: float,
    *,
    out: Tensor | None = None,
    overflows: Tensor | None = None,
) -> Tensor:
    """What `qkv_rope` computes, in torch on any device."""
    out, _ = _checked(projection, query_weight, key_weight, tables, axes, positions, slots, cache, out, overflows)
    tokens, q_heads, _ = out.shape
    kv = cache.kv_heads * DIM
    query_gate, key, value = projection.split([2 * q_heads * DIM, kv, kv], dim=-1)
    angles = reference.rope_angles(positions.long(), axes.long(), tables)
    query = query_gate.reshape(tokens, q_heads, 2 * DIM)[..., :DIM]
    query = reference.apply_rope(reference.rms_norm(query, query_weight, eps), *angles)
    key = reference.apply_rope(reference.rms_norm(key.reshape(tokens, -1, DIM), key_weight, eps), *angles)
    if cache.is_int8:
        query, key = hadamard(query), hadamard(key)
    key = staged(key, overflows).float() if not cache.is_int8 else _clamped(key, overflows)
    value = _clamped(value.reshape(tokens, -1, DIM), overflows)
    kept = (slots >= 0) & (slots < cache.pages * PAGE)
    cache.store(slots[kept].long(), key[kept], value[kept])
    return out.copy_(staged(query, overflows))


def _clamped(x: Tensor, overflows: Tensor | None) -> Tensor:
    staged(x, overflows)  # counts
    return x.clamp(-LARGEST, LARGEST)


def _checked(
    projection: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    tables: tuple[Tensor, Tensor],
    axes: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: KVCache,
    out: Tensor | None,
    overflows: Tensor | None,
) -> tuple[Tensor, int]:
    device = cache.keys.device
    check_dimensions("projection", projection, 2, "[T, (2 Q heads + 2 KV heads) * 256]")
    tokens, columns = projection.shape
    q_heads = max(1, (columns // DIM - 2 * cache.kv_heads) // 2)
    width = 2 * (q_heads + cache.kv_heads) * DIM
    stride = check_rows("projection", projection, torch.float32, (tokens, width), device)
    check("query_weight", query_weight, torch.float32, (DIM,), device)
    check("key_weight", key_weight, torch.float32, (DIM,), device)
    check_dimensions("cosines", tables[0], 2, f"[positions, {PAIRS}]")
    for name, table in zip(("cosines", "sines"), tables, strict=True):
        check(name, table, torch.float32, (tables[0].shape[0], PAIRS), device)
    check("axes", axes, torch.int32, (PAIRS,), device)
    check("positions", positions, torch.int32, (3, tokens), device)
    check("slots", slots, torch.int32, (tokens,), device)
    if out is None:
        out = torch.empty(tokens, q_heads, DIM, dtype=torch.float16, device=device)
    check("out", out, torch.float16, (tokens, q_heads, DIM), device)
    if overflows is not None:
        check("overflows", overflows, torch.int32, (tokens,), device)
    return out, stride
