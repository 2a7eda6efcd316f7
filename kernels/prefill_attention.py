"""Attention of a prompt's chunk, where products dominate.

On a V100, for which torch has no flash attention, a kernel of our own reads the pages as they stand. On newer cards the
cache is decoded to fp16 in a row, and torch's fused attention does the products. docs/kernels/attention.md has the figures.
"""

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import checks, reference
from .checks import check, check_dimensions, launch
from .kvcache import BLOCKS, DIM, PAGE, KVCache
from .norm import check_heads, output_gate, staged

SOURCE, OWN_SOURCE = "kvcache.cu", "attention_prefill.cu"
FIRST_WITH_FLASH = (8, 0)  # compute capability of torch's flash attention
_THREADS = 256
ROWS = {True: 64, False: 56}  # query rows (tokens x heads of a kv head) a block, by int8 or fp16


def gather(cache: KVCache, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys (as the cache has them, turned if int8) and values of the first `length` positions: fp16 [KV heads, length, 256].

    table int32 [pages], the pages of the sequence in order, on the cache's device. They lie in memory for all positions of
    `table`: pieces that grew from chunk to chunk would be of no use to the next, and the allocator keeps each.
    Raises InputError where the table is too short or does not fit, EnvironmentFault if the kernel cannot start.
    """
    device = cache.keys.device
    check_table(cache, table, length)
    room = torch.empty(2, cache.kv_heads * table.shape[0] * PAGE * DIM, dtype=torch.float16, device=device)
    keys, values = (part[: cache.kv_heads * length * DIM].view(cache.kv_heads, length, DIM) for part in room)
    launch(
        SOURCE,
        "gather_int8" if cache.is_int8 else "gather_fp16",
        (-(-length // PAGE), cache.kv_heads),
        _THREADS,
        (cache.keys, cache.key_scales, cache.values, cache.value_scales, cache.pages, table, length, keys, values),
        device,
    )
    return keys, values


def check_table(cache: KVCache, table: Tensor, length: int) -> None:
    """Refuse a table that does not fit or is too short for `length` positions (InputError)."""
    check_dimensions("table", table, 1, "[pages]")
    check("table", table, torch.int32, tuple(table.shape), cache.keys.device)
    if not 1 <= length <= table.shape[0] * PAGE:
        raise InputError(
            f"length is {length}: expected 1 to {table.shape[0] * PAGE}, what {table.shape[0]} pages hold."
        )


def torch_attends(capability: tuple[int, int]) -> bool:
    """Whether prompts' attention is torch's on a card, which wants keys and values in a row; else it is our own."""
    return capability >= FIRST_WITH_FLASH


def prefill_attention(
    query: Tensor,
    cache: KVCache,
    table: Tensor,
    start: int,
    *,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    own: bool | None = None,
) -> Tensor:
    """Causal attention of tokens start .. start + T - 1 of one sequence, whose keys and values are in the cache.

    query fp16 [T, Q heads, 256], turned as the cache's keys are; table int32 [pages]; gate float32 [T, Q heads, 256]
    whose heads may stand apart. Returns fp16 [T, Q heads * 256]. `own`: our kernel (True) or torch's (False); None chooses
    by card. With ours the bits of a token do not depend on T, with torch's they may. Raises as `gather`.
    """
    out = checked(query, cache, start, gate, out)
    if own is None:
        arch = int(checks.module_on(SOURCE, query.device).arch.partition("_")[2])
        own = not torch_attends(divmod(arch, 10))
    if own:
        return _own(query, cache, table, start, gate, out)
    tokens, heads, _ = query.shape
    keys, values = gather(cache, table, start + tokens)
    # Newer cards' fused kernel lets heads share keys; a V100's does not.
    shares = query.device.type == "cuda" and torch.cuda.get_device_capability(query.device)[0] >= 8
    if not shares:
        keys, values = (x.repeat_interleave(heads // cache.kv_heads, dim=0) for x in (keys, values))
    attended = _attend(query.transpose(0, 1)[None], keys[None], values[None], shares)[0].transpose(0, 1)
    if gate is None:
        return out.copy_(attended.flatten(1))
    return output_gate(attended.float().contiguous(), gate, out=out)


def flash_takes(query: Tensor, keys: Tensor, values: Tensor, shares: bool) -> bool:
    """Whether torch's fused kernel takes them; else all scores would stand in memory at once.

    It is asked without `is_causal`: to fewer rows than positions torch says no then, though the kernel takes them as meant.
    """
    params = torch.backends.cuda.SDPAParams(query, keys, values, None, 0.0, False, shares)
    return query.is_cuda and bool(torch.backends.cuda.can_use_flash_attention(params))


def _attend(query: Tensor, keys: Tensor, values: Tensor, shares: bool) -> Tensor:
    """[1, heads, T, 256] over [1, heads or KV heads, length, 256], whose last T positions are the rows' own.

    What torch calls `causal_lower_right`, whose module takes seconds to import, in every process.
    """
    tokens, length, scale = query.shape[2], keys.shape[2], DIM**-0.5
    if flash_takes(query, keys, values, shares):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, keys, values, 0.0, is_causal=True, return_debug_mask=False, scale=scale)[0]
    mask = torch.ones(tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=shares)


def _own(query: Tensor, cache: KVCache, table: Tensor, start: int, gate: Tensor | None, out: Tensor) -> Tensor:
    tokens, heads, _ = query.shape
    check_table(cache, table, start + tokens)
    rows, group = ROWS[cache.is_int8], heads // cache.kv_heads
    if group > rows:
        raise InputError(f"query is {list(query.shape)}: expected at most {rows} query heads a KV head.")
    block_tokens = rows // group
    strides = (0, 0) if gate is None else gate.stride()[:2]
    launch(
        OWN_SOURCE,
        "attention_prefill_int8" if cache.is_int8 else "attention_prefill_fp16",
        (cache.kv_heads, -(-tokens // block_tokens)),
        _THREADS,
        (
            *(query, cache.keys, cache.key_scales, cache.values, cache.value_scales, cache.pages, table, start, tokens),
            *(gate, *strides, out, heads, block_tokens, DIM**-0.5),
        ),
        query.device,
        own_shared_bytes(cache.is_int8),
    )
    return out


def own_shared_bytes(int8: bool) -> int:
    """Dynamic shared memory of a block of our kernel: queries, scores of two pages, weights, scales, two numbers a row."""
    rows = ROWS[int8]
    return rows * (2 * (DIM + 8) + 2 * 4 * (PAGE + 4) + 2 * (PAGE + 8) + 8) + 2 * BLOCKS * PAGE


def prefill_attention_reference(
    query: Tensor, cache: KVCache, table: Tensor, start: int, *, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """What `prefill_attention` computes, row by row in float32, in torch on any device."""
    out = checked(query, cache, start, gate, out)
    keys, values = cache.decoded()
    attended = reference.attend_block(query.float(), keys, values, table.long(), start)
    if gate is not None:
        attended = reference.output_gate(attended, gate)
    return out.copy_(staged(attended.flatten(1)))


def checked(query: Tensor, cache: KVCache, start: int, gate: Tensor | None, out: Tensor | None) -> Tensor:
    """The output of a call that fits, made if it is not given. Raises InputError for any other call."""
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
