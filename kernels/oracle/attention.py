"""Causal grouped-query attention over contiguous keys and values."""

import numpy as np
from numpy.typing import NDArray


def attention(query: NDArray, keys: NDArray, values: NDArray, start: int) -> NDArray[np.float64]:
    """query [T, Q heads, D] stands at start .. start + T - 1; keys, values [start + T, KV heads, D]. Scale 1 / sqrt(D)."""
    tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    out = np.empty(query.shape, np.float64)
    for token in range(tokens):
        context = start + token + 1
        for head in range(heads):
            scores = keys[:context, head // group].astype(np.float64) @ query[token, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[:context, head // group].astype(np.float64) / weights.sum()
    return out
