"""Attention of a prompt's chunk: the cache is decoded to fp16 in a row, and torch's fused attention does the products.

For a few tokens, `decode_attention` reads the cache as it stands; for hundreds, the products dominate, and the vendor's
kernels are the ones to beat. docs/kernels/attention.md says what this costs.
"""

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ..checkpoint.errors import InputError
from . import reference
from .checks import check, check_dimensions, launch
from .kvcache import DIM, PAGE, KVCache
from .norm import check_heads, output_gate, staged

SOURCE = "kvcache.cu"
_THREADS = 256


def gather(cache: KVCache, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys (as the cache has them, turned if int8) and values of the first `length` positions: fp16 [KV heads, length, 256].

    table int32 [pages], the pages of the sequence in order, on the cache's device. Raises InputError where it is too short
    or does not fit, EnvironmentFault if the kernel cannot start.
    """
    device = cache.keys.device
    check_dimensions("table", table, 1, "[pages]")
    check("table", table, torch.int32, tuple(table.shape), device)
    if not 1 <= length <= table.shape[0] * PAGE:
        raise InputError(
            f"length is {length}: expected 1 to {table.shape[0] * PAGE}, what {table.shape[0]} pages hold."
        )
    keys, values = (torch.empty(cache.kv_heads, length, DIM, dtype=torch.float16, device=device) for _ in range(2))
    launch(
        SOURCE,
        "gather_int8" if cache.is_int8 else "gather_fp16",
        (-(-length // PAGE), cache.kv_heads),
        _THREADS,
        (cache.keys, cache.key_scales, cache.values, cache.value_scales, cache.pages, table, length, keys, values),
        device,
    )
    return keys, values


def prefill_attention(
    query: Tensor, cache: KVCache, table: Tensor, start: int, *, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Causal attention of tokens start .. start + T - 1 of one sequence, whose keys and values are in the cache.

    query fp16 [T, Q heads, 256], turned as the cache's keys are; table int32 [pages]; gate float32 [T, Q heads, 256]
    whose heads may stand apart. Returns fp16 [T, Q heads * 256]. The bits of a token may depend on T. Raises as `gather`.
    """
    out = _checked(query, cache, start, gate, out)
    tokens, heads, _ = query.shape
    keys, values = gather(cache, table, start + tokens)
    # Newer cards' fused kernel lets heads share keys; a V100's does not.
    shares = query.device.type == "cuda" and torch.cuda.get_device_capability(query.device)[0] >= 8
    if not shares:
        keys, values = (x.repeat_interleave(heads // cache.kv_heads, dim=0) for x in (keys, values))
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=causal_lower_right(tokens, start + tokens),
        scale=DIM**-0.5,
        enable_gqa=shares,
    )[0].transpose(0, 1)
    if gate is None:
        return out.copy_(attended.flatten(1))
    return output_gate(attended.float().contiguous(), gate, out=out)


def prefill_attention_reference(
    query: Tensor, cache: KVCache, table: Tensor, start: int, *, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """What `prefill_attention` computes, row by row in float32, in torch on any device."""
    out = _checked(query, cache, start, gate, out)
    keys, values = cache.decoded()
    attended = reference.attend_block(query.float(), keys, values, table.long(), start)
    if gate is not None:
        attended = reference.output_gate(attended, gate)
    return out.copy_(staged(attended.flatten(1)))


def _checked(query: Tensor, cache: KVCache, start: int, gate: Tensor | None, out: Tensor | None) -> Tensor:
    device = cache.keys.device
    check_dimensions("query", query, 3, f"[T, Q heads, {DIM}]")
    tokens, heads, _ = query.shape
    check("query", query, torch.float16, (tokens, heads, DIM), device)
    if heads % cache.kv_heads:
        raise InputError(f"query is {list(query.shape)}: expected a multiple of the {cache.kv_heads} KV heads.")
    if start < 0:
        raise InputError(f"start is {start}: expected a position.")
    if gate is not None:
        check_heads("gate", gate, (tokens, heads, DIM), device)
    if out is None:
        out = torch.empty(tokens, heads * DIM, dtype=torch.float16, device=device)
    check("out", out, torch.float16, (tokens, heads * DIM), device)
    return out
