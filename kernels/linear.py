"""Decode linear on a GPU: few tokens times a quantised matrix in its V100 layout, and a torch reference of it.

y[t, n] = s[n] * sum_k x[t, k] * W[n, k], with W the stored values before the last scale: E4M3 values (fp8), or E2M1
values times their E4M3 block scale (nvfp4). Products of fp16 with fp16 are exact, sums are float32, s is applied once at
the end in float32. docs/kernels.md has the tiling, docs/layouts.md the bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .module import load

SOURCE = "linear.cu"
MAX_TOKENS = 24  # four lanes of one token and five drafts
BAND = 32  # rows a block computes; the tile's rows
GROUP = 16  # columns a tile
THREADS = 256
_TOKENS_A_PRODUCT = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NIBBLE_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that stands in each nibble of a word, low nibble first
_BYTE_COLUMNS = (0, 2, 1, 3)  # likewise for the bytes of an fp8 word


@dataclass(frozen=True)
class Nvfp4Weight:
    """An nvfp4 matrix [N, K] in layouts v100-nvfp4 and v100-scale.

    words uint8 [N/32, K/16, 32, 8]; block_scale uint8 [N/32, K/16, 32] (E4M3, no NaN code); scale float32 [1], the
    multiplier of the whole matrix, or [N], one a row, where matrices with their own multipliers stand side by side.
    Raises InputError if the parts do not fit one another.
    """

    words: Tensor
    block_scale: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        _check_tiles("words", self.words, 8)
        bands, groups = self.words.shape[:2]
        _check("block_scale", self.block_scale, torch.uint8, (bands, groups, BAND), self.words.device)
        if self.scale.shape != (1,):
            _check("scale", self.scale, torch.float32, (bands * BAND,), self.words.device)
        _check("scale", self.scale, torch.float32, tuple(self.scale.shape), self.words.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * BAND, self.words.shape[1] * GROUP

    def values(self) -> Tensor:
        """float32 [N, K] before `scale`; exact."""
        nibbles = torch.stack((self.words & 15, self.words >> 4), dim=-1)
        codes = _in_column_order(nibbles.reshape(*self.words.shape[:3], 2, 8), _NIBBLE_COLUMNS)
        table = torch.tensor(_E2M1, device=codes.device)
        scales = self.block_scale.view(torch.float8_e4m3fn).float()
        return _as_matrix(table[codes.long()] * scales[..., None])


@dataclass(frozen=True)
class Fp8Weight:
    """An fp8 matrix [N, K] in layout v100-fp8: words uint8 [N/32, K/16, 32, 16] (E4M3, no NaN code); scale float32 [N].

    Raises InputError if the parts do not fit one another.
    """

    words: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        _check_tiles("words", self.words, 16)
        _check("scale", self.scale, torch.float32, (self.words.shape[0] * BAND,), self.words.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * BAND, self.words.shape[1] * GROUP

    def values(self) -> Tensor:
        """float32 [N, K] before `scale`; exact."""
        words = _in_column_order(self.words.reshape(*self.words.shape[:3], 4, 4), _BYTE_COLUMNS)
        return _as_matrix(words.contiguous().view(torch.float8_e4m3fn).float())


Weight = Nvfp4Weight | Fp8Weight


def linear(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """x float16 [T, K], T = 1..24, times the weight transposed -> float32 [T, N], on torch's current stream.

    Row t has the same bits for every T. Written into `out` (contiguous, no overlap with the inputs) if given. No
    synchronisation and no workspace; may be captured in a graph once `prepare` was called.
    Raises InputError if shapes, dtypes, contiguity, alignment or devices do not fit, EnvironmentFault if the kernel
    cannot be built, loaded or started.
    """
    out = _checked_output(x, weight, out)
    if x.device.type != "cuda":
        raise InputError(f"x is on {x.device}: this kernel runs on a CUDA device; linear_reference runs on any.")
    for name, tensor in (("x", x), ("words", weight.words)):
        if tensor.data_ptr() % 16:
            raise InputError(f"{name} starts at an address that is not a multiple of 16: the kernel loads 16 bytes.")
    tokens = x.shape[0]
    rows, columns = weight.shape
    encoding, block_scale = ("nvfp4", weight.block_scale) if isinstance(weight, Nvfp4Weight) else ("fp8", None)
    padded = -(-tokens // _TOKENS_A_PRODUCT) * _TOKENS_A_PRODUCT
    scale_stride = 0 if weight.scale.numel() == 1 else 1
    load(SOURCE, x.device.index).launch(
        f"linear_{encoding}_{padded}",
        rows // BAND,
        THREADS,
        (x, weight.words, block_scale, weight.scale, scale_stride, out, tokens, columns // GROUP),
    )
    return out


def linear_reference(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """What `linear` computes, in float32 torch operations on any device; errors and shapes are the same."""
    out = _checked_output(x, weight, out)
    return out.copy_((x.float() @ weight.values().t()) * weight.scale)


def prepare(device: torch.device) -> None:
    """Compile and load the kernels for a CUDA device, so that no later call has to."""
    load(SOURCE, torch.cuda.current_device() if device.index is None else device.index)


def _checked_output(x: Tensor, weight: Weight, out: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise InputError(f"x is {list(x.shape)}: expected [T, {columns}] with T from 1 to {MAX_TOKENS}.")
    _check("x", x, torch.float16, (x.shape[0], columns), weight.words.device)
    if out is None:
        return torch.empty(x.shape[0], rows, dtype=torch.float32, device=x.device)
    _check("out", out, torch.float32, (x.shape[0], rows), x.device)
    return out


def _check_tiles(name: str, tensor: Tensor, bytes_per_group: int) -> None:
    if tensor.dim() != 4 or 0 in tensor.shape or tensor.shape[2:] != (BAND, bytes_per_group):
        raise InputError(f"{name} is {list(tensor.shape)}: expected [N/{BAND}, K/{GROUP}, {BAND}, {bytes_per_group}].")
    _check(name, tensor, torch.uint8, tuple(tensor.shape), tensor.device)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} is {list(tensor.shape)}: expected {list(shape)}.")
    if tensor.dtype != dtype:
        raise InputError(f"{name} is {tensor.dtype}: expected {dtype}.")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, the rest on {device}: they must share a device.")
    if not tensor.is_contiguous():
        raise InputError(f"{name} {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())}).")


def _in_column_order(stored: Tensor, columns: tuple[int, ...]) -> Tensor:
    """stored [..., words, places], with column columns[p] of its word at place p -> [..., columns in order]."""
    places = torch.tensor(columns, device=stored.device).argsort()
    return stored[..., places].flatten(-2)


def _as_matrix(tiles: Tensor) -> Tensor:
    """[N/32, K/16, 32, 16] -> [N, K]."""
    bands, groups = tiles.shape[:2]
    return tiles.permute(0, 2, 1, 3).reshape(bands * BAND, groups * GROUP)
