"""linear.cu itself, run on the host: indices, fragments, decoding and order of summation, without a GPU."""

import ctypes

import numpy as np
import pytest
import torch

from duovolt.kernels.linear import THREADS, Nvfp4Weight, linear_reference

ROWS, COLUMNS = 64, 16 * 35  # 35 tiles: warp 0 goes round twice and its second turn is cut short


def run(library, x: torch.Tensor, weight) -> np.ndarray:
    tokens, rows = x.shape[0], weight.shape[0]
    kind = "nvfp4" if isinstance(weight, Nvfp4Weight) else "fp8"
    kernel = getattr(library, f"linear_{kind}_{-(-tokens // 8) * 8}")
    scales = weight.block_scale.data_ptr() if kind == "nvfp4" else None
    guarded = torch.full((tokens + 2, rows), -7.0)
    stray_loads = library.emulate(
        kernel,
        rows // 32,
        THREADS,
        weight.words.shape[3],
        *(ctypes.c_void_p(p) for p in (x.data_ptr(), weight.words.data_ptr(), scales, weight.scale.data_ptr())),
        0 if weight.scale.numel() == 1 else 1,
        ctypes.c_void_p(guarded[1:].data_ptr()),
        tokens,
        weight.shape[1] // 16,
    )
    assert stray_loads == 0
    assert (guarded[0] == -7).all() and (guarded[-1] == -7).all(), "wrote outside of y"
    return guarded[1:-1].numpy()


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_against_float64_and_same_bits_for_every_token_count(host_kernels, encode, encoding):
    torch.set_num_threads(1)
    rng = np.random.default_rng(5)
    sample = encode(encoding, rng.standard_t(3, (ROWS, COLUMNS)).astype(np.float32))
    x = torch.from_numpy(rng.standard_normal((24, COLUMNS)).astype(np.float16))
    whole = run(host_kernels, x, sample.weight)
    expected = x.double().numpy() @ sample.exact.T
    assert np.linalg.norm(whole - expected) <= 2e-7 * np.linalg.norm(expected)
    for tokens in (1, 8, 9):
        part = run(host_kernels, x[:tokens].clone(), sample.weight)
        np.testing.assert_array_equal(part.view(np.uint32), whole[:tokens].view(np.uint32))
    alone = run(host_kernels, x[23:].clone(), sample.weight)
    np.testing.assert_array_equal(alone[0].view(np.uint32), whole[23].view(np.uint32))


def test_a_scale_a_row_replaces_the_global_scale(host_kernels, encode):
    rng = np.random.default_rng(6)
    weight = encode("nvfp4", rng.standard_normal((ROWS, 64)).astype(np.float32)).weight
    rows = torch.arange(1, ROWS + 1, dtype=torch.float32)
    fused = Nvfp4Weight(weight.words, weight.block_scale, rows)
    x = torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float16))
    torch.testing.assert_close(torch.from_numpy(run(host_kernels, x, fused)), linear_reference(x, fused))


def test_extremes_of_both_encodings_survive(host_kernels, encode):
    """Largest and smallest block scales and values in one matrix, where a lost subnormal would show."""
    matrix = np.zeros((32, 64), np.float32)
    matrix[0, :16] = 2688.0
    matrix[1, :16] = 0.5 * 2.0**-9  # smallest code times smallest block scale
    matrix[1, 0] = 6 * 2.0**-9
    x = torch.zeros(1, 64, dtype=torch.float16)
    x[0, 3] = 2.0**-3
    for encoding in ("nvfp4", "fp8"):
        sample = encode(encoding, matrix)
        assert (sample.exact[:2, 3] > 0).all(), "the codec gave zero: this would prove nothing"
        np.testing.assert_array_equal(
            run(host_kernels, x, sample.weight)[0], (sample.exact[:, 3] / 8).astype(np.float32)
        )
