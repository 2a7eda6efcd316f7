"""The linear kernels on a GPU against a float64 oracle, as machine code of the card and as a V100's PTX.

Figures are printed: pytest tests/kernels -m gpu -s.
"""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.kernels import pair_pass
from duovolt.kernels.linear import linear, linears, prepare, swiglu
from duovolt.kernels.module import PORTABLE, arches_for, forced_arch
from duovolt.kernels.prefill import linear_block
from duovolt.kernels.task import SWIGLU, task
from duovolt.kernels.tuning import STAGES, Choice, using
from duovolt.kernels.weights import Fp8Weight, HalfWeight, Nvfp4Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half", "bf16")
TOKENS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 24)
SHAPES = ((32, 16), (64, 560), (512, 5120), (5120, 3072), (1024, 8704))  # K: one tile, uneven turns, real ones
RELATIVE_L2 = 2e-3
OF_MAGNITUDE = 2e-6  # largest error over sum |W| |x|: float32 sums of up to 8704 terms
GUARD = 1024


@pytest.fixture(autouse=True, params=["native", "portable"])
def arch(request):
    native = arches_for(torch.cuda.get_device_capability())[0]
    wanted = native if request.param == "native" else PORTABLE
    with forced_arch(wanted):
        try:
            prepare(torch.device("cuda"))
        except EnvironmentFault as missing:
            pytest.skip(f"{wanted} cannot be had here: {missing}")
        yield wanted


def on_gpu(weight):
    parts = {
        name: value.cuda() if isinstance(value := getattr(weight, name), torch.Tensor) else value
        for name in weight.__dataclass_fields__
    }
    return type(weight)(**parts)


