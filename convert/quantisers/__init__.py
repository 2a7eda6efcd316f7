"""How values become words: each quantiser is a record of its rules, chosen by name in a recipe.

| name | nvfp4 | fp8 with a scale a row |
|---|---|---|
| `default` | float32 formulas of checkpoint/encodings, without the libraries' known defects | likewise |
| `modelopt` | the bytes of NVIDIA ModelOpt | likewise |
| `compressed-tensors` | the bytes of compressed-tensors and llmcompressor; the global scale is a divisor | likewise |
| `search` | default, then the best of twelve block scales by squared error | default |

The modules also hold the libraries' rules for other scales (a tensor, a 128 x 128 block), as functions on tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...checkpoint.encodings import fp8, nvfp4
from . import compressed_tensors, modelopt, search


@dataclass(frozen=True)
class Quantiser:
    """The rules of one name. `dtype` is always the weight's own (BF16, F16, F32), weights are its float32 values.

    global_scale(amax, dtype): float32, in the direction of `encoding` (what an nvfp4 matrix is called in the manifest).
    nvfp4_words(weight, global scale, dtype): words uint8 [rows, columns / 2], block scales uint8 [rows, columns / 16].
    row_scales(row amax float32 [rows], dtype): float32 [rows].
    fp8_words(weight, row scales, dtype): words uint8 [rows, columns].
    `partners`: roles whose matrices share the largest magnitude that the global scale is made from.
    """

    global_scale: Callable[[float, str], np.float32]
    nvfp4_words: Callable[[np.ndarray, np.float32, str], tuple[np.ndarray, np.ndarray]]
    row_scales: Callable[[np.ndarray, str], np.ndarray]
    fp8_words: Callable[[np.ndarray, np.ndarray, str], np.ndarray]
    encoding: str = "nvfp4"
    partners: tuple[tuple[str, ...], ...] = ()

    def partner_roles(self, role: str) -> tuple[str, ...]:
        """The roles, `role` among them, that share one largest magnitude."""
        return next((group for group in self.partners if role in group), (role,))


def _default_words(weight: np.ndarray, scale: np.float32, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return nvfp4.encode(weight, scale)


def _searched_words(weight: np.ndarray, scale: np.float32, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return search.nvfp4_words(weight, scale)


def _multiplier(amax: float, dtype: str) -> np.float32:
    return nvfp4.multiplier(amax)


def _row_scales(row_amax: np.ndarray, dtype: str) -> np.ndarray:
    return fp8.row_scales(row_amax)


def _fp8_words(weight: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    return fp8.encode_rows(weight, scale)


QUANTISERS = {
    "default": Quantiser(_multiplier, _default_words, _row_scales, _fp8_words),
    "search": Quantiser(_multiplier, _searched_words, _row_scales, _fp8_words),
    "modelopt": Quantiser(
        modelopt.multiplier, modelopt.nvfp4_words, modelopt.row_scales, modelopt.fp8_rows, partners=modelopt.PARTNERS
    ),
    "compressed-tensors": Quantiser(
        compressed_tensors.divisor,
        compressed_tensors.nvfp4_words,
        compressed_tensors.row_scales,
        compressed_tensors.fp8_rows,
        encoding="nvfp4/divisor",
        partners=compressed_tensors.PARTNERS,
    ),
}
