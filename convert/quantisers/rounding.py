"""Roundings as the libraries do them: E4M3 and E2M1 with the sign of zero kept, and a detour through the weight's dtype.

Ours (checkpoint/encodings) write every zero as +0; these reproduce others' bytes.
"""

import numpy as np

from ...checkpoint.encodings import fp8, nvfp4
from ...checkpoint.encodings.plain import to_bf16, to_float32


def through(values: np.ndarray | np.floating, dtype: str) -> np.ndarray:
    """float32 values rounded once to BF16 or F16, as an operation on tensors of that dtype leaves them; F32 as they are.

    Raises ValueError for another dtype.
    """
    values = np.asarray(values, np.float32)
    if dtype == "BF16":
        return to_float32(to_bf16(values), "BF16").reshape(values.shape)
    if dtype == "F16":
        with np.errstate(over="ignore"):  # infinite, as the library's own value would be
            return values.astype(np.float16).astype(np.float32)
    if dtype == "F32":
        return values
    raise ValueError(f"{dtype} is not a plain floating-point dtype")


def e4m3(values: np.ndarray) -> np.ndarray:
    """E4M3 words (uint8) of float32 values clamped to +-448; -0 and what rounds to it are 0x80."""
    return fp8.to_e4m3(values) | np.signbit(values).astype(np.uint8) << np.uint8(7)


def e2m1(values: np.ndarray) -> np.ndarray:
    """E2M1 codes (uint8) of float32 values; a negative value that rounds to zero is code 8, -0.0 itself code 0."""
    return nvfp4.to_e2m1(values) | (values < 0).astype(np.uint8) << np.uint8(3)


def block_amax(weight: np.ndarray) -> np.ndarray:
    """Largest magnitude of each 16 columns: [rows, columns / 16] of [rows, columns]."""
    rows, columns = weight.shape
    return np.abs(weight.reshape(rows, columns // nvfp4.GROUP, nvfp4.GROUP)).max(axis=2)


def per_column(factors: np.ndarray) -> np.ndarray:
    """Block factors [rows, groups] repeated for every column: [rows, 16 x groups]."""
    return np.repeat(factors, nvfp4.GROUP, axis=1)
