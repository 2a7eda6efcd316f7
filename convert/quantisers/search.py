"""NVFP4 block scales by search: of several E4M3 scales a block, the one with the least squared error.

The global multiplier is the default's. The candidates are the default block scale and its neighbours among the E4M3
words, from `BELOW` steps down (its largest values are clamped) to `ABOVE` steps up (finer use of the small codes); an
E4M3 step is between 1/16 and 1/8. The default wins ties, so that no block ever gets worse than with it.

A block's error is the sum over its columns of importance x (w - decoded)^2, in float64, added as a binary tree of
halves (16 to 8 to 4 to 2 to 1): the order is part of the format, since it decides ties to the last bit.
"""

import numpy as np

from ...checkpoint.encodings import fp8, nvfp4
from ...checkpoint.errors import InputError

BELOW, ABOVE = 3, 8
# Nearest first: the earlier of two candidates with equal errors is taken.
OFFSETS = np.array(sorted(range(-BELOW, ABOVE + 1), key=lambda step: (abs(step), step < 0)))
_LARGEST = 0x7E  # E4M3 word of 448


def importance_of(column_weights: np.ndarray | None, columns: int) -> np.ndarray:
    """float64 [columns]: how much an error in each input column counts, 1 if not given.

    `column_weights` are mean squared activations, say. Raises InputError if they do not fit or are not all positive.
    """
    if column_weights is None:
        return np.ones(columns)
    found = np.asarray(column_weights, np.float64)
    if found.shape != (columns,):
        raise InputError(f"{list(found.shape)} column weights for {columns} columns.")
    if not (np.isfinite(found) & (found > 0)).all():
        raise InputError("column weights must be positive and finite.")
    return found


def _tree_sum(terms: np.ndarray) -> np.ndarray:
    """Sum over the last axis of 16, halves added pairwise."""
    for half in (8, 4, 2, 1):
        terms = terms[..., :half] + terms[..., half : 2 * half]
    return terms[..., 0]


def nvfp4_words(
    weight: np.ndarray, scale: np.float32, column_weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Words uint8 [rows, columns / 2] and block scales uint8 [rows, columns / 16] of float32 `weight`.

    `scale` is `nvfp4.multiplier` of the whole tensor; `column_weights` [columns], see `importance_of`.
    """
    rows, columns = weight.shape
    importance = importance_of(column_weights, columns).reshape(columns // nvfp4.GROUP, nvfp4.GROUP)
    blocks = np.ascontiguousarray(weight, np.float32).reshape(rows, -1, nvfp4.GROUP)
    _, usual = nvfp4.encode(weight, scale)
    lives = (blocks != 0).any(axis=2)
    best_scale, best_codes, best_error = usual, np.zeros(blocks.shape, np.uint8), np.full(usual.shape, np.inf)
    for step in OFFSETS:
        word = usual.astype(np.int64) + step
        possible = (word >= 1) & (word <= _LARGEST) & (lives | (step == 0))
        word = np.where(possible, word, nvfp4.ONE).astype(np.uint8)
        factor = (fp8.DECODE[word] * scale)[:, :, None]
        codes = nvfp4.to_e2m1(blocks / factor)
        miss = blocks.astype(np.float64) - nvfp4.DECODE[codes] * factor
        error = _tree_sum(miss * miss * importance)
        better = possible & (error < best_error)
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, word, best_scale)
        best_codes = np.where(better[:, :, None], codes, best_codes)
    return nvfp4.pack(best_codes.reshape(rows, columns)), best_scale
