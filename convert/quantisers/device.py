"""The quantisers as torch operations, so that a graphics card gives the same bytes as the numpy formulas.

Every operation rounds once and stands alone: nothing can be contracted into a fused multiply-add, no division is by a
host scalar (which torch turns into a product with the reciprocal on a card), and rounding to E4M3 is done on the bits of
float32, since the cast to torch's own type differs between versions.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.encodings import fp8, nvfp4
from ...checkpoint.layouts import CANONICAL, ROWS
from .flushed import nonzero_codes
from .search import OFFSETS

BAND_BYTES = 32 << 20  # source bytes at a time: enough to fill a card
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_GROUP = nvfp4.GROUP


@functools.cache
def _table(name: str, device: torch.device) -> Tensor:
    values = {"e4m3": fp8.DECODE, "e2m1": nvfp4.DECODE}[name]
    return torch.from_numpy(values.copy()).to(device)


def _scalar(value: np.float32, like: Tensor) -> Tensor:
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def load(source: np.ndarray, dtype: str, device: torch.device) -> Tensor:
    """float32 values on the device, every one exact, of words [rows, columns] as a source stores them."""
    words = source.view(np.int16) if dtype == "BF16" else source
    found = torch.from_numpy(np.require(words, requirements=["C", "W"])).to(device)
    return (found.view(torch.bfloat16) if dtype == "BF16" else found).float()


def _through(values: Tensor, dtype: str) -> Tensor:
    return values if dtype == "F32" else values.to(_DTYPES[dtype]).float()


def to_e4m3(x: Tensor) -> Tensor:
    """uint8 words of finite float32 values: checkpoint/encodings/fp8.py's rounding, bit for bit."""
    magnitude = x.abs().clamp(max=448.0)
    bits = magnitude.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + 2.0**14).view(torch.int32) - 0x46800000
    code = torch.where(magnitude < 2.0**-6, subnormal, normal).to(torch.uint8)
    return torch.where((x < 0) & (code != 0), code | 0x80, code)


def to_e2m1(y: Tensor) -> Tensor:
    """uint8 codes 0..15 of float32 values: checkpoint/encodings/nvfp4.py's rounding, bit for bit."""
    magnitude = y.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for limit, inside in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += magnitude >= limit if inside else magnitude > limit
    return code | (((y < 0) & (code != 0)).to(torch.uint8) << 3)


def _signed_e4m3(x: Tensor) -> Tensor:
    return to_e4m3(x) | (torch.signbit(x).to(torch.uint8) << 7)


def _signed_e2m1(y: Tensor) -> Tensor:
    return to_e2m1(y) | ((y < 0).to(torch.uint8) << 3)


def _blocks(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1, _GROUP)


def _decoded(words: Tensor) -> Tensor:
    return _table("e4m3", words.device)[words.long()]


def _default_scales(blocks: Tensor, scale: np.float32) -> Tensor:
    amax = blocks.abs().amax(dim=2)
    wanted = (amax / _scalar(np.float32(6) * scale, amax)).clamp(2.0**-9, 448.0)
    return torch.where(amax == 0, int(nvfp4.ONE), to_e4m3(wanted))


def _default_nvfp4(weight: Tensor, scale: np.float32, dtype: str) -> tuple[Tensor, Tensor]:
    blocks = _blocks(weight)
    words = _default_scales(blocks, scale)
    return to_e2m1(blocks / (_decoded(words) * _scalar(scale, weight))[:, :, None]), words


def _tree_sum(terms: Tensor) -> Tensor:
    for half in (8, 4, 2, 1):
        terms = terms[..., :half] + terms[..., half : 2 * half]
    return terms[..., 0]


def _searched_nvfp4(weight: Tensor, scale: np.float32, dtype: str) -> tuple[Tensor, Tensor]:
    blocks = _blocks(weight)
    usual = _default_scales(blocks, scale)
    lives = (blocks != 0).any(dim=2)
    best_scale, best_codes = usual, torch.zeros_like(blocks, dtype=torch.uint8)
    best_error = torch.full(usual.shape, torch.inf, dtype=torch.float64, device=weight.device)
    decode = _table("e2m1", weight.device)
    for step in OFFSETS.tolist():
        word = usual.int() + step
        possible = (word >= 1) & (word <= 0x7E) & (lives | (step == 0))
        word = torch.where(possible, word, int(nvfp4.ONE)).to(torch.uint8)
        factor = (_decoded(word) * _scalar(scale, weight))[:, :, None]
        codes = to_e2m1(blocks / factor)
        miss = blocks.double() - (decode[codes.long()] * factor).double()
        error = _tree_sum(miss * miss)
        better = possible & (error < best_error)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, word, best_scale)
        best_codes = torch.where(better[:, :, None], codes, best_codes)
    return best_codes, best_scale


