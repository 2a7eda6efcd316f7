"""What stored words mean: each encoding as a list of stored parts, with exact decode and encode beside it.

An encoding is data: which tensors it stores for a matrix [rows, columns], and how many logical elements one stored
element covers along each axis. Splitting, joining and inspecting need nothing else.

The name of an encoding is what its words are, then after a slash how its scales differ from those that we write:
`fp8_e4m3` has a scale a row, `fp8_e4m3/tensor` one for the whole matrix, `fp8_e4m3/128x128` one a tile of 128 rows and
128 columns (edge tiles may be ragged); `nvfp4` has a global multiplier, `nvfp4/divisor` a global divisor.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError

PartName = Literal["plain", "words", "block_scale", "row_scale", "tensor_scale", "tile_scale", "global_scale"]


@dataclass(frozen=True)
class Part:
    """One stored tensor of an encoding.

    `suffix` replaces the final `.weight` of the logical name. `unit[axis]` is the number of logical elements that one
    stored element covers along that axis; None: the part has no extent along it, and is replicated when it is cut.
    `ragged`: the last element along an axis may cover fewer.
    """

    name: PartName
    suffix: str
    dtype: str
    unit: tuple[int | None, int | None]
    ragged: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Canonical stored shape for a logical matrix. Raises InputError if the columns do not fill whole elements."""
        extents = []
        for extent, unit in ((rows, self.unit[0]), (columns, self.unit[1])):
            if unit is None:
                continue
            if extent % unit and not self.ragged:
                raise InputError(f"{extent} elements do not fill groups of {unit} ({self.name} of [{rows}, {columns}])")
            extents.append(-(-extent // unit))
        return tuple(extents)


WORDS_FP8 = Part("words", ".weight", "F8_E4M3", (1, 1))
ROW_SCALE = Part("row_scale", ".weight_scale", "F32", (1, None))
WORDS_NVFP4 = Part("words", ".weight", "U8", (1, 2))
BLOCK_SCALE_NVFP4 = Part("block_scale", ".weight_scale", "F8_E4M3", (1, 16))
GLOBAL_SCALE = Part("global_scale", ".weight_scale_2", "F32", (None, None))
GLOBAL_DIVISOR = Part("global_scale", ".weight_global_scale", "F32", (None, None))
TENSOR_SCALE = Part("tensor_scale", ".weight_scale", "F32", (None, None))

# Matrix encodings that we quantise to; bf16, fp16 and fp32 store the one tensor under its own name and shape.
MATRIX_ENCODINGS: dict[str, tuple[Part, ...]] = {
    "fp8_e4m3": (ROW_SCALE, WORDS_FP8),
    "nvfp4": (GLOBAL_SCALE, WORDS_NVFP4, BLOCK_SCALE_NVFP4),
}
# Those that only come from sources quantised by others, beside `fp8_e4m3/RxC` for tiles of any size.
IMPORTED_ENCODINGS: dict[str, tuple[Part, ...]] = {
    "fp8_e4m3/tensor": (TENSOR_SCALE, WORDS_FP8),
    "nvfp4/divisor": (GLOBAL_DIVISOR, WORDS_NVFP4, BLOCK_SCALE_NVFP4),
}
PLAIN_ENCODINGS: dict[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# Numbers of rows, not weights: the id map of a draft head.
INDEX_ENCODINGS: dict[str, str] = {"int32": "I32"}
STORED_AS_IS = PLAIN_ENCODINGS | INDEX_ENCODINGS
PLAIN_OF_DTYPE = {dtype: name for name, dtype in PLAIN_ENCODINGS.items()}
_TILED = re.compile(r"fp8_e4m3/([1-9]\d{0,4})x([1-9]\d{0,4})")


def tiled(rows: int, columns: int) -> str:
    """The FP8 encoding with one scale a tile of `rows` x `columns`."""
    return f"fp8_e4m3/{rows}x{columns}"


def tile_of(encoding: str) -> tuple[int, int] | None:
    """Rows and columns that one scale of a tiled encoding covers; None for every other encoding."""
    match = _TILED.fullmatch(encoding)
    return None if match is None else (int(match[1]), int(match[2]))


def words_of(encoding: str) -> str:
    """What the words are, however they are scaled: `fp8_e4m3` or `nvfp4`; a plain encoding is its own."""
    return encoding.partition("/")[0]


def encoding_parts(encoding: str) -> tuple[Part, ...] | None:
    """The stored parts of a matrix encoding, in storage order; None for plain and unknown encodings."""
    tile = tile_of(encoding)
    if tile is not None:
        return Part("tile_scale", ".weight_scale", "F32", tile, ragged=True), WORDS_FP8
    return MATRIX_ENCODINGS.get(encoding) or IMPORTED_ENCODINGS.get(encoding)


def part_of(encoding: str, part: str) -> Part | None:
    """The description of one stored part; None for the plain encodings. Raises InputError for unknown names."""
    if encoding in STORED_AS_IS and part == "plain":
        return None
    for candidate in encoding_parts(encoding) or ():
        if candidate.name == part:
            return candidate
    known = sorted({**MATRIX_ENCODINGS, **IMPORTED_ENCODINGS})
    raise InputError(f"encoding {encoding!r} has no part {part!r}; this duovolt knows {known} and fp8_e4m3/RxC.")


def part_name(weight: str, part: Part) -> str:
    """Stored name of a part: `X.weight` with its ending replaced."""
    return weight.removesuffix(".weight") + part.suffix


def tile_ranges(unit: int, extent: int, ranges: Sequence[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """How tile scales of `unit` elements follow a rank's `ranges` of an axis of `extent`.

    Returns the elements that a scale covers on the rank, and the ranges counted in those. Where a cut falls inside a
    tile, that is the largest step that meets every cut: each scale is then repeated for the smaller tiles, and no value
    changes.
    """
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    whole = joined == [(0, extent)]
    fine = unit if whole else math.gcd(unit, *(edge for pair in joined for edge in pair))
    return fine, [(start // fine, -(-stop // fine)) for start, stop in joined]
