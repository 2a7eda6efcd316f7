"""Rotary embedding as rotations of complex numbers."""

import numpy as np
from numpy.typing import NDArray


def rope(x: NDArray, positions: NDArray, *, partial: float, theta: float, section: list[int]) -> NDArray[np.float64]:
    """Turn x [T, H, D] by positions int [3, T] (time, height, width).

    Of the R = D * partial turned dimensions, pair (j, j + R / 2) is the complex number multiplied by e^(i p f_j),
    f_j = theta^(-2 j / R), where p is the height for j % 3 == 1 below 3 * section[1], the width for j % 3 == 2 below
    3 * section[2], and the time elsewhere.
    """
    out = x.astype(np.float64)
    turned = int(x.shape[-1] * partial)
    half = turned // 2
    for j in range(half):
        axis = 1 if j % 3 == 1 and j < 3 * section[1] else 2 if j % 3 == 2 and j < 3 * section[2] else 0
        angle = positions[axis].astype(np.float64) * theta ** (-2.0 * j / turned)
        pair = (x[..., j].astype(np.float64) + 1j * x[..., j + half]) * np.exp(1j * angle)[:, None]
        out[..., j], out[..., j + half] = pair.real, pair.imag
    return out
