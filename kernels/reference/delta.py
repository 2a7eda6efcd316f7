"""The gated delta rule: token by token, and in chunks for prefill. State S is [V heads, DV, DK], float32.

For each value head: S = e^g S; u = beta (v - S k); S += u k^T; o = S q / sqrt(DK). A key head serves V heads / K heads
value heads that stand together.
"""

import torch
from torch import Tensor

from .activation import sigmoid, softplus

CHUNK = 64


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay g = -exp(A_log) * softplus(a + dt_bias) and write strength beta = sigmoid(b); all [T, V heads]."""
    return -torch.exp(a_log) * softplus(a + dt_bias), sigmoid(b)


def _by_value_head(x: Tensor, value_heads: int) -> Tensor:
    return x.repeat_interleave(value_heads // x.shape[1], dim=1)


def delta_rule_steps(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: query, key [T, K heads, DK] (L2-normalised), value [T, V heads, DV], gates [T, V heads].

    Returns outputs [T, V heads, DV] and the state after every token [T, V heads, DV, DK]; `state` is left as it was.
    Every token's products have the same shapes and operands that start on cache lines, so bits do not depend on T.
    """
    heads, dim = value.shape[1], key.shape[-1]
    query = _by_value_head(query, heads)[..., None] * dim**-0.5
    key = _by_value_head(key, heads)
    decay, beta = torch.exp(log_decay)[..., None, None], beta[..., None, None]
    outputs, states = [], []
    for index in range(value.shape[0]):
        row = key[index].clone()
        state = state * decay[index]
        update = (value[index][..., None] - torch.bmm(state, row[..., None])) * beta[index]
        state = torch.baddbmm(state, update, row[:, None, :])
        outputs.append(torch.bmm(state, query[index].clone())[..., 0])
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def delta_rule_chunked(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same rule, CHUNK tokens at a time; shapes as delta_rule_steps, but only the last state is returned.

    Within a chunk that starts from S, with G the running sum of g: the updates u solve the unit lower triangular system
    u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - e^(G_i) S k_i)
    (the WY form of Gated Delta Networks, Yang et al. 2024).
    """
    heads, dim = value.shape[1], key.shape[-1]
    query = (_by_value_head(query, heads) * dim**-0.5).transpose(0, 1)
    key = _by_value_head(key, heads).transpose(0, 1)
    value, log_decay, beta = value.transpose(0, 1), log_decay.t(), beta.t()
    outputs = torch.empty_like(value, memory_format=torch.contiguous_format)
    for begin in range(0, value.shape[1], CHUNK):
        part = slice(begin, begin + CHUNK)
        q, k, v, strength = query[:, part], key[:, part], value[:, part], beta[:, part, None]
        total = log_decay[:, part].cumsum(-1)
        growth = torch.exp(total)[..., None]
        # Above the diagonal the difference is positive and may overflow: it is cut off before the exponential.
        between = torch.exp((total[:, :, None] - total[:, None, :]).tril()).tril()
        system = strength * between * (k @ k.transpose(1, 2))
        wanted = strength * (v - growth * (k @ state.transpose(1, 2)))
        update = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs[:, part] = growth * (q @ state.transpose(1, 2)) + (between * (q @ k.transpose(1, 2))) @ update
        remaining = torch.exp(total[:, -1:] - total)[..., None]
        state = growth[:, -1:] * state + (update * remaining).transpose(1, 2) @ k
    return outputs.transpose(0, 1), state
