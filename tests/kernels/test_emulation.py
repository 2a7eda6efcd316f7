"""The linear's sources themselves, run on the host for both inner products: indices, fragments, decoding, order of sums."""

import ctypes

import numpy as np
import pytest
import torch

from duovolt.kernels.linear import THREADS, linear_reference, linears_reference, swiglu_reference
from duovolt.kernels.task import FLOAT, HALF, SWIGLU, Task, halve, matrix_of, task
from duovolt.kernels.weights import HalfWeight, Nvfp4Weight

ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half", "bf16")
ROWS, COLUMNS = 64, 16 * 35  # 35 tiles: warp 0 goes round twice and the last turn is cut short
GUARD = 64


def run(
    library, x, weights, outs, epilogue, residuals=None, overflows=None, blocks=None, rows=32, halves="halves"
) -> None:
    filled = task(x, weights, outs, epilogue, residuals, overflows)
    kinds = {weight.encoding for weight in weights}
    name = kinds.pop() if len(kinds) == 1 else "any"
    if rows == 16:
        halve(filled)
        name += "" if epilogue == SWIGLU else f"_{halves}"
    kernel = getattr(library, f"linear_{name}_{-(-x.shape[0] // 8) * 8}")
    ranges = [x.data_ptr(), x.nbytes, *ranges_of(weights)]
    array = (ctypes.c_size_t * len(ranges))(*ranges)
    assert library.size_of_task() == ctypes.sizeof(Task)
    blocks = filled.items if blocks is None else blocks
    assert library.emulate_linear(kernel, blocks, THREADS, ctypes.byref(filled), len(ranges) // 2, array) == 0


def ranges_of(weights) -> list[int]:
    """Address and size of everything that may be read of them."""
    tensors = [t for w in weights for t in (w.words, getattr(w, "block_scale", None), w.__dict__.get("scale"))]
    return [n for t in tensors if t is not None for n in (t.data_ptr(), t.nbytes)]


def guarded(tokens: int, rows: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full((GUARD + tokens * rows + GUARD,), -7.0, dtype=dtype)


def inner(buffer: torch.Tensor, rows: int) -> torch.Tensor:
    assert (buffer[:GUARD] == -7).all() and (buffer[-GUARD:] == -7).all(), "wrote outside of y"
    return buffer[GUARD:-GUARD].view(-1, rows)


def product(library, x, weight, blocks=None) -> np.ndarray:
    rows = weight.shape[0]
    buffer = guarded(x.shape[0], rows)
    run(library, x, [weight], [inner(buffer, rows)], FLOAT, blocks=blocks)
    return inner(buffer, rows).numpy()


@pytest.fixture
def halving_kernels(request, host_kernels):
    """Those for sm_80 and newer, whose items may be halves of bands."""
    if request.node.callspec.params["host_kernels"] == "volta":
        assert not hasattr(host_kernels, "linear_nvfp4_halves_8")
        pytest.skip("sm_70 has bands only")
    return host_kernels


def tokens_of(rng, count: int, columns: int = COLUMNS) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((count, columns)).astype(np.float16))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_against_float64_and_same_bits_for_every_token_count_and_grid(host_kernels, encode, encoding):
    torch.set_num_threads(1)
    rng = np.random.default_rng(5)
    rows = 52 if encoding == "bf16" else ROWS  # a last band that is not full
    sample = encode(encoding, rng.standard_t(3, (rows, COLUMNS)).astype(np.float32))
    x = tokens_of(rng, 24)
    whole = product(host_kernels, x, sample.weight)
    expected = x.double().numpy() @ sample.exact.T
    assert np.linalg.norm(whole - expected) <= 3e-7 * np.linalg.norm(expected)
    for tokens in (1, 9):
        part = product(host_kernels, x[:tokens].clone(), sample.weight, blocks=1)
        np.testing.assert_array_equal(part.view(np.uint32), whole[:tokens].view(np.uint32))
    alone = product(host_kernels, x[23:].clone(), sample.weight)
    np.testing.assert_array_equal(alone[0].view(np.uint32), whole[23].view(np.uint32))


def test_several_matrices_in_one_launch_have_the_bits_of_each_alone(host_kernels, encode):
    rng = np.random.default_rng(8)
    shapes = {"fp8": 32, "nvfp4": 64, "half": 20, "fp8_blocks": 32}
    weights = [encode(e, rng.standard_normal((n, 320)).astype(np.float32)).weight for e, n in shapes.items()]
    x = tokens_of(rng, 3, 320)
    alone = [product(host_kernels, x, weight) for weight in weights]
    wide = torch.full((3, sum(shapes.values())), -7.0)
    outs = list(wide.split(list(shapes.values()), dim=1))
    run(host_kernels, x, weights, outs, FLOAT)
    np.testing.assert_array_equal(wide.numpy(), np.concatenate(alone, axis=1))
    twice = [torch.empty(3, 64), torch.empty(3, 64)]
    run(host_kernels, x, [weights[1], weights[1]], twice, FLOAT, blocks=3)
    assert all(torch.equal(out, torch.from_numpy(alone[1])) for out in twice)
    for one, reference in zip(alone, linears_reference(x, weights), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), reference, rtol=1e-5, atol=1e-4)


