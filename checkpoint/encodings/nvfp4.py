"""NVFP4: E2M1 codes (sign << 3 | index into 0, .5, 1, 1.5, 2, 3, 4, 6), one E4M3 scale per 16 columns, one FP32 scale.

Two codes a byte, the even column in the low nibble. Formulas (all in float32, one rounding each):
  multiplier  = max(amax(|W|) / 2688, 2^-126), 1.0 for a tensor of zeros; 2688 = 6 * 448
  block scale = E4M3(clamp(amax(|block|) / (6 * multiplier), 2^-9, 448)), 1.0 for a block of zeros
  code        = E2M1(W / (block scale * multiplier)), ties to even, clamped to +-6; zero is always written +0
  decode      = E2M1 value * (block scale * multiplier); for a divisor, E2M1 value * (block scale / divisor)
"""

import numpy as np

from . import fp8

GROUP = 16
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
DECODE = np.concatenate([VALUES, -VALUES])  # float32 [16]
ONE = np.uint8(0x38)  # E4M3 word of 1.0
_SMALLEST_BLOCK_SCALE = np.float32(2.0**-9)


def multiplier(amax: float) -> np.float32:
    """The global scale, as a multiplier, for a tensor whose largest magnitude is `amax`."""
    if amax == 0:
        return np.float32(1)
    return max(np.float32(amax) / np.float32(2688), fp8.SMALLEST_SCALE)


def to_e2m1(y: np.ndarray) -> np.ndarray:
    """Round float32 to E2M1 codes (uint8 0..15, same shape): nearest, ties to even, clamped to +-6."""
    magnitude = np.abs(y)
    code = (magnitude > 0.25).astype(np.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code | ((y < 0) & (code != 0)).astype(np.uint8) << np.uint8(3)


def pack(codes: np.ndarray) -> np.ndarray:
    """Bytes [rows, columns / 2] of codes [rows, columns]: even column low."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def unpack(words: np.ndarray) -> np.ndarray:
    """Codes [rows, columns] of bytes [rows, columns / 2]."""
    codes = np.empty((words.shape[0], words.shape[1] * 2), np.uint8)
    codes[:, 0::2] = words & 15
    codes[:, 1::2] = words >> 4
    return codes


def encode(weight: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Words uint8 [rows, columns / 2] and block scales uint8 [rows, columns / 16] of float32 `weight`.

    `scale` is the `multiplier` of the whole tensor; columns must be a multiple of 16.
    """
    rows, columns = weight.shape
    blocks = np.ascontiguousarray(weight, np.float32).reshape(rows, columns // GROUP, GROUP)
    amax = np.abs(blocks).max(axis=2)
    wanted = np.clip(amax / (np.float32(6) * scale), _SMALLEST_BLOCK_SCALE, fp8.MAX)
    block_scale = np.where(amax == 0, ONE, fp8.to_e4m3(wanted))
    y = blocks / (fp8.DECODE[block_scale] * scale)[:, :, None]
    return pack(to_e2m1(y.reshape(rows, columns))), block_scale


def factors(
    block_scale: np.ndarray, *, multiplier: np.float32 | None = None, divisor: np.float32 | None = None
) -> np.ndarray:
    """float32 [rows, groups]: what each group's E2M1 values are multiplied with, the global scale in either direction."""
    if (multiplier is None) == (divisor is None):
        raise ValueError("exactly one of multiplier and divisor")
    scale = fp8.DECODE[block_scale]
    return scale * multiplier if multiplier is not None else scale / divisor


def decode(words: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] from words and `factors`."""
    values = DECODE[unpack(words)].reshape(*factor.shape, GROUP)
    return (values * factor[:, :, None]).reshape(words.shape[0], -1)
