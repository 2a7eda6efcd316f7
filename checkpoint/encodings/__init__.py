"""What stored words mean: each encoding as a list of stored parts, with exact decode and encode beside it.

An encoding is data: which tensors it stores for a matrix [rows, columns], and how many logical elements one stored
element covers along each axis. Splitting, joining and inspecting need nothing else.
"""

from dataclasses import dataclass

from ..errors import InputError
from ..manifest import PartName


@dataclass(frozen=True)
class Part:
    """One stored tensor of an encoding.

    `suffix` replaces the final `.weight` of the logical name. `unit[axis]` is the number of logical elements that one
    stored element covers along that axis; None: the part has no extent along it, and is replicated when it is cut.
    """

    name: PartName
    suffix: str
    dtype: str
    unit: tuple[int | None, int | None]

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Canonical stored shape for a logical matrix. Raises InputError if the columns do not fill whole elements."""
        extents = []
        for extent, unit in ((rows, self.unit[0]), (columns, self.unit[1])):
            if unit is None:
                continue
            if extent % unit:
                raise InputError(f"{extent} elements do not fill groups of {unit} ({self.name} of [{rows}, {columns}])")
            extents.append(extent // unit)
        return tuple(extents)


WORDS_FP8 = Part("words", ".weight", "F8_E4M3", (1, 1))
ROW_SCALE = Part("row_scale", ".weight_scale", "F32", (1, None))
WORDS_NVFP4 = Part("words", ".weight", "U8", (1, 2))
BLOCK_SCALE_NVFP4 = Part("block_scale", ".weight_scale", "F8_E4M3", (1, 16))
GLOBAL_SCALE = Part("global_scale", ".weight_scale_2", "F32", (None, None))

# Matrix encodings with scales; bf16, fp16 and fp32 store the one tensor under its own name and shape.
MATRIX_ENCODINGS: dict[str, tuple[Part, ...]] = {
    "fp8_e4m3": (ROW_SCALE, WORDS_FP8),
    "nvfp4": (GLOBAL_SCALE, WORDS_NVFP4, BLOCK_SCALE_NVFP4),
}
PLAIN_ENCODINGS: dict[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
PLAIN_OF_DTYPE = {dtype: name for name, dtype in PLAIN_ENCODINGS.items()}


def part_of(encoding: str, part: str) -> Part | None:
    """The description of one stored part; None for the plain encodings. Raises InputError for unknown names."""
    if encoding in PLAIN_ENCODINGS and part == "plain":
        return None
    for candidate in MATRIX_ENCODINGS.get(encoding, ()):
        if candidate.name == part:
            return candidate
    raise InputError(f"encoding {encoding!r} has no part {part!r}; this duovolt knows {sorted(MATRIX_ENCODINGS)}.")


def part_name(weight: str, part: Part) -> str:
    """Stored name of a part: `X.weight` with its ending replaced."""
    return weight.removesuffix(".weight") + part.suffix
