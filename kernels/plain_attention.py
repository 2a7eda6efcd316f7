"""Attention in the plain way, for a round's rows and for a prompt's chunk: what `--attention plain` runs.

One kernel, positions in order, sums in FP32, no tensor cores, no segments: independent of the fast ones, and slow. A token
has the same bits in a round and in a prompt, alone and among others. docs/kernels/attention.md.
"""

from torch import Tensor

from . import attention, prefill_attention
from .attention import Sequences
from .checks import launch
from .kvcache import DIM, KVCache

SOURCE = "attention_plain.cu"


def plain_attention(
    query: Tensor,
    cache: KVCache,
    sequences: Sequences,
    *,
    max_tokens: int,
    max_positions: int,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What `attention.decode_attention` computes, with its arguments and errors."""
    out = attention.checked(query, cache, sequences, max_tokens, max_positions, gate, out)
    _launch(query, cache, sequences.tables, sequences, 0, gate, out)
    return out


def plain_prefill_attention(
    query: Tensor, cache: KVCache, table: Tensor, start: int, *, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """What `prefill_attention.prefill_attention` computes, with its arguments and errors."""
    out = prefill_attention.checked(query, cache, start, gate, out)
    prefill_attention.check_table(cache, table, start + query.shape[0])
    _launch(query, cache, table[None], None, start, gate, out)
    return out


def _launch(
    query: Tensor,
    cache: KVCache,
    tables: Tensor,
    sequences: Sequences | None,
    start: int,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    """Rows of `sequences`, or of one sequence from `start` on."""
    rows, heads, _ = query.shape
    where: tuple[Tensor | int | None, ...] = (None, None, None, 1, start, None)
    if sequences is not None:
        where = (*(sequences.starts, sequences.counts, sequences.firsts), tables.shape[0], 0, sequences.positions)
    launch(
        SOURCE,
        "attention_plain_int8" if cache.is_int8 else "attention_plain_fp16",
        (rows, heads),
        DIM,
        (
            *(query, cache.keys, cache.key_scales, cache.values, cache.value_scales, cache.pages, cache.kv_heads),
            *(tables, tables.shape[1], *where),
            *(gate, *((0, 0) if gate is None else gate.stride()[:2]), out, DIM**-0.5),
        ),
        query.device,
    )
