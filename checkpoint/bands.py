"""Reading stored tensors in bands of canonical rows, layout undone: how everything that decodes stays small in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .container import NUMPY_DTYPE, TensorEntry, read_range
from .encodings import part_of, words_of
from .encodings.plain import to_bf16, to_float32
from .encodings.weights import decode_parts
from .layouts import ROWS, layout_named
from .manifest import TensorRecord

BAND_BYTES = 4 << 20


def canonical_rows(entry: TensorEntry, record: TensorRecord, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of the canonical array, raw words; for a tiled layout both must be tile edges.

    Rows run along the first axis; a scalar is its own single row and comes back as shape [1].
    """
    shape = tuple(record.canonical_shape) or (1,)
    row_bytes = entry.nbytes // shape[0] if shape[0] else 0
    raw = read_range(entry, first * row_bytes, last * row_bytes)
    tile = layout_named(record.layout)
    if tile is None:
        return raw.view(NUMPY_DTYPE[record.dtype]).reshape(last - first, *shape[1:])
    if first % ROWS or last % ROWS:
        raise ValueError(f"rows [{first}, {last}) do not stand on tile edges of {ROWS}")
    return tile.invert(raw.reshape(tile.shape(last - first, shape[1])))


def band_edges(rows: int, row_bytes: int, band_bytes: int = BAND_BYTES) -> Iterator[tuple[int, int]]:
    """[first, last) of bands of about `band_bytes`, on tile edges."""
    step = max(ROWS, band_bytes // max(1, row_bytes) // ROWS * ROWS)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


class CanonicalReader(Protocol):
    """Anything that gives canonical rows of stored tensors by name: a converted directory, or ranks joined."""

    def rows(self, name: str, first: int, last: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Dialect:
    """Where a library's own decoding differs from the formulas in words of zero value or in the last bits.

    rounded_scales  FP8 scales are rounded to BF16 first (ModelOpt, when it decodes to BF16)
    unsigned_zero   the nvfp4 code of -0 gives +0 (ModelOpt)
    """

    rounded_scales: bool = False
    unsigned_zero: bool = False


OURS = Dialect()


def decode_band(
    weight: str,
    encoding: str,
    parts: Mapping[str, tuple[str, str]],
    reader: CanonicalReader,
    first: int,
    last: int,
    dialect: Dialect = OURS,
) -> np.ndarray:
    """float32 rows [first, last) of a weight whose `parts` map part name -> (name for `reader`, dtype)."""
    found = {}
    for name, (stored, dtype) in parts.items():
        part = part_of(encoding, name)
        unit = 1 if part is None else part.unit[0]
        low, high = (0, 1) if unit is None else (first // unit, -(-last // unit))
        words = reader.rows(stored, low, high)
        if dialect.rounded_scales and dtype == "F32" and words_of(encoding) == "fp8_e4m3":
            words = to_float32(to_bf16(words), "BF16")
        found[name] = (dtype, words)
    values = decode_parts(weight, encoding, found, first)
    return values + np.float32(0) if dialect.unsigned_zero and words_of(encoding) == "nvfp4" else values


@dataclass(frozen=True)
class DecodedWeight:
    """One logical weight read in bands: `parts` maps part name -> (stored name, record of the whole tensor)."""

    weight: str
    parts: Mapping[str, tuple[str, TensorRecord]]
    dialect: Dialect = OURS

    @property
    def encoding(self) -> str:
        return next(iter(self.parts.values()))[1].encoding

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, that of the source's values."""
        if "plain" in self.parts:
            return tuple(self.parts["plain"][1].sources[0].shape)
        part = part_of(self.encoding, "words")
        assert part is not None  # only plain encodings have none
        stored = self.parts["words"][1].canonical_shape
        return tuple(extent * (unit or 1) for extent, unit in zip(stored, part.unit, strict=True))

    def decode(self, reader: CanonicalReader, first: int, last: int) -> np.ndarray:
        """float32 rows [first, last) of the weight."""
        parts = {part: (name, record.dtype) for part, (name, record) in self.parts.items()}
        return decode_band(self.weight, self.encoding, parts, reader, first, last, self.dialect)