def _modelopt_nvfp4(weight: Tensor, scale: np.float32, dtype: str) -> tuple[Tensor, Tensor]:
    blocks = _blocks(weight)
    wanted = blocks.abs().amax(dim=2) / _scalar(np.float32(6) * scale, weight)
    words = _signed_e4m3(torch.where(wanted == 0, 1.0, wanted.clamp(2.0**-9, 448.0)))
    return _signed_e2m1(blocks / (_decoded(words) * _scalar(scale, weight))[:, :, None]), words


def _compressed_tensors_nvfp4(weight: Tensor, scale: np.float32, dtype: str) -> tuple[Tensor, Tensor]:
    blocks, divisor = _blocks(weight), _scalar(scale, weight)
    amax = blocks.abs().amax(dim=2)
    words = _signed_e4m3(divisor * _through(amax / _scalar(np.float32(6), amax), dtype))
    words = torch.where(words == 0, 0x20, words)
    return _signed_e2m1(blocks / (_decoded(words) / divisor)[:, :, None]), words


def _default_fp8(weight: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return to_e4m3(weight / scale[:, None])


def _modelopt_fp8(weight: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return _signed_e4m3(weight / scale[:, None])


def _compressed_tensors_fp8(weight: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return _signed_e4m3(_through(weight / scale[:, None], dtype))


Nvfp4 = Callable[[Tensor, np.float32, str], tuple[Tensor, Tensor]]
Fp8 = Callable[[Tensor, Tensor, str], Tensor]
# quantiser -> (codes [rows, groups, 16] and block scales [rows, groups]; words [rows, columns])
RULES: dict[str, tuple[Nvfp4, Fp8]] = {
    "default": (_default_nvfp4, _default_fp8),
    "search": (_searched_nvfp4, _default_fp8),
    "modelopt": (_modelopt_nvfp4, _modelopt_fp8),
    "compressed-tensors": (_compressed_tensors_nvfp4, _compressed_tensors_fp8),
}


def _interleave_nibbles(x: Tensor) -> Tensor:
    def gather(x: Tensor) -> Tensor:
        x = x & 0x0F0F0F0F
        x = (x | x >> 4) & 0x00FF00FF
        return (x | x >> 8) & 0x0000FFFF

    return gather(x) | gather(x >> 4) << 16


def _swap_middle(x: Tensor) -> Tensor:
    return x & (0xFF0000FF - (1 << 32)) | x >> 8 & 0x0000FF00 | x << 8 & 0x00FF0000


# layout -> bytes a row of a tile, and what is done to each four bytes (checkpoint/layouts says why)
_TILES: dict[str, tuple[int, Callable[[Tensor], Tensor] | None]] = {
    "v100-nvfp4": (8, _interleave_nibbles),
    "v100-fp8": (16, _swap_middle),
    "v100-scale": (1, None),
}


def laid_out(words: Tensor, layout: str) -> Tensor:
    """Canonical bytes uint8 [rows, row bytes] in a layout, flat. Rows and bytes fill whole tiles."""
    if layout == CANONICAL:
        return words.reshape(-1)
    size, move = _TILES[layout]
    tiles = words.reshape(-1, ROWS, words.shape[1] // size, size).transpose(1, 2).contiguous().reshape(-1)
    return tiles if move is None else move(tiles.view(torch.int32)).view(torch.uint8)


@dataclass(frozen=True)
class DeviceEncoder:
    """Encodes bands of one recipe on a torch device; takes and gives what `BandEncoder` does."""

    quantiser: str
    device: torch.device
    _turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(2))  # bounds the card's memory

    @property
    def band_bytes(self) -> int:
        """Source bytes wanted at a time."""
        return BAND_BYTES

    @property
    def most_at_once(self) -> int | None:
        """Bands in flight: one on the card, one on its way there, one on its way back."""
        return 3

    def __str__(self) -> str:
        name = f", {torch.cuda.get_device_name(self.device)}" if self.device.type == "cuda" else ""
        return f"torch on {self.device.type}{name}"

    @torch.inference_mode()
    def nvfp4(
        self, source: np.ndarray, dtype: str, scale: np.float32, words_layout: str, scales_layout: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stored words and block scales (uint8, flat) for the global scale that the quantiser gave."""
        with self._turn:
            codes, scales = RULES[self.quantiser][0](load(source, dtype, self.device), scale, dtype)
            pairs = codes.reshape(len(source), -1, 2)
            words = pairs[:, :, 0] | pairs[:, :, 1] << 4
            return laid_out(words, words_layout).cpu().numpy(), laid_out(scales, scales_layout).cpu().numpy()

    @torch.inference_mode()
    def fp8(self, source: np.ndarray, dtype: str, scales: np.ndarray, layout: str) -> np.ndarray:
        """Stored words (uint8, flat) for the row scales that the quantiser gave, float32 [rows]."""
        with self._turn:
            divisors = torch.from_numpy(np.array(scales, np.float32)).to(self.device)
            words = RULES[self.quantiser][1](load(source, dtype, self.device), divisors, dtype)
            return laid_out(words, layout).cpu().numpy()

    def nonzero(self, words: np.ndarray, encoding: str) -> int:
        """Number of codes among stored words that are not a zero."""
        return nonzero_codes(words, encoding)