def test_residual_is_added_in_place_and_half_outputs_are_cut_off_and_counted(host_kernels, encode):
    rng = np.random.default_rng(9)
    weight = encode("fp8", rng.standard_normal((ROWS, 64)).astype(np.float32)).weight
    x = tokens_of(rng, 2, 64)
    plain = product(host_kernels, x, weight)
    stream = torch.from_numpy(rng.standard_normal((2, ROWS)).astype(np.float32))
    expected = stream.numpy() + plain
    run(host_kernels, x, [weight], [stream], FLOAT, residuals=[stream])
    np.testing.assert_array_equal(stream.numpy(), expected)
    large = torch.zeros(2, ROWS)
    large[0, 3], large[1, 5], large[1, 6] = 1e6, -1e6, 1e4
    out, count = torch.zeros(2, ROWS, dtype=torch.float16), torch.zeros(1, dtype=torch.int32)
    run(host_kernels, x, [weight], [out], HALF, residuals=[large], overflows=count)
    assert int(count) == 2 and out[0, 3] == 65504 and out[1, 5] == -65504
    assert torch.equal(out, torch.from_numpy((large.numpy() + plain).clip(-65504, 65504)).half())
    again, counted = torch.zeros_like(out), torch.zeros_like(count)
    linear_reference(x, weight, again, residual=large, dtype=torch.float16, overflows=counted)
    assert torch.equal(counted, count)
    torch.testing.assert_close(again, out, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 8, 11])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_swiglu(host_kernels, encode, encoding, tokens):
    rng = np.random.default_rng(10)
    gate, up = (encode(encoding, rng.standard_normal((ROWS, 192)).astype(np.float32)) for _ in range(2))
    x = tokens_of(rng, tokens, 192)
    buffer = guarded(tokens, ROWS, torch.float16)
    run(host_kernels, x, [gate.weight, up.weight], [inner(buffer, ROWS)], SWIGLU, blocks=1)
    got = inner(buffer, ROWS)
    opened, raised = (x.double().numpy() @ part.exact.T for part in (gate, up))
    expected = torch.from_numpy(opened / (1 + np.exp(-opened)) * raised)
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got, swiglu_reference(x, gate.weight, up.weight), rtol=1e-3, atol=1e-3)


HALVES = [
    (encoding, "halves", tokens, grid) for encoding in ("nvfp4", "fp8") for tokens, grid in ((1, None), (9, 1), (24, 3))
]


@pytest.mark.parametrize("encoding, halves, tokens, blocks", [*HALVES, ("fp8", "deep", 1, None), ("fp8", "deep", 8, 2)])
def test_half_bands_have_the_bits_of_bands(halving_kernels, encode, encoding, halves, tokens, blocks):
    rng = np.random.default_rng(12)
    columns = 16 * 75  # warps go round once, twice, and to a turn that is cut short
    shapes = (64, 32)
    weights = [encode(encoding, rng.standard_normal((n, columns)).astype(np.float32)).weight for n in shapes]
    x = tokens_of(rng, tokens, columns)
    stream = torch.from_numpy(rng.standard_normal((tokens, sum(shapes))).astype(np.float32))
    found = []
    for rows, grid in ((32, None), (16, blocks)):
        buffer = guarded(tokens, sum(shapes))
        out = inner(buffer, sum(shapes))
        out.copy_(stream)
        outs = list(out.split(list(shapes), dim=1))
        run(halving_kernels, x, weights, outs, FLOAT, residuals=outs, blocks=grid, rows=rows, halves=halves)
        found.append(inner(buffer, sum(shapes)).numpy().view(np.uint32))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("tokens, blocks", [(1, 1), (11, None)])
