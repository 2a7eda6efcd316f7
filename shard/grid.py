"""A stored tensor seen as a grid of cells [rows, columns, cell bytes], so that one cut serves every shape and layout.

Canonical: a cell is one element with all its inner axes. Tile layouts: a cell is a tile, so that cutting at tile edges
copies tiles and decodes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..checkpoint import container
from ..checkpoint.container import ITEMSIZE, TensorEntry
from ..checkpoint.layouts import ROWS, layout_named

Ranges = tuple[tuple[int, int], ...]

BAND_BYTES = 8 << 20  # read at a time: large and sequential


@dataclass(frozen=True)
class Grid:
    """`steps` are the canonical elements a cell covers along each axis."""

    cells: tuple[int, int]
    cell_bytes: int
    steps: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        return self.cells[1] * self.cell_bytes

    def on_edges(self, axis: int, ranges: Ranges) -> bool:
        """True if every range starts and stops between cells."""
        return all(edge % self.steps[axis] == 0 for pair in ranges for edge in pair)

    def cut(self, band: np.ndarray, first: int, axis: int | None, ranges: Ranges) -> list[np.ndarray]:
        """The pieces of `band` (cells uint8 [rows, columns, cell bytes] from grid row `first` on) inside `ranges`."""
        if axis is None:
            return [band]
        step = self.steps[axis]
        if axis == 0:
            clipped = [(max(lo // step - first, 0), min(hi // step - first, len(band))) for lo, hi in ranges]
            return [band[lo:hi] for lo, hi in clipped if lo < hi]
        return [np.concatenate([band[:, lo // step : hi // step] for lo, hi in ranges], axis=1)]


def grid_of(layout: str, dtype: str, canonical_shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor of `canonical_shape` stored in `layout`."""
    rows, columns, *inner = (*canonical_shape, 1, 1)[: max(2, len(canonical_shape))]
    size = ITEMSIZE[dtype]
    for extent in inner:
        size *= extent
    tile = layout_named(layout)
    if tile is None:
        return Grid((rows, columns), size, (1, 1))
    group = tile.bytes_per_group
    return Grid((rows // ROWS, columns * size // group), ROWS * group, (ROWS, group // size))


class BandReader:
    """Reads a stored tensor once, in order, as bands of whole grid rows.

    `room` gives a buffer of so many bytes, whose last content nobody needs any more. `seen` is called with each band's
    bytes before the band is handed out; it may leave its work to another thread, so that the disk never waits for it.
    """

    def __init__(
        self,
        entry: TensorEntry,
        layout: str,
        canonical_shape: tuple[int, ...],
        room: Callable[[int], np.ndarray],
        seen: Callable[[np.ndarray], None],
    ) -> None:
        self.entry, self.room, self.seen = entry, room, seen
        self.tile = layout_named(layout)
        self.grid = grid_of(layout, entry.dtype, canonical_shape)
        self.canonical_grid = grid_of("canonical", entry.dtype, canonical_shape)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first grid row, cells uint8 [rows, columns, cell bytes])."""
        row_bytes, rows = self.grid.row_bytes, self.grid.cells[0]
        rows_a_band = max(1, BAND_BYTES // max(1, row_bytes))
        with container.TensorFile(self.entry) as file:
            for first in range(0, rows, rows_a_band):
                count = min(rows_a_band, rows - first)
                raw = self.room(count * row_bytes)
                file.read_into(raw)
                self.seen(raw)
                yield first, raw.reshape(count, self.grid.cells[1], self.grid.cell_bytes)

    def canonical(self, first: int, band: np.ndarray) -> tuple[int, np.ndarray]:
        """A band of tiles with its layout undone, as (first canonical row, canonical cells)."""
        if self.tile is None:
            return first, band
        rows = self.tile.invert(band.reshape(len(band), self.grid.cells[1], ROWS, -1))
        return first * ROWS, rows.reshape(len(rows), *self.canonical_grid.cells[1:], self.canonical_grid.cell_bytes)
