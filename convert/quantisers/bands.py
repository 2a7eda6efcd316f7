"""One band of a matrix, source words in, stored words out: quantised and laid out, by compiled loops or by numpy."""

from dataclasses import dataclass

import numpy as np

from ...checkpoint.encodings import words_of
from ...checkpoint.encodings.nvfp4 import GROUP
from ...checkpoint.encodings.plain import to_float32
from ...checkpoint.layouts import CANONICAL, layout_named
from . import QUANTISERS, search
from .compiled import Loops
from .flushed import FIELDS, nonzero_codes

BAND_BYTES = 4 << 20  # quantised at a time by one thread; float32 temporaries are a few times larger
COMPILED = {"default", "search"}  # quantisers that have loops; the libraries' are rarely wanted in bulk
_TILED = {CANONICAL: False, "v100-nvfp4": True, "v100-scale": True, "v100-fp8": True}


@dataclass(frozen=True)
class BandEncoder:
    """Encodes bands for one recipe. `quantiser` is a name of QUANTISERS.

    `source` is always a contiguous array [rows, columns] of the source's own words (BF16 as uint16, F16, F32), rows a
    multiple of 32 where a layout is tiled.
    """

    quantiser: str
    loops: Loops

    @property
    def band_bytes(self) -> int:
        """Source bytes wanted at a time."""
        return BAND_BYTES

    @property
    def most_at_once(self) -> int | None:
        """Bands in flight, if fewer than there are workers."""
        return None

    def __str__(self) -> str:
        return str(self.loops)

    def _compiled(self, columns: int, *layouts: str) -> bool:
        known = all(layout in _TILED for layout in layouts)
        return self.loops.module is not None and self.quantiser in COMPILED and columns % GROUP == 0 and known

    def nvfp4(
        self, source: np.ndarray, dtype: str, scale: np.float32, words_layout: str, scales_layout: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stored words and block scales (uint8) for the global scale that the quantiser gave."""
        rows, columns = source.shape
        if not self._compiled(columns, words_layout, scales_layout):
            words, scales = QUANTISERS[self.quantiser].nvfp4_words(to_float32(source, dtype), scale, dtype)
            return _laid_out(words, words_layout), _laid_out(scales, scales_layout)
        blocks = rows * columns // GROUP
        found, found_scales = np.empty(blocks, np.uint64), np.empty(blocks, np.uint8)
        tiled = _TILED[words_layout], _TILED[scales_layout]
        values = _loadable(source, dtype)
        if self.quantiser == "search":
            self.loops.module.nvfp4_search(  # type: ignore[union-attr]
                values, scale, search.importance_of(None, columns), search.OFFSETS, found, found_scales, *tiled
            )
        else:
            self.loops.module.nvfp4(values, scale, found, found_scales, *tiled)  # type: ignore[union-attr]
        return found.view(np.uint8), found_scales

    def nonzero(self, words: np.ndarray, encoding: str) -> int:
        """Number of codes among stored words that are not a zero."""
        if self.loops.module is None or words.nbytes % 8:
            return nonzero_codes(words, encoding)
        wide = np.require(words, requirements=["C", "W"]).reshape(-1).view(np.uint64)
        return int(self.loops.module.nonzero_codes(wide, *FIELDS[words_of(encoding)]))

    def fp8(self, source: np.ndarray, dtype: str, scales: np.ndarray, layout: str) -> np.ndarray:
        """Stored words (uint8) for the row scales that the quantiser gave, float32 [rows]."""
        rows, columns = source.shape
        if not self._compiled(columns, layout):
            words = QUANTISERS[self.quantiser].fp8_words(to_float32(source, dtype), scales, dtype)
            return _laid_out(words, layout)
        found = np.empty(rows * columns // 8, np.uint64)
        self.loops.module.fp8(_loadable(source, dtype), scales, found, _TILED[layout])  # type: ignore[union-attr]
        return found.view(np.uint8)


def _loadable(source: np.ndarray, dtype: str) -> np.ndarray:
    """What the loops take: BF16 words, or float32 values; writable, since numba compiles read-only arrays anew."""
    values = to_float32(source, dtype) if dtype == "F16" else source
    return np.require(values, requirements=["C", "W"])


def _laid_out(words: np.ndarray, layout: str) -> np.ndarray:
    tile = layout_named(layout)
    return words if tile is None else tile.apply(words)
