"""The kernel on a GPU against a float64 oracle. Figures are printed: pytest tests/kernels -m gpu -s."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.linear import Fp8Weight, Nvfp4Weight, linear, prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 24)
SHAPES = ((32, 16), (64, 560), (512, 5120), (5120, 3072), (5120, 8704))  # K: one tile, uneven turns, real ones
RELATIVE_L2 = 2e-3
OF_MAGNITUDE = 2e-6  # largest error over sum |W| |x|: float32 sums of up to 8704 terms
GUARD = 1024


def on_gpu(weight):
    parts = {name: getattr(weight, name).cuda() for name in weight.__dataclass_fields__}
    return type(weight)(**parts)


def matrix(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    if kind == "zero":
        return np.zeros(shape, np.float32)
    return (rng.standard_normal(shape) if kind == "normal" else rng.standard_t(2, shape)).astype(np.float32)


def activations(kind: str, columns: int, rng: np.random.Generator) -> torch.Tensor:
    values = matrix(kind, (max(TOKENS), columns), rng)
    return torch.from_numpy(np.clip(values, -60000, 60000).astype(np.float16)).cuda()


@pytest.mark.parametrize("kind", ["normal", "heavy", "zero"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_against_float64_and_same_bits_for_every_token_count(encode, encoding, shape, kind):
    rng = np.random.default_rng(shape[0] + shape[1])
    sample = encode(encoding, matrix(kind, shape, rng))
    weight = on_gpu(sample.weight)
    x = activations("normal" if kind == "zero" else kind, shape[1], rng)
    exact = torch.from_numpy(sample.exact).cuda()
    expected = x.double() @ exact.t()
    magnitude = x.double().abs() @ exact.abs().t()
    whole = linear(x, weight)
    worst_l2 = worst = 0.0
    for tokens in TOKENS:
        guarded = torch.full((GUARD + tokens * shape[0] + GUARD,), -7.0, device="cuda")
        out = guarded[GUARD:-GUARD].view(tokens, shape[0])
        assert linear(x[:tokens], weight, out) is out
        assert (guarded[:GUARD] == -7).all() and (guarded[-GUARD:] == -7).all(), "wrote outside of y"
        assert torch.isfinite(out).all()
        assert torch.equal(out.view(torch.int32), whole[:tokens].view(torch.int32)), f"other bits at T = {tokens}"
        error = out.double() - expected[:tokens]
        if kind == "zero":
            assert torch.equal(out, torch.zeros_like(out))
            continue
        worst_l2 = max(worst_l2, float(error.norm() / expected[:tokens].norm()))
        worst = max(worst, float((error.abs() / magnitude[:tokens]).max()))
    # A token in any place of any tile, alone and among others.
    for index in (1, 5, 8, 15, 23):
        alone = linear(x[index : index + 1].clone(), weight)
        assert torch.equal(alone[0].view(torch.int32), whole[index].view(torch.int32)), f"token {index} alone"
    assert worst_l2 <= RELATIVE_L2 and worst <= OF_MAGNITUDE
    print(
        f"\n{encoding} {shape[0]} x {shape[1]} {kind}: relative L2 {worst_l2:.1e}, error / |W||x| {worst:.1e}", end=""
    )


def test_every_stored_value_survives_the_tensor_cores():
    """Each fp8 code, each nvfp4 code under each block scale, subnormals included, read back through x = one."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    fp8_words = torch.zeros(8, 1, 32, 16, dtype=torch.uint8)
    fp8_words.view(256, 16)[: len(codes), 0] = codes
    fp8 = Fp8Weight(fp8_words, torch.ones(256))
    x = torch.zeros(1, 16, dtype=torch.float16)
    x[0, 0] = 1.0
    got = linear(x.cuda(), on_gpu(fp8))[0].cpu()
    assert torch.equal(got, fp8.values()[:, 0])
    assert got[1] == 2.0**-9 and got.abs().max() == 448

    words = torch.zeros(16 * 8, 1, 32, 8, dtype=torch.uint8)
    scales = torch.zeros(16 * 8, 1, 32, dtype=torch.uint8)
    for code in range(16):
        words.view(16, 256, 8)[code, :, 0] = code
        scales.view(16, 256)[code, : len(codes)] = codes
    nvfp4 = Nvfp4Weight(words, scales, torch.ones(1))
    got = linear(x.cuda(), on_gpu(nvfp4))[0].cpu()
    assert torch.equal(got, nvfp4.values()[:, 0])
    assert got.abs().max() == 2688 and got[got > 0].min() == 2.0**-10


def test_infinity_and_nan_stay_in_their_token(encode):
    weight = on_gpu(encode("nvfp4", np.ones((64, 64), np.float32)).weight)
    x = torch.ones(3, 64, dtype=torch.float16, device="cuda")
    x[0, 5], x[2, 7] = float("inf"), float("nan")
    y = linear(x, weight)
    assert torch.isinf(y[0]).all() and torch.isfinite(y[1]).all() and torch.isnan(y[2]).all()


def test_scale_a_row_on_the_gpu(encode):
    weight = encode("nvfp4", np.ones((64, 64), np.float32)).weight
    fused = on_gpu(Nvfp4Weight(weight.words, weight.block_scale, torch.arange(64, dtype=torch.float32)))
    y = linear(torch.ones(2, 64, dtype=torch.float16, device="cuda"), fused)
    assert torch.equal(y[1], 64 * 2688 * torch.arange(64, dtype=torch.float32, device="cuda"))


def test_captured_in_a_graph_and_on_another_stream(encode):
    weight = on_gpu(encode("fp8", np.ones((64, 64), np.float32)).weight)
    x = torch.ones(2, 64, dtype=torch.float16, device="cuda")
    out = torch.zeros(2, 64, device="cuda")
    prepare(x.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, weight, out)
    assert (out == 0).all(), "capturing must not run the kernel"
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 64).all()
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 128).all()


def test_misaligned_activations_are_refused(encode):
    weight = on_gpu(encode("fp8", np.ones((64, 64), np.float32)).weight)
    buffer = torch.zeros(2 * 64 + 1, dtype=torch.float16, device="cuda")
    with pytest.raises(InputError, match="not a multiple of 16"):
        linear(buffer[1:].view(2, 64), weight)
