"""Reading stored tensors in bands of canonical rows, layout undone: how everything that decodes stays small in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .container import NUMPY_DTYPE, TensorEntry, read_range
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
class DecodedWeight:
    """One logical weight read in bands: `parts` maps part name -> (stored name, record)."""

    weight: str
    parts: Mapping[str, tuple[str, TensorRecord]]

    @property
    def encoding(self) -> str:
        return next(iter(self.parts.values()))[1].encoding

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, that of the source."""
        return tuple(next(iter(self.parts.values()))[1].sources[0].shape)

    def decode(self, reader: CanonicalReader, first: int, last: int) -> np.ndarray:
        """float32 rows [first, last) of the weight."""
        found = {}
        for part, (name, record) in self.parts.items():
            scalar = part == "global_scale"
            found[part] = (record.dtype, reader.rows(name, 0, 1) if scalar else reader.rows(name, first, last))
        return decode_parts(self.weight, self.encoding, found)
