"""The bytes of compressed-tensors and llmcompressor: NVFP4, and FP8 with a scale a tensor, a row or a 128 x 128 block.

The library computes in the weight's own dtype until the weight meets a float32 global scale: `bf16(.)` below is one
rounding to that dtype (nothing for float32 weights).

Checked against files that compressed-tensors 0.20 and llmcompressor 0.14 wrote (tests/convert/test_peers.py).
"""

import numpy as np

from ...checkpoint.encodings import fp8, nvfp4
from ...checkpoint.errors import InputError
from .rounding import block_amax, e2m1, e4m3, per_column, through

# One global scale each; the two halves of a Gated DeltaNet projection are not among the library's fused matrices.
PARTNERS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))

SMALLEST_BLOCK_SCALE = np.uint8(0x20)  # E4M3 word of 0.125, for a block scale that rounds to zero
BLOCK = 128
_ZERO_SCALE = {
    "BF16": np.float32(2.0**-7),
    "F16": np.float32(2.0**-10),
    "F32": np.float32(2.0**-23),
}  # eps of the dtype


def divisor(amax: float, dtype: str) -> np.float32:
    """weight_global_scale = bf16(bf16(1 / amax) x 2688) for the largest magnitude of a matrix and its partners; 1 for 0.

    Raises InputError where that is beyond the dtype's range: the library itself writes infinity.
    """
    if not amax:
        return np.float32(1)
    with np.errstate(over="ignore"):  # judged below
        inverse = through(np.float32(1) / np.float32(amax), dtype)
        found = np.float32(through(inverse * np.float32(2688), dtype))
    if not np.isfinite(found):
        raise InputError(
            f"a largest magnitude of {amax:.3g} has no compressed-tensors scale in {dtype} (the library writes infinity). "
            "Use another quantiser."
        )
    return found


def nvfp4_words(weight: np.ndarray, scale: np.float32, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Words uint8 [rows, columns / 2] and block scales uint8 [rows, columns / 16] of float32 `weight`.

    block scale = E4M3(clamp(scale x bf16(amax(block) / 6), 448)), 0.125 where that is 0;
    code = E2M1(clamp(w / (block scale / scale), 6)), `scale` being the `divisor`.
    """
    block_scale = e4m3(scale * through(block_amax(weight) / np.float32(6), dtype))
    block_scale = np.where(block_scale == 0, SMALLEST_BLOCK_SCALE, block_scale)
    y = weight / per_column(fp8.DECODE[block_scale] / scale)
    return nvfp4.pack(e2m1(y)), block_scale


def _scales(amax: np.ndarray | np.floating, dtype: str) -> np.ndarray:
    scale = through(amax / fp8.MAX, dtype)
    return np.where(scale == 0, _ZERO_SCALE[dtype], scale).astype(np.float32)


def _words(weight: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    return e4m3(through(weight / scale, dtype))


def row_scales(row_amax: np.ndarray, dtype: str) -> np.ndarray:
    """FP8 scales float32 [rows]: bf16(amax / 448), the dtype's epsilon for a row of zeros."""
    return _scales(row_amax, dtype)


def fp8_rows(weight: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """Words uint8 [rows, columns] of float32 `weight` for scales [rows]: E4M3(clamp(bf16(w / scale), 448))."""
    return _words(weight, scale[:, None], dtype)


def fp8_tensor(weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.float32]:
    """Words uint8, shape of float32 `weight`, and the one scale."""
    scale = _scales(np.abs(weight).max(initial=0), dtype)
    return _words(weight, scale, dtype), np.float32(scale)


def fp8_blocks(weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Words uint8 [rows, columns] and scales float32 [ceil(rows / 128), ceil(columns / 128)]; edge blocks may be ragged."""
    rows, columns = weight.shape
    padded = np.zeros((-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:rows, :columns] = np.abs(weight)
    amax = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).max(axis=(1, 3))
    scale = _scales(amax, dtype)
    spread = np.repeat(np.repeat(scale, BLOCK, axis=0), BLOCK, axis=1)[:rows, :columns]
    return _words(weight, spread, dtype), scale
