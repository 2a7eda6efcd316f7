"""Comparing raw words: the first difference, as an index into the canonical tensor and both words in hex."""

from collections.abc import Iterator

import numpy as np

from ..checkpoint.bands import band_edges
from ..checkpoint.container import ITEMSIZE
from ..checkpoint.layouts import ROWS, layout_named
from ..checkpoint.manifest import TensorRecord


def bands_of(shape: tuple[int, ...], dtype: str) -> Iterator[tuple[int, int]]:
    """[first, last) rows of bands of a tensor of canonical `shape`, a few megabytes each."""
    row_bytes = ITEMSIZE[dtype]
    for extent in shape[1:]:
        row_bytes *= extent
    return band_edges(shape[0] if shape else 1, row_bytes)


def hex_word(value: np.ndarray) -> str:
    """One stored word, big end first, as it is written in an encoding table."""
    return "0x" + np.ascontiguousarray(value).tobytes()[::-1].hex()


def first_difference(found: np.ndarray, expected: np.ndarray) -> tuple[list[int], str, str] | None:
    """(index, found word, expected word) of two arrays of equal shape and word size; None if equal bit for bit."""
    unsigned = np.dtype(f"<u{found.dtype.itemsize}")
    a, b = (np.ascontiguousarray(array).view(unsigned) for array in (found, expected))
    if np.array_equal(a, b):
        return None
    differs = a != b
    flat = int(np.argmax(differs))
    index = [int(n) for n in np.unravel_index(flat, a.shape)]
    return index, hex_word(a[tuple(index)]), hex_word(b[tuple(index)])


def canonical_index(record: TensorRecord, stored: int) -> list[int]:
    """The index in the canonical tensor of the word at flat position `stored` of the file's order."""
    tile = layout_named(record.layout)
    if tile is None:
        return (
            [int(n) for n in np.unravel_index(stored, tuple(record.canonical_shape))] if record.canonical_shape else []
        )
    # Mark the byte in one tile and see where the inverse layout puts it: no second description of the layouts.
    groups, size = record.shape[1], ROWS * tile.bytes_per_group
    number, within = divmod(stored, size)
    one = np.zeros(size, np.uint8)
    one[within] = 0xFF
    row, column = np.argwhere(tile.invert(one.reshape(1, 1, ROWS, tile.bytes_per_group)))[0]
    return [number // groups * ROWS + int(row), number % groups * tile.bytes_per_group + int(column)]