@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_gate_and_up_side_by_side_have_the_bits_of_one_after_the_other(
    halving_kernels, encode, encoding, tokens, blocks
):
    rng = np.random.default_rng(13)
    columns = 16 * 75
    gate, up = (encode(encoding, rng.standard_normal((ROWS, columns)).astype(np.float32)).weight for _ in range(2))
    x = tokens_of(rng, tokens, columns)
    found = []
    for rows, grid in ((32, None), (16, blocks)):
        buffer = guarded(tokens, ROWS, torch.float16)
        run(halving_kernels, x, [gate, up], [inner(buffer, ROWS)], SWIGLU, blocks=grid, rows=rows)
        found.append(inner(buffer, ROWS).numpy().view(np.uint16))
    np.testing.assert_array_equal(*found)
    assert found[0].any()


def test_a_scale_a_row_replaces_the_global_scale(host_kernels, encode):
    rng = np.random.default_rng(6)
    weight = encode("nvfp4", rng.standard_normal((ROWS, 64)).astype(np.float32)).weight
    rows = torch.arange(1, ROWS + 1, dtype=torch.float32)
    fused = Nvfp4Weight(weight.words, weight.block_scale, rows)
    x = tokens_of(rng, 3, 64)
    torch.testing.assert_close(torch.from_numpy(product(host_kernels, x, fused)), linear_reference(x, fused))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extremes_of_every_encoding_survive(host_kernels, encode, encoding):
    """Largest and smallest block scales and values in one matrix, where a lost subnormal would show."""
    matrix = np.zeros((32, 64), np.float32)
    matrix[0, :16] = 2688.0
    matrix[1, :16] = 0.5 * 2.0**-9  # smallest code times smallest block scale
    matrix[1, 0] = 6 * 2.0**-9
    if encoding == "fp8_blocks":
        matrix[1, :16] = matrix[1, 0] = 0.015625
    if encoding == "half":
        matrix[0, :16], matrix[1, :16] = 65504.0, 2.0**-24
    if encoding == "bf16":
        matrix[0, :16], matrix[1, :16] = 2.0**127 * 1.75, 2.0**-133
    x = torch.zeros(1, 64, dtype=torch.float16)
    x[0, 3] = 2.0**-3
    sample = encode(encoding, matrix)
    assert (sample.exact[:2, 3] > 0).all(), "the codec gave zero: this would prove nothing"
    np.testing.assert_array_equal(
        product(host_kernels, x, sample.weight)[0], (sample.exact[:, 3] / 8).astype(np.float32)
    )


@pytest.mark.parametrize("blocks", [1, 3])  # of four warps: twenty items
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dequantised_tiles(host_kernels, encode, encoding, blocks):
    rng = np.random.default_rng(11)
    rows = 90 if encoding == "half" else 96
    sample = encode(encoding, rng.standard_normal((rows, 16 * 37)).astype(np.float32))
    weight, bands, groups = sample.weight, 2, 37
    out = torch.full((bands * 32 + 2, 16 * groups), -7.0, dtype=torch.float16)
    filled = matrix_of(weight)
    kernel = getattr(host_kernels, f"dequantise_{weight.encoding}")
    ranges = ranges_of([weight])
    factor = ctypes.c_float(0.5)
    stray = host_kernels.emulate_dequantise(
        *(kernel, blocks, ctypes.byref(filled), ctypes.c_void_p(out[1:].data_ptr()), groups, 1, bands, factor),
        *(len(ranges) // 2, (ctypes.c_size_t * len(ranges))(*ranges)),
    )
    assert stray == 0 and (out[0] == -7).all() and (out[-1] == -7).all()
    expected = np.zeros((bands * 32, 16 * groups))
    expected[: rows - 32] = sample.exact[32:] * 0.5
    np.testing.assert_array_equal(out[1:-1].numpy(), expected.astype(np.float32).astype(np.float16))


def test_bf16_keeps_every_value_within_thirty_powers_of_two_of_the_largest():
    exponents = torch.arange(0, -40, -1).float()
    row = torch.exp2(exponents + 20).to(torch.bfloat16) * 1.5
    weight = HalfWeight.of(torch.nn.functional.pad(row, (0, 8))[None])
    values = (weight.values() * weight.scale[:, None])[0, :40].double()
    exact = row.double()
    assert torch.equal(values[:32], exact[:32])
    assert ((values - exact).abs() <= 2.0**-39 * exact[0]).all()
