"""Decode attention over the paged cache on a GPU: 1 to 8 query tokens of each of 1 to 4 sequences.

Positions are cut into segments at fixed places, a block each, and merged in order: the bits of a token depend on its
query and its context alone, not on the other tokens, the other sequences, or `max_positions`.
docs/kernels/attention.md has the layout and the tiling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import checks, reference
from .checks import check, check_dimensions, launch
from .kvcache import BLOCK, DIM, PAGE, KVCache
from .norm import check_heads, staged

SOURCE = "attention.cu"
MAX_TOKENS = 8
MAX_SEQUENCES = 4
TIERS = ((0, 128), (8192, 256), (32768, 512), (65536, 1024))  # from this position on, segments of this length
MAX_SEGMENTS = 2560
_MERGE_THREADS = 512
_TILE_ROWS = 8  # query rows of a tensor-core product
_ROW_BYTES = 2 * (DIM + 8)  # of shared memory: queries, and on sm_70 the weights of two pages
_WEIGHT_BYTES = 2 * (PAGE + 8) + 4 * 4 + 4 * 4  # of a row on newer cards: a page's weights, four peaks, four offsets
_MAX_TILES = 5


def segments_for(positions: int) -> int:
    """Segments that the first `positions` positions touch."""
    count = 0
    for (begin, length), (end, _) in zip(TIERS, (*TIERS[1:], (positions, 0)), strict=True):
        count += max(0, -(-(min(end, positions) - begin) // length))
    return count


@dataclass(frozen=True)
class Sequences:
    """Where the query tokens of a batch belong; all int32, on the device, so that a captured graph can be replayed.

    tables     [S, pages a sequence], the pages of each sequence in the order of its tokens
    starts     [S], position of each sequence's first query token
    counts     [S], its query tokens, 1 .. 8 (0: none)
    firsts     [S], the row of its first token; its rows are together
    positions  [T], the position of each row, -1 where it is not used
    """

    tables: Tensor
    starts: Tensor
    counts: Tensor
    firsts: Tensor
    positions: Tensor

    @staticmethod
    def of(tables: Tensor, starts: list[int], counts: list[int]) -> "Sequences":
        """From host numbers, for rows that stand in the order of the sequences."""
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        positions = [start + token for start, count in zip(starts, counts, strict=True) for token in range(count)]
        parts = [torch.tensor(x, dtype=torch.int32, device=tables.device) for x in (starts, counts, firsts, positions)]
        return Sequences(tables, *parts)


def decode_attention(
    query: Tensor,
    cache: KVCache,
    sequences: Sequences,
    *,
    max_tokens: int,
    max_positions: int,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query token over its sequence's positions up to its own.

    query          fp16 [T, Q heads, 256], turned as the cache's keys are (`qkv_rope` makes both); scale 1/16
    max_tokens     at least every count of `sequences` (1 .. 8)
    max_positions  more than every position, at most what the tables hold
    gate           float32 [T, Q heads, 256] whose heads may stand apart: the result is multiplied by its sigmoid

    Returns fp16 [T, Q heads * 256]; rows of position -1 are left alone. Query head h reads KV head
    h // (Q heads / KV heads). Runs on torch's current stream without synchronising. Raises InputError where shapes,
    dtypes, strides, devices or bounds do not fit, EnvironmentFault if the kernel cannot be built or started.
    """
    out = checked(query, cache, sequences, max_tokens, max_positions, gate, out)
    tokens, q_heads, _ = query.shape
    group = q_heads // cache.kv_heads
    passes, pass_tokens, tiles = _passes(max_tokens, group)
    segments = segments_for(max_positions)
    partial = torch.empty(tokens, q_heads, segments, DIM, dtype=torch.float16, device=query.device)
    stats = torch.empty(tokens, q_heads, segments, 2, dtype=torch.float32, device=query.device)
    kind = "int8" if cache.is_int8 else "fp16"
    arch = int(checks.module_on(SOURCE, query.device).arch.partition("_")[2])
    launch(
        SOURCE,
        f"attention_{kind}_{tiles}",
        (cache.kv_heads, sequences.starts.shape[0] * passes, segments),
        threads(arch),
        (
            *(query, cache.keys, cache.key_scales, cache.values, cache.value_scales, cache.pages),
            *(sequences.tables, sequences.tables.shape[1], sequences.starts, sequences.counts, sequences.firsts),
            *(partial, stats, q_heads, passes, pass_tokens, DIM**-0.5),
        ),
        query.device,
        shared_bytes(tiles, arch, int8=cache.is_int8),
        overlap=True,
    )
    strides = (0, 0) if gate is None else gate.stride()[:2]
    launch(
        SOURCE,
        "attention_merge",
        (4, q_heads, tokens),
        _MERGE_THREADS,
        (partial, stats, segments, sequences.positions, gate, *strides, out),
        query.device,
        overlap=True,
    )
    return out


