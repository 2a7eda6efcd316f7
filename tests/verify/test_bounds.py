"""The bounds of quantised values: they hold for every value the encodings can meet, and are no wider than a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.encodings import fp8, nvfp4
from duovolt.verify.errors import ErrorSums, fp8_bound, nvfp4_bound

# Magnitudes from subnormal block scales to the largest weight, exact ties and steps, zeros.
VALUES = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(2.0**-20, 2.0**-8, width=32),
    st.sampled_from([0.0, 1.0, -6.0, 0.25, 5.0, 2.0**-9, 448.0, 2688.0, 2.0**-30]),
)


def matrices(rows: int, columns: int) -> st.SearchStrategy[np.ndarray]:
    flat = st.lists(VALUES, min_size=rows * columns, max_size=rows * columns)
    return flat.map(lambda values: np.array(values, np.float32).reshape(rows, columns))


@given(weight=matrices(2, 32))
@settings(max_examples=150, deadline=None)
def test_nvfp4_bound_holds(weight: np.ndarray) -> None:
    multiplier = nvfp4.multiplier(float(np.abs(weight).max()))
    words, scales = nvfp4.encode(weight, multiplier)
    decoded = nvfp4.decode(words, nvfp4.factors(scales, multiplier=multiplier))
    assert (np.abs(weight - decoded) <= nvfp4_bound(weight, scales, multiplier)).all()


@given(weight=matrices(2, 16))
@settings(max_examples=150, deadline=None)
def test_fp8_bound_holds(weight: np.ndarray) -> None:
    scale = fp8.row_scales(np.abs(weight).max(axis=1))
    decoded = fp8.decode_rows(fp8.encode_rows(weight, scale), scale)
    assert (np.abs(weight - decoded) <= fp8_bound(weight, scale)).all()


@pytest.mark.parametrize(("y", "half_step"), [(0.0, 0.25), (1.9, 0.25), (2.1, 0.5), (3.9, 0.5), (4.1, 1.0), (6.0, 1.0)])
def test_nvfp4_half_steps(y: float, half_step: float) -> None:
    """In units of the group's factor, for a scale of 1 and a multiplier of 1."""
    bound = nvfp4_bound(np.full((1, 16), y, np.float32), np.full((1, 1), nvfp4.ONE), np.float32(1))
    np.testing.assert_allclose(bound, half_step, rtol=1e-4)


@pytest.mark.parametrize(
    ("y", "half_step"),
    [(0.0, 2.0**-10), (2.0**-6, 2.0**-10), (1.0, 2.0**-4), (1.99, 2.0**-4), (2.0, 2.0**-3), (448, 16)],
)
def test_fp8_half_steps(y: float, half_step: float) -> None:
    bound = fp8_bound(np.full((1, 1), y, np.float32), np.ones(1, np.float32))
    np.testing.assert_allclose(bound, half_step, rtol=1e-4)


def test_sums_over_bands_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    weight, decoded = rng.standard_normal((2, 96, 32)).astype(np.float32)
    whole, banded = ErrorSums(), ErrorSums()
    whole.add(weight, decoded)
    for first in (0, 32, 64):
        banded.add(weight[first : first + 32], decoded[first : first + 32])
    a, b = whole.row("x", "nvfp4"), banded.row("x", "nvfp4")
    assert a.max_abs == b.max_abs == np.abs(weight - decoded).max()
    assert b.relative_l2 == pytest.approx(a.relative_l2, rel=1e-12) and b.cosine == pytest.approx(a.cosine, rel=1e-12)


def test_a_tensor_of_zeros() -> None:
    exact, wrong = ErrorSums(), ErrorSums()
    exact.add(np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32))
    wrong.add(np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32))
    assert (exact.row("x", "nvfp4").relative_l2, exact.row("x", "nvfp4").cosine) == (0.0, 1.0)
    assert (wrong.row("x", "nvfp4").relative_l2, wrong.row("x", "nvfp4").cosine) == (float("inf"), 0.0)
