"""Partial rotary embedding with three position axes (time, height, width), interleaved by dimension."""

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, partial: float, theta: float) -> Tensor:
    """theta^(-2 j / R) for j in [0, R / 2), R = head_dim * partial the turned dimensions; float32 [R / 2]."""
    turned = int(head_dim * partial)
    return 1.0 / (theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned))


def rope_table(positions: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency for positions 0 .. positions - 1; float32 [positions, R / 2] each.

    The angle is a float32 product, as in the training code of the family: a wider product would turn far positions by
    another angle than the one the weights know.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def mrope_axes(half: int, section: list[int]) -> Tensor:
    """The position axis of each of the `half` frequencies, int64 [half]: 0 time, 1 height, 2 width.

    Height takes j % 3 == 1 below 3 * section[1], width j % 3 == 2 below 3 * section[2], time the rest.
    """
    axes = torch.zeros(half, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : min(half, 3 * section[axis]) : 3] = axis
    return axes


def rope_angles(positions: Tensor, axes: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines for a batch: positions int64 [3, T], axes [R / 2] -> two float32 [T, R / 2]."""
    rows = positions.t()[:, axes]
    columns = torch.arange(len(axes))
    return table[0][rows, columns], table[1][rows, columns]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (j, j + R / 2) of the first R dimensions of x [T, H, D] by the angles [T, R / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)
