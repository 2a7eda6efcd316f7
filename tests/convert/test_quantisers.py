"""The default quantisers, against their formulas evaluated one value at a time with exact fractions and torch's own cast."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.encodings import fp8, nvfp4, plain

E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def nearest_even(value: Fraction, table: list[Fraction]) -> int:
    """Index of the nearest entry of a sorted table, ties to the even index, beyond the last to the last."""
    best = min(range(len(table)), key=lambda i: (abs(value - table[i]), i % 2))
    return best


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_e2m1_is_nearest_with_ties_to_even(values: list[float]) -> None:
    codes = nvfp4.to_e2m1(np.array(values, np.float32))
    for value, code in zip(values, codes, strict=True):
        magnitude = nearest_even(Fraction(abs(value)), E2M1)
        assert code == magnitude | (8 if value < 0 and magnitude else 0)


def test_e4m3_rounds_as_torch_does_on_every_midpoint_and_neighbour() -> None:
    finite = np.unique(np.abs(fp8.DECODE[np.isfinite(fp8.DECODE)]))
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    points = np.concatenate(
        [finite, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    )
    points = np.concatenate([points, -points]).astype(np.float32)
    expected = torch.from_numpy(points).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    expected = np.where(expected == 0x80, 0, expected)  # ours writes zero as +0
    np.testing.assert_array_equal(fp8.to_e4m3(points), expected)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_e4m3_rounds_as_torch_does(values: list[float]) -> None:
    points = np.array(values, np.float32)
    expected = torch.from_numpy(points).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fp8.to_e4m3(points), np.where(expected == 0x80, 0, expected))


@given(st.integers(0, 2**32 - 1))
def test_bf16_rounds_as_torch_does(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    expected = torch.from_numpy(value).to(torch.bfloat16)
    ours = plain.to_bf16(value)
    if np.isnan(value[0]):
        assert np.isnan(plain.to_float32(ours, "BF16")[0])
    else:
        assert ours[0] == expected.view(torch.uint16).numpy()[0]


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    scale = 2.0 ** draw(st.integers(-100, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = (rng.standard_t(draw(st.sampled_from([1.5, 4, 50])), (rows, groups * 16)) * scale).astype(np.float32)
    weight[rng.random(weight.shape) < draw(st.sampled_from([0, 0.5, 0.95]))] = 0
    return np.clip(weight, -3e38, 3e38)


@settings(max_examples=150)
@given(matrices())
def test_nvfp4_error_is_within_half_a_step(weight: np.ndarray) -> None:
    scale = nvfp4.multiplier(float(np.abs(weight).max(initial=0)))
    words, block_scale = nvfp4.encode(weight, scale)
    decoded = nvfp4.decode(words, nvfp4.factors(block_scale, multiplier=scale))
    assert np.isfinite(decoded).all() and not fp8.has_nan(block_scale)
    factor = np.repeat(fp8.DECODE[block_scale].astype(np.float64) * float(scale), 16, axis=1)
    # Half the largest step (4 to 6) of E2M1; a block scale rounded down (by 1/17 at most) clamps the block's largest.
    assert (np.abs(weight.astype(np.float64) - decoded) <= factor * 1.0000001).all()
    np.testing.assert_array_equal(decoded[weight == 0], 0)


@settings(max_examples=150)
@given(matrices())
def test_fp8_error_is_within_half_a_step(weight: np.ndarray) -> None:
    scale = fp8.row_scales(np.abs(weight).max(axis=1))
    decoded = fp8.decode_rows(fp8.encode_rows(weight, scale), scale)
    bound = np.maximum(np.abs(weight.astype(np.float64)) * 2.0**-4, scale[:, None].astype(np.float64) * 2.0**-10)
    assert (np.abs(weight.astype(np.float64) - decoded) <= bound * 1.000001).all()
    np.testing.assert_array_equal(decoded[weight == 0], 0)


def test_zero_tensors_and_blocks_keep_finite_scales() -> None:
    """Q02: our formulas."""
    weight = np.zeros((2, 48), np.float32)
    assert nvfp4.multiplier(0.0) == 1
    words, scales = nvfp4.encode(weight, nvfp4.multiplier(0.0))
    assert not words.any() and (scales == nvfp4.ONE).all()
    weight[0, 20] = 3.0  # one block lives, its neighbours stay exact zeros
    words, scales = nvfp4.encode(weight, nvfp4.multiplier(3.0))
    assert scales[0, 0] == nvfp4.ONE and scales[1].tolist() == [nvfp4.ONE] * 3
    decoded = nvfp4.decode(words, nvfp4.factors(scales, multiplier=nvfp4.multiplier(3.0)))
    assert math.isclose(decoded[0, 20], 3.0, rel_tol=1e-6) and np.count_nonzero(decoded) == 1
    np.testing.assert_array_equal(fp8.row_scales(np.zeros(3, np.float32)), 1)


def test_a_small_block_beside_a_large_one_survives() -> None:
    """Q08: a block 250 times smaller than its tensor's largest value must not be flushed to zero."""
    weight = np.full((1, 32), 0.004, np.float32)
    weight[0, 16] = 1.0
    scale = nvfp4.multiplier(1.0)
    words, scales = nvfp4.encode(weight, scale)
    decoded = nvfp4.decode(words, nvfp4.factors(scales, multiplier=scale))
    np.testing.assert_allclose(decoded[0, :16], 0.004, rtol=0.07)


def test_smallest_block_scale_keeps_its_value_in_float32() -> None:
    """Block scale 2^-9 with global scale 0.04 / 2688: the product 2.9e-8 is zero in FP16, and must not be here."""
    scale = np.float32(0.04 / 2688)
    factor = nvfp4.factors(np.array([[1]], np.uint8), multiplier=scale)
    assert factor[0, 0] == np.float32(2.0**-9) * scale > 0


@pytest.mark.parametrize("divisor", [3632.0, 4416.0, 2688.0])
def test_a_divisor_is_divided_by(divisor: float) -> None:
    words = np.arange(8, dtype=np.uint8)[None] * 17
    factor = nvfp4.factors(np.array([[0x7E]], np.uint8), divisor=np.float32(divisor))
    assert factor[0, 0] == np.float32(448) / np.float32(divisor)
    codes = nvfp4.unpack(words)[0]
    np.testing.assert_array_equal(nvfp4.decode(words, factor)[0], nvfp4.DECODE[codes] * factor[0, 0])
    np.testing.assert_array_equal(nvfp4.pack(codes[None]), words)
