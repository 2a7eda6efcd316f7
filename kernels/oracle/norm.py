"""RMSNorm in both conventions of the family."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Zero-centred: every row x [.., D] over its root mean square, times 1 + weight [D]."""
    out = np.empty(x.shape, np.float64)
    for index in np.ndindex(x.shape[:-1]):
        row = x[index].astype(np.float64)
        out[index] = row / np.sqrt(np.dot(row, row) / row.size + eps) * (1.0 + weight.astype(np.float64))
    return out


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """Plain weight, then times silu(gate)."""
    wide = gate.astype(np.float64)
    return rms_norm(x, weight.astype(np.float64) - 1.0, eps) * wide / (1.0 + np.exp(-wide))
