"""Grouped-query attention over paged keys and values. A pool is [pages, PAGE, KV heads, D]; a page holds PAGE tokens."""

import torch
from torch import Tensor

from .activation import sigmoid

QUERY_BLOCK = 128  # rows of scores held at once in a prefill chunk


def write_kv(key_pool: Tensor, value_pool: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store keys and values [T, KV heads, D] at slots int64 [T] (page * PAGE + offset) of the pools, in place."""
    key_pool.flatten(0, 1).index_copy_(0, slots, keys)
    value_pool.flatten(0, 1).index_copy_(0, slots, values)


def _gather(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of the pages in order: [length, KV heads, D]; in place where the pages adjoin."""
    count = -(-length // pool.shape[1])
    first = int(pages[0])
    if int(pages[count - 1]) == first + count - 1 and bool((pages[1:count] > pages[: count - 1]).all()):
        used = pool[first : first + count]  # rising, and no wider than their number: nothing in between
    else:
        used = pool.index_select(0, pages[:count])
    return used.flatten(0, 1)[:length]


def attend_rows(query: Tensor, key_pool: Tensor, value_pool: Tensor, pages: Tensor, start: int) -> Tensor:
    """Causal attention of tokens start .. start + T - 1, whose keys are in the pool: query [T, Q heads, D] -> same.

    Each row is a product over exactly its own context, so its bits do not depend on T. Scale 1 / sqrt(D); query head h
    reads KV head h // (Q heads / KV heads).
    """
    count, heads, dim = query.shape
    keys = _gather(key_pool, pages, start + count)
    values = _gather(value_pool, pages, start + count)
    kv_heads = keys.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for index in range(count):
        length = start + index + 1
        row = query[index].clone(memory_format=torch.contiguous_format).view(kv_heads, heads // kv_heads, dim)
        scores = torch.bmm(row, keys[:length].permute(1, 2, 0)) * dim**-0.5
        weights = torch.softmax(scores, dim=-1)
        out[index] = torch.bmm(weights, values[:length].permute(1, 0, 2)).view(heads, dim)
    return out


def attend_block(query: Tensor, key_pool: Tensor, value_pool: Tensor, pages: Tensor, start: int) -> Tensor:
    """As attend_rows, in products over blocks of rows; the bits of a row may depend on T."""
    count, heads, dim = query.shape
    keys = _gather(key_pool, pages, start + count).permute(1, 2, 0)
    values = _gather(value_pool, pages, start + count).permute(1, 0, 2)
    kv_heads = keys.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    positions = torch.arange(start + count, device=query.device)
    for begin in range(0, count, QUERY_BLOCK):
        end = min(count, begin + QUERY_BLOCK)
        length = start + end
        rows = query[begin:end].view(end - begin, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = torch.matmul(rows, keys[:, None, :, :length]) * dim**-0.5
        hidden = positions[None, :length] > positions[start + begin : length, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[begin:end] = torch.matmul(weights, values[:, None, :length]).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def output_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """attended * sigmoid(gate), both of one shape."""
    return attended * sigmoid(gate)
