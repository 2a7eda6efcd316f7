"""Layouts: documented bijections of a stored matrix's bytes, same size in as out.

`canonical` is row-major. The V100 layouts cut a matrix into tiles of 32 rows x 16 columns, one row a lane of a warp, so
that a warp's load of one tile is a run of whole 32-byte sectors; docs/layouts.md shows them byte by byte. Since tiles
stand in row-major order, cutting at tile edges commutes with the layout: layout(split(x)) == split(layout(x)).
A matrix that does not fill whole tiles stays canonical.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InputError

ROWS = 32  # rows a tile: the lanes of a warp
COLUMNS = 16  # logical columns a tile: an nvfp4 group
SLAB_BYTES = 128 << 10


def _same(words: np.ndarray) -> np.ndarray:
    return words


def _interleave_nibbles(words: np.ndarray) -> np.ndarray:
    """In each 4 bytes, codes k0..k7 from nibble order 0..7 to 0, 2, 4, 6, 1, 3, 5, 7.

    One shift and one mask of the 32-bit word then give (k, k+1) in the two halves of a half2.
    """
    x = words.view("<u4")
    return (_gather_nibbles(x) | _gather_nibbles(x >> 4) << 16).view(np.uint8)


def _restore_nibbles(words: np.ndarray) -> np.ndarray:
    x = words.view("<u4")
    return (_spread_nibbles(x) | _spread_nibbles(x >> 16) << 4).view(np.uint8)


def _gather_nibbles(x: np.ndarray) -> np.ndarray:
    """The low nibble of each byte of a 32-bit word, side by side in the low 16 bits."""
    x = x & 0x0F0F0F0F
    x = (x | x >> 4) & 0x00FF00FF
    return (x | x >> 8) & 0x0000FFFF


def _spread_nibbles(x: np.ndarray) -> np.ndarray:
    """The low four nibbles of a 32-bit word, each in the low half of a byte: undoes `_gather_nibbles`."""
    x = x & 0x0000FFFF
    x = (x | x << 8) & 0x00FF00FF
    return (x | x << 4) & 0x0F0F0F0F


def _swap_middle(words: np.ndarray) -> np.ndarray:
    """In each 4 bytes, k0 k1 k2 k3 to k0 k2 k1 k3: its own inverse."""
    x = words.view("<u4")
    return (x & 0xFF0000FF | x >> 8 & 0x0000FF00 | x << 8 & 0x00FF0000).view(np.uint8)


@dataclass(frozen=True)
class TileLayout:
    """[rows, row bytes] <-> [rows / 32, columns / 16, 32, `bytes_per_group`].

    `bytes_per_group` are the bytes that store one row of a tile; `forward` and `backward` reorder within them.
    """

    name: str
    bytes_per_group: int
    forward: Callable[[np.ndarray], np.ndarray]
    backward: Callable[[np.ndarray], np.ndarray]

    def fits(self, rows: int, row_bytes: int) -> bool:
        """True if the matrix fills whole tiles."""
        return rows > 0 and row_bytes > 0 and rows % ROWS == 0 and row_bytes % self.bytes_per_group == 0

    def shape(self, rows: int, row_bytes: int) -> tuple[int, ...]:
        """Stored shape of a matrix. The scales' last extent of 1 is dropped."""
        tile = (rows // ROWS, row_bytes // self.bytes_per_group, ROWS)
        return tile if self.bytes_per_group == 1 else (*tile, self.bytes_per_group)

    def apply(self, words: np.ndarray) -> np.ndarray:
        """Tiles of canonical bytes uint8 [rows, row bytes]. Raises ValueError if they do not fill whole tiles."""
        rows, row_bytes = words.shape
        if not self.fits(rows, row_bytes):
            raise ValueError(f"[{rows}, {row_bytes}] bytes do not fill tiles of {ROWS} x {self.bytes_per_group}")
        groups = row_bytes // self.bytes_per_group
        source = np.ascontiguousarray(words).view(self._unit).reshape(rows // ROWS, ROWS, groups)
        tiles = np.empty((rows // ROWS, groups, ROWS), self._unit)
        for slab in self._slabs(source):
            tiles[slab] = source[slab].transpose(0, 2, 1)
            flat = tiles[slab].reshape(-1).view(np.uint8)
            flat[:] = self.forward(flat)
        return tiles.view(np.uint8).reshape(self.shape(rows, row_bytes))

    def invert(self, tiles: np.ndarray) -> np.ndarray:
        """Canonical bytes uint8 [rows, row bytes] of tiles."""
        bands, groups = tiles.shape[:2]
        source = np.ascontiguousarray(tiles).reshape(bands, -1)
        words = np.empty((bands, ROWS, groups), self._unit)
        for slab in self._slabs(source):
            inner = self.backward(source[slab].reshape(-1)).view(self._unit)
            words[slab] = inner.reshape(-1, groups, ROWS).transpose(0, 2, 1)
        return words.view(np.uint8).reshape(bands * ROWS, groups * self.bytes_per_group)

    @property
    def _unit(self) -> np.dtype:
        """One row of a tile as a single element, so that numpy moves it whole."""
        return np.dtype({1: "u1", 8: "<u8", 16: "<c16"}[self.bytes_per_group])

    @staticmethod
    def _slabs(bands: np.ndarray) -> Iterator[slice]:
        """Some bands at a time, so that what the bit moves leave behind stays in the cache."""
        step = max(1, SLAB_BYTES * len(bands) // max(1, bands.nbytes))
        for first in range(0, len(bands), step):
            yield slice(first, first + step)


CANONICAL = "canonical"
LAYOUTS: dict[str, TileLayout] = {
    layout.name: layout
    for layout in (
        TileLayout("v100-nvfp4", 8, _interleave_nibbles, _restore_nibbles),
        TileLayout("v100-fp8", 16, _swap_middle, _swap_middle),
        TileLayout("v100-scale", 1, _same, _same),
    )
}

# Which layout a recipe's `layout = "v100"` gives to each (kind of words, part); what is not listed stays canonical.
V100 = {
    ("nvfp4", "words"): "v100-nvfp4",
    ("nvfp4", "block_scale"): "v100-scale",
    ("fp8_e4m3", "words"): "v100-fp8",
}


def layout_named(name: str) -> TileLayout | None:
    """The layout, None for canonical. Raises InputError for a name this version does not know."""
    if name == CANONICAL:
        return None
    if name not in LAYOUTS:
        raise InputError(f"layout {name!r} is unknown to this duovolt (it knows canonical, {', '.join(LAYOUTS)}).")
    return LAYOUTS[name]


def stored_form(family: str, encoding: str, part: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """(layout name, stored shape) of a part of canonical `shape` in a recipe's layout family: `v100` or `canonical`."""
    wanted = V100.get((encoding.partition("/")[0], part)) if family == "v100" else None
    if wanted is None or len(shape) != 2 or not LAYOUTS[wanted].fits(*shape):
        return CANONICAL, shape
    return wanted, LAYOUTS[wanted].shape(*shape)


def stored_shape(layout: str, dtype: str, canonical_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a named layout gives a tensor. Raises InputError for a tensor that the layout does not take."""
    tile = layout_named(layout)
    if tile is None:
        return canonical_shape
    if len(canonical_shape) != 2 or dtype not in ("U8", "F8_E4M3") or not tile.fits(*canonical_shape):
        raise InputError(f"{dtype} {list(canonical_shape)} does not fill the tiles of {layout}")
    return tile.shape(*canonical_shape)


def to_canonical(words: np.ndarray, layout: str, canonical_shape: tuple[int, ...]) -> np.ndarray:
    """Undo a named layout. Raises InputError if the stored array does not match `canonical_shape`."""
    tile = layout_named(layout)
    expected = canonical_shape if tile is None else tile.shape(*canonical_shape)
    if words.shape != tuple(expected):
        raise InputError(f"a tensor of layout {layout!r} is stored as {list(words.shape)}, expected {list(expected)}.")
    return words if tile is None else tile.invert(words)
