"""Shifts and masks of csrc/decode.cuh against the codec, for every code: once restated in numpy, once as compiled."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from duovolt.checkpoint.encodings import fp8, nvfp4
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.kernels.build import CSRC

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


def fp16_pairs(bits: np.ndarray) -> np.ndarray:
    """uint32 [...] -> float64 [..., 2], low half first."""
    return np.ascontiguousarray(bits).view(np.float16).reshape(*bits.shape, 2).astype(np.float64)


class Numpy:
    """The formulas of decode.cuh on uint32 arrays."""

    @staticmethod
    def nvfp4_pair(word: np.ndarray, pair: int) -> np.ndarray:
        shift = 9 - 4 * pair
        magnitude = word << np.uint32(shift) if shift > 0 else word >> np.uint32(-shift)
        return (word << np.uint32(12 - 4 * pair)) & np.uint32(0x80008000) | magnitude & np.uint32(0x0E000E00)

    @staticmethod
    def fp8_pair(word: np.ndarray, pair: int) -> np.ndarray:
        if pair == 0:
            return (word & np.uint32(0x00800080)) << np.uint32(8) | (word & np.uint32(0x007F007F)) << np.uint32(7)
        return word & np.uint32(0x80008000) | (word & np.uint32(0x7F007F00)) >> np.uint32(1)

    @staticmethod
    def scale_pair(scale: np.ndarray) -> np.ndarray:
        bits = (scale & np.uint32(0x80)) << np.uint32(8) | (scale & np.uint32(0x7F)) << np.uint32(7)
        return bits | bits << np.uint32(16)


class Compiled:
    """decode.cuh itself, through the host's C++ compiler."""

    def __init__(self, folder) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler (g++ or clang++)")
        source = folder / "decode.cpp"
        source.write_text(
            f'#define __device__\n#define __forceinline__ inline\n#include "{CSRC / "decode.cuh"}"\n'
            'extern "C" unsigned nvfp4(unsigned w, int p) { return nvfp4_pair(w, p); }\n'
            'extern "C" unsigned fp8(unsigned w, int p) { return fp8_pair(w, p); }\n'
            'extern "C" unsigned scale(unsigned s) { return scale_pair(static_cast<unsigned char>(s)); }\n'
        )
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "decode.so")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.decoder = ctypes.CDLL(str(folder / "decode.so"))

    def _each(self, function: str, words: np.ndarray, *more: int) -> np.ndarray:
        call = getattr(self.decoder, function)
        call.restype = ctypes.c_uint
        flat = [call(ctypes.c_uint(int(word)), *more) for word in words.reshape(-1)]
        return np.array(flat, np.uint32).reshape(words.shape)

    def nvfp4_pair(self, word: np.ndarray, pair: int) -> np.ndarray:
        return self._each("nvfp4", word, pair)

    def fp8_pair(self, word: np.ndarray, pair: int) -> np.ndarray:
        return self._each("fp8", word, pair)

    def scale_pair(self, scale: np.ndarray) -> np.ndarray:
        return self._each("scale", scale)


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def decoder(request, tmp_path_factory):
    return Numpy() if request.param == "numpy" else Compiled(tmp_path_factory.mktemp("decode"))


def test_every_nvfp4_code_in_every_place(decoder):
    """A band of 32 rows in which each of the 16 codes visits each of a tile's 16 columns."""
    codes = (np.arange(32)[:, None] + np.arange(32)[None, :]).astype(np.uint8) % 16
    tiles = LAYOUTS["v100-nvfp4"].apply(nvfp4.pack(codes))
    words = np.ascontiguousarray(tiles[0]).view("<u4")  # [K/16, 32 lanes, 2]
    pairs = np.stack([decoder.nvfp4_pair(words, pair) for pair in range(4)], axis=-1)  # [K/16, 32, 2, 4]
    values = fp16_pairs(pairs).reshape(2, 32, 16).transpose(1, 0, 2).reshape(32, 32) * 2.0**14
    np.testing.assert_array_equal(values, nvfp4.DECODE[codes].astype(np.float64))
    assert np.signbit(values[codes == 8]).all(), "minus zero keeps its sign"


def test_every_fp8_code_in_every_place(decoder):
    columns = len(FINITE) // 16 * 16 + 16
    codes = FINITE[(np.arange(32)[:, None] + np.arange(columns)[None, :]) % len(FINITE)]
    for row in range(4):  # four neighbours put every code in every byte of a word
        assert {int(c) for c in codes[row]} == {int(c) for c in FINITE}
    words = np.ascontiguousarray(LAYOUTS["v100-fp8"].apply(codes)[0]).view("<u4")  # [K/16, 32, 4]
    pairs = np.stack([decoder.fp8_pair(words, pair) for pair in range(2)], axis=-1)
    values = fp16_pairs(pairs).reshape(columns // 16, 32, 16).transpose(1, 0, 2).reshape(32, columns) * 2.0**8
    np.testing.assert_array_equal(values, fp8.DECODE[codes].astype(np.float64))


def test_every_block_scale_in_both_halves(decoder):
    values = fp16_pairs(decoder.scale_pair(FINITE.astype(np.uint32))) * 2.0**8
    np.testing.assert_array_equal(values[:, 0], fp8.DECODE[FINITE].astype(np.float64))
    np.testing.assert_array_equal(values[:, 0], values[:, 1])


def test_every_product_of_code_and_scale_is_exact_in_fp16(decoder):
    """(code * 2^-14) * (scale * 2^6), as the kernel multiplies them, for all 16 x 254 pairs."""
    scale = fp16_pairs(decoder.scale_pair(FINITE.astype(np.uint32)))[:, 0].astype(np.float16) * np.float16(2.0**14)
    words = np.arange(16, dtype=np.uint32)
    code = fp16_pairs(decoder.nvfp4_pair(words, 0))[:, 0].astype(np.float16)
    product = code[:, None] * scale[None, :]
    assert product.dtype == np.float16
    exact = nvfp4.DECODE.astype(np.float64)[:, None] * fp8.DECODE[FINITE].astype(np.float64)[None, :]
    np.testing.assert_array_equal(product.astype(np.float64) * 2.0**8, exact)
    assert np.abs(exact).max() == 2688.0
