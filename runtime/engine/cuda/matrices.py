"""From stored parts on a device to the form that the kernels multiply: tiles as they are, everything else as `HalfWeight`.

`keeps` says which stored tensors are used where they lie; the others are needed until their matrix is made from them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....checkpoint.encodings import PLAIN_ENCODINGS, words_of
from ....checkpoint.encodings.weights import tile_here
from ....checkpoint.errors import InputError
from ....checkpoint.layouts import CANONICAL
from ....checkpoint.manifest import TensorRecord
from ....kernels.weights import BAND, GROUP, TURN, Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight, Weight

ROWS_AT_ONCE = 4 << 20  # elements of a plain matrix that are turned into tiles at a time
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST_EXPONENT = 15  # rows of values that are rounded are scaled to a largest value in [2^14, 2^15)


@dataclass(frozen=True)
class Stored:
    """How one matrix is stored: its encoding, and whether its words stand in the kernels' tiles.

    `block`: rows and columns that one scale covers here, for FP8 with block scales.
    """

    encoding: str
    tiled: bool
    block: tuple[int, int] | None = None

    @staticmethod
    def of(record: TensorRecord) -> "Stored":
        """From the record of the words (or of the plain tensor)."""
        return Stored(record.encoding, record.layout != CANONICAL, tile_here(record.encoding, record))

    @property
    def kernel_block(self) -> tuple[int, int] | None:
        """The block, if the kernel takes it: a multiple of 32 x 64."""
        if self.block is None or self.block[0] % BAND or self.block[1] % TURN:
            return None
        return self.block

    def keeps(self, part: str) -> bool:
        """True if the stored part itself becomes part of the matrix."""
        words = words_of(self.encoding)
        if not self.tiled:
            return False
        if words == "nvfp4":
            return part != "global_scale" or self.encoding == "nvfp4"
        return (
            part == "words" or self.encoding == "fp8_e4m3" or (part == "tile_scale" and self.kernel_block is not None)
        )

    def device_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the matrix [rows, columns] on the device."""
        words = words_of(self.encoding)
        if not self.tiled or (self.block is not None and self.kernel_block is None):
            return -(-rows // BAND) * BAND * columns * 2 + 4 * rows
        if words == "nvfp4":
            return rows * columns // 2 + rows * columns // GROUP + 4
        if self.kernel_block is not None:
            return rows * columns + 4 * -(-rows // self.kernel_block[0]) * -(-columns // self.kernel_block[1])
        return rows * columns + 4 * rows


def matrix_of(name: str, stored: Stored, parts: Mapping[str, Tensor]) -> Weight:
    """The matrix from its stored parts, each in its stored shape and dtype (FP8 and nvfp4 as uint8).

    Values are exact, with two exceptions: a float32 matrix, and FP8 with block scales that no tiles of the kernels fit,
    are rounded to fp16's 11 bits. Raises InputError for what cannot be a matrix of the kernels.
    """
    try:
        return _matrix(stored, parts)
    except InputError as error:
        raise InputError(f"weight {name!r} ({stored.encoding}): {error}") from None
    except KeyError as missing:
        raise InputError(f"weight {name!r} ({stored.encoding}) lacks its {missing.args[0]}.") from None


def _matrix(stored: Stored, parts: Mapping[str, Tensor]) -> Weight:
    encoding = stored.encoding
    if encoding in PLAIN_ENCODINGS:
        return half_of(parts["plain"])
    words = parts["words"]
    if words_of(encoding) == "nvfp4":
        scale = parts["global_scale"].reshape(1)
        if encoding == "nvfp4/divisor":
            scale = 1.0 / scale
        if stored.tiled:
            return Nvfp4Weight(words, parts["block_scale"], scale)
        return _scaled(_nvfp4_values(words, parts["block_scale"]), scale.expand(words.shape[0]).contiguous())
    if stored.block is not None:
        return _blocks(words, parts["tile_scale"], stored)
    rows = words.shape[0] * BAND if stored.tiled else words.shape[0]
    scale = parts["row_scale"].reshape(-1) if encoding == "fp8_e4m3" else parts["tensor_scale"].reshape(1).expand(rows)
    if stored.tiled:
        return Fp8Weight(words, scale.contiguous())
    return _scaled(words.view(torch.float8_e4m3fn).half(), scale.contiguous())


def _scaled(values: Tensor, scale: Tensor) -> HalfWeight:
    """Exact fp16 values with a float32 scale a row."""
    return HalfWeight(HalfWeight.of(values).words, scale)


def _blocks(words: Tensor, scales: Tensor, stored: Stored) -> Weight:
    assert stored.block is not None
    if stored.tiled and stored.kernel_block is not None:
        return Fp8BlockWeight(words, scales, stored.kernel_block)
    if stored.tiled:  # blocks that the kernel does not take: back to rows of values
        matrix = Fp8Weight(words, torch.ones(words.shape[0] * BAND, device=words.device)).values()
    else:
        matrix = words.view(torch.float8_e4m3fn).float()
    rows, columns = stored.block
    spread = scales.repeat_interleave(rows, 0)[: matrix.shape[0]].repeat_interleave(columns, 1)[:, : matrix.shape[1]]
    return half_of(matrix * spread)


def half_of(matrix: Tensor) -> HalfWeight:
    """Tiles of a plain matrix [N, K], a few rows at a time, so that little memory is needed beside the result.

    float32 is rounded to fp16 after its rows are scaled by powers of two. Raises InputError as `HalfWeight.of` does.
    """
    rows, columns = matrix.shape if matrix.dim() == 2 else (0, 0)
    step = max(1, ROWS_AT_ONCE // max(1, columns) // BAND) * BAND
    if rows <= step:
        return _half(matrix)
    words = torch.empty(-(-rows // BAND), columns // GROUP, 2, BAND, 8, dtype=torch.float16, device=matrix.device)
    scale = torch.empty(rows, device=matrix.device)
    for first in range(0, rows, step):
        part = _half(matrix[first : first + step])
        words[first // BAND : first // BAND + part.words.shape[0]] = part.words
        scale[first : first + step] = part.scale
    return HalfWeight(words, scale)


def _half(matrix: Tensor) -> HalfWeight:
    if matrix.dtype != torch.float32:
        return HalfWeight.of(matrix)
    largest = matrix.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise InputError("a plain matrix holds an infinity or a NaN.")
    exponent = torch.frexp(largest).exponent - _LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent)).double()
    scaled = (matrix.double() * torch.exp2(-exponent)[:, None]).half()
    return _scaled(scaled, torch.exp2(exponent).float())


def _nvfp4_values(codes: Tensor, block_scale: Tensor) -> Tensor:
    """Canonical codes uint8 [N, K/2] (low nibble first) times block scales [N, K/16] (E4M3), exact in fp16 [N, K]."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    table = torch.tensor(_E2M1, dtype=torch.float16, device=codes.device)
    scales = block_scale.view(torch.float8_e4m3fn).half().repeat_interleave(GROUP, 1)
    return table[nibbles.long()] * scales


def aligned(nbytes: int, to: int = 256) -> int:
    """`nbytes` rounded up."""
    return math.ceil(nbytes / to) * to