def matrix(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    if kind == "zero":
        return np.zeros(shape, np.float32)
    return (rng.standard_normal(shape) if kind == "normal" else rng.standard_t(2, shape)).astype(np.float32)


def activations(kind: str, columns: int, rng: np.random.Generator, count: int = max(TOKENS)) -> torch.Tensor:
    values = matrix(kind, (count, columns), rng)
    return torch.from_numpy(np.clip(values, -60000, 60000).astype(np.float16)).cuda()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("kind", ["normal", "heavy", "zero"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_against_float64_and_same_bits_for_every_token_count(encode, arch, encoding, shape, kind):
    rng = np.random.default_rng(shape[0] + shape[1])
    rows = shape[0] - 13 if encoding == "half" else shape[0]
    sample = encode(encoding, matrix(kind, (rows, shape[1]), rng))
    weight = on_gpu(sample.weight)
    x = activations("normal" if kind == "zero" else kind, shape[1], rng)
    exact = torch.from_numpy(sample.exact).cuda()
    expected = x.double() @ exact.t()
    magnitude = x.double().abs() @ exact.abs().t()
    whole = linear(x, weight)
    worst_l2 = worst = 0.0
    for tokens in TOKENS:
        guarded = torch.full((GUARD + tokens * rows + GUARD,), -7.0, device="cuda")
        out = guarded[GUARD:-GUARD].view(tokens, rows)
        assert linear(x[:tokens], weight, out) is out
        assert (guarded[:GUARD] == -7).all() and (guarded[-GUARD:] == -7).all(), "wrote outside of y"
        assert torch.isfinite(out).all()
        assert torch.equal(bits(out), bits(whole[:tokens])), f"other bits at T = {tokens}"
        error = out.double() - expected[:tokens]
        if kind == "zero":
            assert torch.equal(out, torch.zeros_like(out))
            continue
        worst_l2 = max(worst_l2, float(error.norm() / expected[:tokens].norm()))
        worst = max(worst, float((error.abs() / magnitude[:tokens]).max()))
    # A token in any place of any tile, alone and among others.
    for index in (1, 5, 8, 15, 23):
        alone = linear(x[index : index + 1].clone(), weight)
        assert torch.equal(bits(alone[0]), bits(whole[index])), f"token {index} alone"
    assert worst_l2 <= RELATIVE_L2 and worst <= OF_MAGNITUDE
    print(f"\n{arch} {encoding} {rows} x {shape[1]} {kind}: L2 {worst_l2:.1e}, error / |W||x| {worst:.1e}", end="")


def test_one_launch_of_several_has_the_bits_of_each_alone_on_any_grid_and_ring(encode, arch):
    rng = np.random.default_rng(3)
    rows = {"fp8": 320, "nvfp4": 96, "half": 24, "bf16": 24, "fp8_blocks": 128}
    weights = [on_gpu(encode(e, matrix("normal", (n, 1024), rng)).weight) for e, n in rows.items()]
    x = activations("normal", 1024, rng)
    alone = [linear(x, weight) for weight in weights]
    for tokens in (1, 8, 9, 24):
        wide = torch.full((tokens, sum(rows.values()) + 1), -7.0, device="cuda")
        outs = list(wide[:, :-1].split(list(rows.values()), dim=1))
        linears(x[:tokens], weights, outs)
        assert all(torch.equal(bits(out), bits(one[:tokens])) for out, one in zip(outs, alone, strict=True))
        assert (wide[:, -1] == -7).all()
    for stages, blocks in ((2, 1), (4, 2)):
        chosen = Choice({name: min(stages, 3) if name == "half" else stages for name in STAGES}, blocks)
        if arch == PORTABLE:  # rings are for newer cards, and the prebuilt PTX knows the defaults only
            chosen = Choice(blocks_a_sm=blocks)
        with using(chosen):
            for weight, one in zip(weights, alone, strict=True):
                for tokens in (4, 24):
                    twice = linears(x[:tokens], [weight] * 8)
                    assert all(torch.equal(bits(out), bits(one[:tokens])) for out in twice)


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_half_bands_have_the_bits_of_bands(encode, arch, encoding):
    if arch == PORTABLE:
        pytest.skip("code for sm_70 has bands only")
    rng = np.random.default_rng(9)
    for shape in ((64, 560), (5120, 3072), (1024, 8704)):
        weight, other = (on_gpu(encode(encoding, matrix("heavy", shape, rng)).weight) for _ in range(2))
        x = activations("normal", shape[1], rng)
        for tokens in TOKENS:
            own = x[:tokens]
            found = []
            for rows, blocks in ((32, 0), (16, 0), (16, 1), (16, 16), (0, 3)):
                with using(Choice(rows=rows, blocks_a_sm=blocks)):
                    stream = torch.ones(tokens, shape[0], device="cuda")
                    linear(own, weight, stream, residual=stream)
                    found.append([stream, *linears(own, [weight, other]), swiglu(own, weight, other)])
            for others in found[1:]:
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found[0], others, strict=True)), tokens


@pytest.mark.parametrize("shape", [(32, 4480), (160, 5120), (8704, 5120), (5120, 8704)], ids=str)
def test_slices_have_the_same_bits_for_every_token_count_and_company(encode, arch, shape):
    if arch == PORTABLE:
        pytest.skip("code for sm_70 has no slices")
    rng = np.random.default_rng(11)
    one = encode("nvfp4", matrix("heavy", (min(shape[0], 512), shape[1]), rng)).weight
    repeats = -(-shape[0] // one.shape[0])
    weight = on_gpu(Nvfp4Weight(*(part.repeat(repeats, 1, 1, *[1] * (part.dim() - 3))[: shape[0] // 32]
                                  for part in (one.words, one.block_scale)), one.scale))  # fmt: skip
    other = on_gpu(encode("nvfp4", matrix("normal", (96, shape[1]), rng)).weight)
    plain = on_gpu(encode("fp8", matrix("normal", (64, shape[1]), rng)).weight)
    x = activations("normal", shape[1], rng)
    whole, beside = linears(x, [weight, other])
    gates = swiglu(x, weight, weight)
    with using(Choice(slices=False)):
        torch.testing.assert_close(linear(x, weight), whole, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(swiglu(x, weight, weight), gates, rtol=2e-3, atol=1e-3)
    for tokens in TOKENS:
        own, stream = x[:tokens].clone(), torch.ones(tokens, shape[0], device="cuda")
        linear(own, weight, stream, residual=stream)
        assert torch.equal(bits(stream), bits(whole[:tokens] + 1.0)), tokens
        found = linears(own, [other, plain, weight])
        assert torch.equal(bits(found[0]), bits(beside[:tokens])) and torch.equal(bits(found[2]), bits(whole[:tokens]))
        assert torch.equal(bits(found[1]), bits(linear(own, plain)))
        assert torch.equal(bits(swiglu(own, weight, weight)), bits(gates[:tokens])), tokens


def test_gate_and_up_in_one_pass_have_the_bits_of_slices(encode, arch, monkeypatch):
    """Where the card has as many multiprocessors as the 27B's bands ask for; unlike gates and ups, and scales a row."""
    if arch == PORTABLE:
        pytest.skip("code for sm_70 has no slices")
    rng = np.random.default_rng(12)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    bands = 2 * processors + processors // 16
    weights = []
    for _ in range(2):
        one = encode("nvfp4", matrix("heavy", (512, 5120), rng)).weight
        shuffled = [part.repeat(-(-bands // 16), 1, 1, *[1] * (part.dim() - 3))[torch.randperm(bands)]
                    for part in (one.words, one.block_scale)]  # fmt: skip
        weights.append(on_gpu(Nvfp4Weight(*shuffled, one.scale * torch.rand(bands * 32).add(0.5))))
    x = activations("normal", 5120, rng)
    filled = task(x[:8], weights, [torch.empty(8, bands * 32, dtype=torch.float16, device="cuda")], SWIGLU)
    assert pair_pass.goes(filled, processors)
    passed = [swiglu(x[:tokens], *weights) for tokens in TOKENS]
    assert all(torch.equal(bits(own), bits(passed[-1][: len(own)])) for own in passed)
    monkeypatch.setattr(pair_pass, "goes", lambda *_: False)
    assert all(torch.equal(bits(own), bits(swiglu(x[: len(own)], *weights))) for own in passed)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_swiglu(encode, encoding):
    rng = np.random.default_rng(4)
    gate, up = (encode(encoding, matrix("normal", (512, 5120), rng) / 40) for _ in range(2))
    x = activations("normal", 5120, rng)
    opened, raised = (x.double() @ torch.from_numpy(part.exact).cuda().t() for part in (gate, up))
    expected = opened * torch.sigmoid(opened) * raised
    whole = swiglu(x, on_gpu(gate.weight), on_gpu(up.weight))
    assert float((whole.double() - expected).norm() / expected.norm()) <= RELATIVE_L2
    for tokens in TOKENS:
        part = swiglu(x[:tokens], on_gpu(gate.weight), on_gpu(up.weight))
        assert torch.equal(bits(part), bits(whole[:tokens]))


def test_residual_in_place_and_half_outputs(encode):
    rng = np.random.default_rng(5)
    weight = on_gpu(encode("fp8", matrix("normal", (512, 3072), rng)).weight)
    x = activations("normal", 3072, rng, 4)
    plain = linear(x, weight)
    stream = torch.randn(4, 512, device="cuda")
    expected = stream + plain
    assert torch.equal(linear(x, weight, stream, residual=stream), expected)
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    stream[1, 7], stream[3, 9] = 1e7, -1e7
    out = linear(x, weight, residual=stream, dtype=torch.float16, overflows=count)
    assert int(count) == 2 and torch.equal(out, (stream + plain).clamp(-65504, 65504).half())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("tokens", [1, 25, 300])
def test_many_tokens(encode, encoding, tokens):
    rng = np.random.default_rng(6)
    rows = 100 if encoding == "half" else 352
    for size in (1.0, 1e-9, 100.0):
        sample = encode(encoding, matrix("normal", (rows, 560), rng) * np.float32(size))
        x = activations("normal", 560, rng, tokens) * (1000 if size < 1 else 1)
        expected = x.double() @ torch.from_numpy(sample.exact).cuda().t()
        error = linear_block(x, on_gpu(sample.weight)).double() - expected
        # fp16 holds results below 2^-14 in steps of 2^-24 only.
        assert float(error.norm()) <= 1e-3 * float(expected.norm()) + 2.0**-25 * expected.numel() ** 0.5


def test_many_tokens_in_several_pieces(encode, monkeypatch):
    monkeypatch.setattr("duovolt.kernels.prefill.SCRATCH_BYTES", 2 * 32 * 256 * 3)
    rng = np.random.default_rng(7)
    sample = encode("nvfp4", matrix("normal", (32 * 7, 256), rng))
    x = activations("normal", 256, rng, 128)
    expected = x.double() @ torch.from_numpy(sample.exact).cuda().t()
    got = linear_block(x, on_gpu(sample.weight)).double()
    assert float((got - expected).norm()) <= 1e-3 * float(expected.norm())


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

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[torch.isfinite(every)]
    half = HalfWeight.of(torch.nn.functional.pad(every[:, None], (3, 12)))
    x[0] = torch.eye(16, dtype=torch.float16)[3]
    assert torch.equal(linear(x.cuda(), on_gpu(half))[0].cpu(), every.float())


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
