"""FP8 E4M3 (bias 7, largest 448, subnormal step 2^-9; codes 0x7F and 0xFF are NaN), with one FP32 scale a row.

Formulas (all in float32, one rounding each):
  scale[r] = max(amax(|W[r]|) / 448, 2^-126), 1.0 for a row of zeros
  word     = E4M3(clamp(W[r] / scale[r], -448, 448)), ties to even; zero is always written +0
  decode   = E4M3 value * scale[r]
Sources quantised by others may have one scale for the matrix, or one a tile (usually 128 x 128): decoded alike.
"""

import numpy as np

MAX = np.float32(448.0)
SMALLEST_SCALE = np.float32(2.0**-126)  # smallest normal float32: a scale below would lose bits of its own
_SUBNORMAL_LIMIT = np.float32(2.0**-6)
_MAGIC = np.float32(2.0**14)  # float32 ulp in [2^14, 2^15) is 2^-9, the subnormal step: adding rounds to it
_MAGIC_BITS = np.uint32(0x46800000)


def _decode_table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return np.where(codes >= 128, -value, value).astype(np.float32)


DECODE = _decode_table()  # float32 [256]


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Round float32 to E4M3 words (uint8, same shape): nearest, ties to even, clamped to +-448. NaN gives 0x7F."""
    x = np.ascontiguousarray(x, np.float32)
    magnitude = np.minimum(np.abs(x), MAX)
    bits = magnitude.view(np.uint32)
    # Round the 23-bit mantissa to 3 bits: add half an ulp less one, plus the lowest kept bit. Then move the bias 127 to 7.
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(
        120 << 3
    )
    subnormal = (magnitude + _MAGIC).view(np.uint32) - _MAGIC_BITS
    code = np.where(magnitude < _SUBNORMAL_LIMIT, subnormal, normal).astype(np.uint8)
    code = np.where(np.isnan(x), np.uint8(0x7F), code)
    return np.where((x < 0) & (code != 0), code | np.uint8(0x80), code)


def row_scales(row_amax: np.ndarray) -> np.ndarray:
    """Scales float32 [rows] from the rows' largest magnitudes."""
    row_amax = np.asarray(row_amax, np.float32)
    return np.where(row_amax == 0, np.float32(1), np.maximum(row_amax / MAX, SMALLEST_SCALE)).astype(np.float32)


def encode_rows(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Words uint8 [rows, columns] of float32 `weight`, given `row_scales` of its rows."""
    return to_e4m3(weight / scale[:, None])


def decode_rows(words: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] from words uint8 and scales float32 [rows]."""
    return DECODE[words] * scale.astype(np.float32)[:, None]


def decode_tiles(words: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """float32 [rows, K] from words uint8 and scales float32 [rows, ceil(K / columns)]: one a row and tile of columns."""
    return DECODE[words] * np.repeat(scale, columns, axis=1)[:, : words.shape[1]]


def has_nan(words: np.ndarray) -> bool:
    """True if a word is one of the two NaN codes."""
    return bool(((words & 0x7F) == 0x7F).any())