def decode_attention_reference(
    query: Tensor,
    cache: KVCache,
    sequences: Sequences,
    *,
    max_tokens: int,
    max_positions: int,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What `decode_attention` computes, in torch on any device; reads the sequences' numbers on the host."""
    out = checked(query, cache, sequences, max_tokens, max_positions, gate, out)
    keys, values = cache.decoded()
    starts, counts, firsts = (x.tolist() for x in (sequences.starts, sequences.counts, sequences.firsts))
    for index, (start, count, first) in enumerate(zip(starts, counts, firsts, strict=True)):
        rows = slice(first, first + count)
        pages = sequences.tables[index].long()
        attended = reference.attend_rows(query[rows].float(), keys, values, pages, start)
        if gate is not None:
            attended = reference.output_gate(attended, gate[rows])
        out[rows] = staged(attended.flatten(1))
    return out


def threads(arch: int) -> int:
    """Of a block of the kernel as compiled for sm_`arch`."""
    return 256 if arch < 80 else 128


def shared_bytes(tiles: int, arch: int, *, int8: bool) -> int:
    """Dynamic shared memory of a block with so many tiles of rows, as compiled for sm_`arch`; newer than sm_70: with a page."""
    rows = tiles * _TILE_ROWS
    if arch < 80:
        return 3 * rows * _ROW_BYTES
    page = PAGE * (2 * DIM * (1 if int8 else 2) + 3 * 2 * DIM // BLOCK)  # scales of keys, and of values in two orders
    return page + rows * (_ROW_BYTES + _WEIGHT_BYTES)


def _passes(max_tokens: int, group: int) -> tuple[int, int, int]:
    """How often a page is read, with how many tokens at a time, as how many tiles of query rows."""
    fit = _MAX_TILES * _TILE_ROWS // group
    passes = -(-max_tokens // fit)
    pass_tokens = -(-max_tokens // passes)
    return passes, pass_tokens, -(-pass_tokens * group // _TILE_ROWS)


def checked(
    query: Tensor,
    cache: KVCache,
    sequences: Sequences,
    max_tokens: int,
    max_positions: int,
    gate: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """The output of a call that fits, made if it is not given. Raises InputError for any other call."""
    device = cache.keys.device
    check_dimensions("query", query, 3, f"[T, Q heads, {DIM}]")
    tokens, q_heads, _ = query.shape
    check("query", query, torch.float16, (tokens, q_heads, DIM), device)
    if q_heads % cache.kv_heads or q_heads // cache.kv_heads > _MAX_TILES * _TILE_ROWS:
        raise InputError(
            f"query is {list(query.shape)}: expected a multiple of the {cache.kv_heads} KV heads, at most "
            f"{_MAX_TILES * _TILE_ROWS} query heads each."
        )
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise InputError(f"max_tokens is {max_tokens}: expected 1 to {MAX_TOKENS} query tokens a sequence.")
    check_dimensions("tables", sequences.tables, 2, "[S, pages a sequence]")
    count, pages = sequences.tables.shape
    if count > MAX_SEQUENCES:
        raise InputError(f"tables is {[count, pages]}: expected at most {MAX_SEQUENCES} sequences.")
    check("tables", sequences.tables, torch.int32, (count, pages), device)
    for name in ("starts", "counts", "firsts"):
        check(name, getattr(sequences, name), torch.int32, (count,), device)
    check("positions", sequences.positions, torch.int32, (tokens,), device)
    if not 1 <= max_positions <= pages * PAGE or segments_for(max_positions) > MAX_SEGMENTS:
        raise InputError(
            f"max_positions is {max_positions}: expected 1 to {pages * PAGE}, what tables of {pages} pages hold, and at "
            f"most {MAX_SEGMENTS} segments."
        )
    if gate is not None:
        check_heads("gate", gate, (tokens, q_heads, DIM), device)
    if out is None:
        out = torch.empty(tokens, q_heads * DIM, dtype=torch.float16, device=device)
    check("out", out, torch.float16, (tokens, q_heads * DIM), device)
    return out
