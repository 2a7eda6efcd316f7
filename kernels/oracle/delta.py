"""The gated delta rule and what feeds it, one token and one head at a time."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def causal_conv(x: NDArray, history: NDArray, weight: NDArray) -> Array:
    """x [T, C] after history [W - 1, C]; weight [C, W], its last column for the current row; then SiLU."""
    rows = np.concatenate((history, x)).astype(np.float64)
    width = weight.shape[1]
    out = np.empty(x.shape, np.float64)
    for token in range(x.shape[0]):
        out[token] = np.einsum("wc,cw->c", rows[token : token + width], weight.astype(np.float64))
    return out / (1.0 + np.exp(-out))


def delta_gates(a: NDArray, b: NDArray, a_log: NDArray, dt_bias: NDArray) -> tuple[Array, Array]:
    """g = -exp(A_log) log(1 + exp(a + dt_bias)), beta = 1 / (1 + exp(-b))."""
    step = np.logaddexp(0.0, a.astype(np.float64) + dt_bias)
    return -np.exp(a_log.astype(np.float64)) * step, 1.0 / (1.0 + np.exp(-b.astype(np.float64)))


def delta_rule(
    query: NDArray, key: NDArray, value: NDArray, log_decay: NDArray, beta: NDArray, state: NDArray
) -> tuple[Array, Array]:
    """query, key [T, K heads, DK] (normalised), value [T, V heads, DV], gates [T, V heads], state [V heads, DV, DK].

    Returns outputs [T, V heads, DV] and the state after every token [T, V heads, DV, DK].
    """
    tokens, heads, _ = value.shape
    group = heads // key.shape[1]
    current = state.astype(np.float64).copy()
    outputs = np.empty(value.shape, np.float64)
    states = np.empty((tokens, *state.shape), np.float64)
    for token in range(tokens):
        for head in range(heads):
            k = key[token, head // group].astype(np.float64)
            current[head] *= np.exp(float(log_decay[token, head]))
            update = float(beta[token, head]) * (value[token, head] - current[head] @ k)
            current[head] += np.outer(update, k)
            outputs[token, head] = current[head] @ query[token, head // group] / np.sqrt(k.size)
        states[token] = current
    return outputs, states
