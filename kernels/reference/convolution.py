"""Depthwise causal convolution in front of the gated delta rule."""

import torch
from torch import Tensor

from .activation import silu


def causal_conv(x: Tensor, history: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu(sum_j weight[c, j] * row[t + j, c]) over the rows of `history` followed by those of `x`.

    x [T, C], history [W - 1, C] (the rows before x, oldest first), weight [C, W]. Returns the outputs [T, C] and the
    joined rows [W - 1 + T, C]: the history after token t is their rows t + 1 .. t + W - 1.
    """
    rows = torch.cat((history, x))
    count, width = x.shape[0], weight.shape[1]
    total = rows[:count] * weight[:, 0]
    for tap in range(1, width):
        total = total + rows[tap : tap + count] * weight[:, tap]
    return silu(total), rows
