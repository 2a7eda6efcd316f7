"""Matrices [N, K] as the linear kernels hold them: tiles of 32 rows x 16 columns, and the scales that go with them.

`values()` is float32 [N, K] before `scale`, exact. docs/layouts.md has the bytes of a tile; words of N / 32 bands of K / 16
tiles come first in every shape. Constructors raise InputError if the parts do not fit one another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError

BAND = 32  # rows a block computes; the tile's rows
GROUP = 16  # columns a tile
TURN = 64  # columns that a warp adds up at a time: the finest block of fp8 scales
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NIBBLE_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that stands in each nibble of a word, low nibble first
_BYTE_COLUMNS = (0, 2, 1, 3)  # likewise for the bytes of an fp8 word
_HALF_EXPONENT = 15  # rows of a bf16 matrix are scaled to a largest value in [2^14, 2^15)


@dataclass(frozen=True)
class Nvfp4Weight:
    """Layouts v100-nvfp4 and v100-scale.

    words uint8 [N/32, K/16, 32, 8]; block_scale uint8 [N/32, K/16, 32] (E4M3, no NaN code); scale float32 [1], the
    multiplier of the whole matrix, or [N], one a row, where matrices with their own multipliers stand side by side.
    """

    words: Tensor
    block_scale: Tensor
    scale: Tensor
    encoding = "nvfp4"

    def __post_init__(self) -> None:
        _check_tiles("words", self.words, 8)
        bands, groups = self.words.shape[:2]
        check("block_scale", self.block_scale, torch.uint8, (bands, groups, BAND), self.words.device)
        if self.scale.shape != (1,):
            check("scale", self.scale, torch.float32, (bands * BAND,), self.words.device)
        check("scale", self.scale, torch.float32, tuple(self.scale.shape), self.words.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * BAND, self.words.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it, scales included."""
        return self.words.nbytes + self.block_scale.nbytes + self.scale.nbytes

    def values(self) -> Tensor:
        nibbles = torch.stack((self.words & 15, self.words >> 4), dim=-1)
        codes = _in_column_order(nibbles.reshape(*self.words.shape[:3], 2, 8), _NIBBLE_COLUMNS)
        table = torch.tensor(_E2M1, device=codes.device)
        scales = self.block_scale.view(torch.float8_e4m3fn).float()
        return _as_matrix(table[codes.long()] * scales[..., None])


