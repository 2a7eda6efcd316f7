"""BF16, FP16 and FP32 words to float32 and back; BF16 as uint16, since numpy has no such type."""

import numpy as np

LARGEST = {"BF16": np.float32(3.3895313892515355e38), "F16": np.float32(65504.0), "F32": np.finfo(np.float32).max}


def to_float32(words: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of raw words of dtype BF16 (uint16), F16 or F32; every one of them exact."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in ("F16", "F32"):
        return words.astype(np.float32)
    raise ValueError(f"{dtype} is not a plain floating-point dtype")


def to_bf16(values: np.ndarray) -> np.ndarray:
    """BF16 words (uint16) of float32 values: nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding up must not carry a NaN's payload away into infinity or zero: keep its top bits, set the quiet bit.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Words of dtype BF16 (uint16), F16 or F32 of float32 values: nearest, ties to even; the caller checks the range."""
    if dtype == "BF16":
        return to_bf16(values)
    if dtype in ("F16", "F32"):
        return np.asarray(values, np.float16 if dtype == "F16" else np.float32)
    raise ValueError(f"{dtype} is not a plain floating-point dtype")
