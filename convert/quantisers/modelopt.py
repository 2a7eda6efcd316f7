"""The bytes of NVIDIA ModelOpt: NVFP4, and FP8 with one scale for the tensor or one a row.

All arithmetic is float32, whatever the weight's dtype, but for the division of FP8 per tensor. Its NVFP4 scales of a
tensor of zeros are NaN; we refuse such a tensor rather than write that.

Checked against files that ModelOpt 0.47 wrote (tests/convert/test_peers.py).
"""

import numpy as np

from ...checkpoint.encodings import fp8, nvfp4
from ...checkpoint.errors import InputError
from .rounding import block_amax, e2m1, e4m3, per_column, through

# Roles within a layer whose matrices the library gives one common amax, since engines read them as one matrix.
PARTNERS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
)


def _require_values(amax: float) -> None:
    if not amax:
        raise InputError(
            "a tensor of zeros has no ModelOpt scale (the library itself writes NaN). Use another quantiser."
        )


def multiplier(amax: float, dtype: str) -> np.float32:
    """weight_scale_2 = amax / 2688, for the largest magnitude of a matrix and its partners. `dtype` plays no part.

    Raises InputError for zero.
    """
    _require_values(amax)
    return np.float32(amax) / np.float32(2688)


def nvfp4_words(weight: np.ndarray, scale: np.float32, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Words uint8 [rows, columns / 2] and block scales uint8 [rows, columns / 16] of float32 `weight`.

    block scale = E4M3(clamp(amax(block) / (6 scale), 2^-9, 448)), 1.0 where that quotient is 0;
    code = E2M1(w / (block scale x scale)).
    """
    wanted = block_amax(weight) / (np.float32(6) * scale)
    wanted = np.where(wanted == 0, np.float32(1), np.clip(wanted, np.float32(2.0**-9), fp8.MAX))
    block_scale = e4m3(wanted)
    return nvfp4.pack(e2m1(weight / per_column(fp8.DECODE[block_scale] * scale))), block_scale


def row_scales(row_amax: np.ndarray, dtype: str) -> np.ndarray:
    """FP8 scales float32 [rows]: amax / 448; a row of zeros has scale 1 (the library's 0 decodes to NaN)."""
    return np.where(row_amax == 0, np.float32(1), row_amax / fp8.MAX).astype(np.float32)


def fp8_rows(weight: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """Words uint8 [rows, columns] of float32 `weight` for scales [rows]: E4M3(w / scale)."""
    return e4m3(weight / scale[:, None])


def tensor_scale(amax: float) -> np.float32:
    """FP8 scale of a whole tensor: amax / 448. Raises InputError for zero."""
    _require_values(amax)
    return np.float32(amax) / fp8.MAX


def fp8_tensor(weight: np.ndarray, scale: np.float32, dtype: str) -> np.ndarray:
    """Words uint8, shape of float32 `weight`: E4M3(w / scale), the quotient rounded to the weight's dtype first."""
    return e4m3(through(weight / scale, dtype))
