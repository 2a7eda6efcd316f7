"""E4M3 and E2M1 against the peers' tables: every code decoded, every rounding boundary encoded."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from duovolt.checkpoint.encodings import fp8, nvfp4, plain

TABLES = load_file(Path(__file__).parent.parent / "fixtures" / "codec_tables" / "codec_tables.safetensors")


def test_e4m3_decode() -> None:
    """All 256 codes, the sign of zero and both NaN included."""
    theirs = TABLES["e4m3_decode_f32"]
    nan = np.isnan(theirs)
    assert nan.sum() == 2 and (np.isnan(fp8.DECODE) == nan).all()
    assert (fp8.DECODE[~nan].view(np.uint32) == theirs[~nan].view(np.uint32)).all()


def test_e4m3_encode() -> None:
    """Every value, every midpoint and its neighbours. Zero has one code with us: -0 and what rounds to it is written +0."""
    values, theirs = TABLES["e4m3_encode_in_f32"], TABLES["e4m3_encode_out_u8"]
    assert len(values) == 1023
    ours = fp8.to_e4m3(values)
    np.testing.assert_array_equal(ours, np.where(theirs == 0x80, 0, theirs))


def test_every_e4m3_code_comes_back() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F and c != 0x80], np.uint8)
    np.testing.assert_array_equal(fp8.to_e4m3(fp8.DECODE[codes]), codes)
    assert fp8.to_e4m3(np.array([1e9, -1e9, np.inf, -np.inf, np.nan], np.float32)).tolist() == [
        0x7E,
        0xFE,
        0x7E,
        0xFE,
        0x7F,
    ]


def test_e2m1_decode() -> None:
    np.testing.assert_array_equal(nvfp4.DECODE.view(np.uint32), TABLES["e2m1_decode_f32"].view(np.uint32))


@pytest.mark.parametrize("peer", ["modelopt", "compressed_tensors"])
def test_e2m1_encode(peer: str) -> None:
    values, theirs = TABLES["e2m1_in_f32"], TABLES[f"e2m1_code_{peer}_u8"]
    np.testing.assert_array_equal(nvfp4.to_e2m1(values), np.where(theirs == 8, 0, theirs))


def test_nibble_order() -> None:
    """Q09: the even column is the low nibble."""
    codes = np.arange(16, dtype=np.uint8).reshape(1, 16)
    assert nvfp4.pack(codes).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    np.testing.assert_array_equal(nvfp4.unpack(nvfp4.pack(codes)), codes)


def test_blocks_of_zeros_and_tensors_of_zeros() -> None:
    """Q02: finite scales, exact zeros back."""
    weight = np.zeros((2, 32), np.float32)
    weight[0, 0] = 3
    scale = nvfp4.multiplier(3.0)
    words, block_scale = nvfp4.encode(weight, scale)
    assert (block_scale.reshape(-1)[1:] == nvfp4.ONE).all()
    decoded = nvfp4.decode(words, nvfp4.factors(block_scale, multiplier=scale))
    assert (decoded.view(np.uint32).reshape(-1)[1:] == 0).all() and decoded[0, 0] == pytest.approx(3, rel=0.07)
    assert nvfp4.multiplier(0.0) == 1 and fp8.row_scales(np.zeros(3)).tolist() == [1, 1, 1]
    assert fp8.decode_rows(fp8.encode_rows(weight[1:], np.ones(1, np.float32)), np.ones(1, np.float32)).max() == 0


def test_divisor_and_multiplier() -> None:
    """Q01: the same weights, the global scale in either direction."""
    scales = np.array([[0x38, 0x40]], np.uint8)  # 1 and 2
    by_multiplier = nvfp4.factors(scales, multiplier=np.float32(0.25))
    np.testing.assert_array_equal(by_multiplier, nvfp4.factors(scales, divisor=np.float32(4)))
    np.testing.assert_array_equal(by_multiplier, [[0.25, 0.5]])
    with pytest.raises(ValueError, match="exactly one"):
        nvfp4.factors(scales)


def test_small_scales_are_not_flushed() -> None:
    """Q05: the least block scale times a small multiplier lies below float16's range and stays what it is."""
    multiplier = np.float32(0.04 / 2688)
    factor = nvfp4.factors(np.array([[0x01]], np.uint8), multiplier=multiplier)
    assert factor[0, 0] == np.float32(2.0**-9) * multiplier and 2e-8 < factor[0, 0] < 3e-8


def test_plain_words_widen_exactly() -> None:
    words = np.array([0x0001, 0x8000, 0x7FC1, 0xFF80, 0x3F80], np.uint16)
    values = plain.to_float32(words, "BF16")
    np.testing.assert_array_equal(values.view(np.uint32), words.astype(np.uint32) << 16)
    np.testing.assert_array_equal(plain.to_bf16(values)[[0, 1, 3, 4]], words[[0, 1, 3, 4]])
    assert np.isnan(plain.to_float32(plain.to_bf16(values)[2:3], "BF16")[0])
    with pytest.raises(ValueError, match="I32"):
        plain.to_float32(words, "I32")