@dataclass(frozen=True)
class Fp8Weight:
    """Layout v100-fp8: words uint8 [N/32, K/16, 32, 16] (E4M3, no NaN code); scale float32 [N]."""

    words: Tensor
    scale: Tensor
    encoding = "fp8"

    def __post_init__(self) -> None:
        _check_tiles("words", self.words, 16)
        check("scale", self.scale, torch.float32, (self.words.shape[0] * BAND,), self.words.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * BAND, self.words.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it, scales included."""
        return self.words.nbytes + self.scale.nbytes

    def values(self) -> Tensor:
        return _fp8_values(self.words)


@dataclass(frozen=True)
class Fp8BlockWeight:
    """As Fp8Weight, with one scale a block: block_scale float32 [ceil(N / rows), ceil(K / columns)], block (rows, columns).

    `rows` is a multiple of 32 and `columns` of 64: where a split cut through a block, its scales are repeated until the
    blocks fit. `values()` has the block scales in it; they are float32, so each value is rounded once.
    """

    words: Tensor
    block_scale: Tensor
    block: tuple[int, int] = (128, 128)
    encoding = "fp8_blocks"

    def __post_init__(self) -> None:
        _check_tiles("words", self.words, 16)
        rows, columns = self.block
        if rows <= 0 or columns <= 0 or rows % BAND or columns % TURN:
            raise InputError(f"fp8 blocks of {rows} x {columns}: expected multiples of {BAND} x {TURN}.")
        grid = (-(-self.shape[0] // rows), -(-self.shape[1] // columns))
        check("block_scale", self.block_scale, torch.float32, grid, self.words.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * BAND, self.words.shape[1] * GROUP

    @property
    def scale(self) -> Tensor:
        """Ones: nothing is left to multiply by."""
        return torch.ones(1, device=self.words.device)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it, scales included."""
        return self.words.nbytes + self.block_scale.nbytes

    def values(self) -> Tensor:
        scales = self.block_scale.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return _fp8_values(self.words) * scales[: self.shape[0], : self.shape[1]]


@dataclass(frozen=True)
class HalfWeight:
    """fp16 values in tiles of their own: words float16 [ceil(N/32), K/16, 2, 32, 8]; scale float32 [N].

    A tile's columns 0..7 of all 32 rows stand before its columns 8..15. Rows past N are zero. `of` makes it.
    """

    words: Tensor
    scale: Tensor
    encoding = "half"

    def __post_init__(self) -> None:
        if self.words.dim() != 5 or 0 in self.words.shape or self.words.shape[2:] != (2, BAND, 8):
            raise InputError(f"words is {list(self.words.shape)}: expected [N/{BAND}, K/{GROUP}, 2, {BAND}, 8].")
        check("words", self.words, torch.float16, tuple(self.words.shape), self.words.device)
        if -(-self.scale.numel() // BAND) != self.words.shape[0]:
            raise InputError(f"scale is {list(self.scale.shape)}: expected one a row of {self.words.shape[0]} bands.")
        check("scale", self.scale, torch.float32, (self.scale.numel(),), self.words.device)

    @classmethod
    def of(cls, matrix: Tensor) -> "HalfWeight":
        """Tiles of a float16 or bfloat16 matrix [N, K], K a multiple of 16; any N.

        fp16 is kept as it is. The rows of bf16 are scaled by powers of two to fp16's range, which is exact but for values
        2^31 times smaller than the largest of their row: those are rounded, by at most 2^-39 of that largest value.
        Raises InputError for other dtypes and shapes, and for infinities and NaNs.
        """
        if matrix.dtype not in (torch.float16, torch.bfloat16) or matrix.dim() != 2 or 0 in matrix.shape:
            raise InputError(
                f"a plain matrix is {matrix.dtype} {list(matrix.shape)}: expected float16 or bfloat16 [N, K]."
            )
        rows, columns = matrix.shape
        if columns % GROUP:
            raise InputError(f"a plain matrix has {columns} columns: expected a multiple of {GROUP}.")
        if not bool(torch.isfinite(matrix).all()):
            raise InputError("a plain matrix holds an infinity or a NaN.")
        scale = torch.ones(rows, device=matrix.device)
        if matrix.dtype == torch.bfloat16:
            largest = matrix.abs().amax(dim=1).float()
            exponent = torch.frexp(largest).exponent - _HALF_EXPONENT
            exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
            scale = _power_of_two(exponent).float()
            matrix = (matrix.double() * _power_of_two(-exponent)[:, None]).half()
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, -rows % BAND))
        tiles = padded.view(-1, BAND, columns // GROUP, 2, 8).permute(0, 2, 3, 1, 4).contiguous()
        return cls(tiles, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.scale.numel(), self.words.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it, scales included."""
        return self.words.nbytes + self.scale.nbytes

    def values(self) -> Tensor:
        bands, groups = self.words.shape[:2]
        matrix = self.words.permute(0, 3, 1, 2, 4).reshape(bands * BAND, groups * GROUP)
        return matrix[: self.shape[0]].float()


Weight = Nvfp4Weight | Fp8Weight | Fp8BlockWeight | HalfWeight


def dense(weight: Weight) -> Tensor:
    """The matrix, scales included: float32 [N, K], each value rounded once, twice where there are two scales."""
    return weight.values() * weight.scale.reshape(-1, 1)


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises InputError unless `tensor` is contiguous and has this dtype, shape and device."""
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} is {list(tensor.shape)}: expected {list(shape)}.")
    if tensor.dtype != dtype:
        raise InputError(f"{name} is {tensor.dtype}: expected {dtype}.")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, the rest on {device}: they must share a device.")
    if not tensor.is_contiguous():
        raise InputError(f"{name} {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())}).")


def _check_tiles(name: str, tensor: Tensor, bytes_per_group: int) -> None:
    if tensor.dim() != 4 or 0 in tensor.shape or tensor.shape[2:] != (BAND, bytes_per_group):
        raise InputError(f"{name} is {list(tensor.shape)}: expected [N/{BAND}, K/{GROUP}, {BAND}, {bytes_per_group}].")
    check(name, tensor, torch.uint8, tuple(tensor.shape), tensor.device)


def _fp8_values(words: Tensor) -> Tensor:
    ordered = _in_column_order(words.reshape(*words.shape[:3], 4, 4), _BYTE_COLUMNS)
    return _as_matrix(ordered.contiguous().view(torch.float8_e4m3fn).float())


def _in_column_order(stored: Tensor, columns: tuple[int, ...]) -> Tensor:
    """stored [..., words, places], with column columns[p] of its word at place p -> [..., columns in order]."""
    places = torch.tensor(columns, device=stored.device).argsort()
    return stored[..., places].flatten(-2)


def _as_matrix(tiles: Tensor) -> Tensor:
    """[N/32, K/16, 32, 16] -> [N, K]."""
    bands, groups = tiles.shape[:2]
    return tiles.permute(0, 2, 1, 3).reshape(bands * BAND, groups * GROUP)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly, by its bits: torch compiles its `exp2` at run time, in every process anew."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
