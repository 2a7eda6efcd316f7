"""A stored tensor seen as a grid of cells [rows, columns, cell bytes], so that one cut serves every shape and layout.

Canonical: a cell is one element with all its inner axes. Tile layouts: a cell is a tile, so that cutting at tile edges
copies tiles and decodes nothing.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from ..checkpoint.container import ITEMSIZE, TensorEntry
from ..checkpoint.direct import SLACK, DirectFile
from ..checkpoint.layouts import ROWS, layout_named
from .rooms import Room, Rooms

Ranges = tuple[tuple[int, int], ...]

BAND_BYTES = 8 << 20  # read at a time: large and sequential
READERS = 2  # bands that are being read at a time


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


@dataclass(frozen=True)
class Band:
    """Cells uint8 [rows, columns, cell bytes] from grid row `first` on, as they stand in `room`."""

    first: int
    cells: np.ndarray
    room: Room

    @property
    def raw(self) -> np.ndarray:
        """The same bytes, as they came from the file."""
        return self.cells.reshape(-1)


class BandReader:
    """Reads a stored tensor once, in order, as bands of whole grid rows; `readers` are always some bands ahead.

    A network disk's answer to one request is then on its way while another is asked for.
    """

    def __init__(
        self,
        entry: TensorEntry,
        layout: str,
        canonical_shape: tuple[int, ...],
        rooms: Rooms,
        readers: ThreadPoolExecutor,
    ) -> None:
        self.entry, self.rooms, self.readers = entry, rooms, readers
        self.tile = layout_named(layout)
        self.grid = grid_of(layout, entry.dtype, canonical_shape)
        self.canonical_grid = grid_of("canonical", entry.dtype, canonical_shape)

    def __iter__(self) -> Iterator[Band]:
        row_bytes, rows = self.grid.row_bytes, self.grid.cells[0]
        rows_a_band = max(1, BAND_BYTES // max(1, row_bytes))
        ahead: deque[Future[Band]] = deque()
        with DirectFile(self.entry.path) as file:
            try:
                for first in range(0, rows, rows_a_band):
                    count = min(rows_a_band, rows - first)
                    room = self.rooms.next(count * row_bytes + SLACK)
                    ahead.append(self.readers.submit(self._read, file, first, count, room))
                    if len(ahead) == READERS:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                wait(ahead)  # the file stays open for them

    def _read(self, file: DirectFile, first: int, count: int, room: Room) -> Band:
        row_bytes = self.grid.row_bytes
        raw = file.read(self.entry.begin + first * row_bytes, count * row_bytes, room.buffer)
        return Band(first, raw.reshape(count, self.grid.cells[1], self.grid.cell_bytes), room)

    def canonical(self, band: Band) -> tuple[int, np.ndarray]:
        """A band of tiles with its layout undone, as (first canonical row, canonical cells)."""
        if self.tile is None:
            return band.first, band.cells
        rows = self.tile.invert(band.cells.reshape(len(band.cells), self.grid.cells[1], ROWS, -1))
        return band.first * ROWS, rows.reshape(
            len(rows), *self.canonical_grid.cells[1:], self.canonical_grid.cell_bytes
        )
