"""Linears of 25 and more tokens in one pass, emulated for three architectures and on a GPU, against float64."""

import numpy as np
import pytest
import torch

from duovolt.kernels import wide
from duovolt.kernels.task import FLOAT, HALF, SWIGLU
from duovolt.kernels.weights import Nvfp4Weight

from .support import Guarded, bits, relative

ENCODINGS = ("nvfp4", "fp8", "fp8_blocks", "half", "bf16")
PROCESSORS = 3  # of the emulated card
SUM_ERROR = 3e-7  # relative L2 of float32 sums of exact products


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """So that a small launch has whole tiles and cut ones, on a card too."""
    monkeypatch.setattr(wide, "processors", lambda device: PROCESSORS)
    found = wide.block_limit
    monkeypatch.setattr(wide, "block_limit", lambda device: found(device) if device.type == "cuda" else 227 << 10)


def moved(weight, device):
    parts = {
        name: part.to(device) if isinstance(part := getattr(weight, name), torch.Tensor) else part
        for name in weight.__dataclass_fields__
    }
    return type(weight)(**parts)


def tokens_of(rng, count: int, columns: int, device) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((count, columns)).astype(np.float16)).to(device)


def run(x, weights, epilogue=FLOAT, overflows=None) -> list[torch.Tensor]:
    """The outputs; what stands around them and the workspace's end must be as they were."""
    dtype = torch.float32 if epilogue == FLOAT else torch.float16
    count = 1 if epilogue == SWIGLU else len(weights)
    outs = [Guarded((x.shape[0], weight.shape[0]), dtype, x.device, weight.shape[0] + 3) for weight in weights[:count]]
    workspace = Guarded((wide.SLOTS * PROCESSORS, 2 * 64 * wide.TILE_ROWS), torch.float32, x.device)
    room = workspace.inner.view(-1)
    wide.multiply(x, weights, [out.inner for out in outs], epilogue, overflows=overflows, workspace=room)
    assert all(out.intact for out in outs) and workspace.intact
    return [out.inner for out in outs]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("bands", "tokens"), [(12, 25), (32, 64)])
def test_against_float64_and_the_same_bits_for_a_token_anywhere(every_device, encode, encoding, bands, tokens):
    rng = np.random.default_rng(5)
    rows = 32 * bands - (12 if encoding == "half" else 0)
    # Two tiles of three turns, both cut, of which one worker has an end and a beginning; or four tiles, three of them whole.
    columns = 16 * 19 if bands == 12 else 16 * 5
    sample = encode(encoding, rng.standard_t(3, (rows, columns)).astype(np.float32))
    weight = moved(sample.weight, every_device)
    x = tokens_of(rng, tokens, columns, every_device)
    (got,) = run(x, [weight])
    assert relative(got, x.double().cpu().numpy() @ sample.exact.T) <= SUM_ERROR
    if bands == 12:
        turned = run(x.roll(7, 0), [weight])[0]
        assert torch.equal(bits(turned), bits(got.roll(7, 0)))


@pytest.mark.parametrize("tokens", [24, 31, 32, 33, 48, 49, 63, 64, 65, 96, 97, 128, 129])
def test_every_count_of_tokens(device, encode, tokens):
    rng = np.random.default_rng(tokens)
    encoding = "nvfp4" if tokens % 2 else "fp8"
    sample = encode(encoding, rng.standard_normal((64, 16 * 5)).astype(np.float32))
    x = tokens_of(rng, tokens, 16 * 5, device)
    (got,) = run(x, [moved(sample.weight, device)])
    assert relative(got, x.double().cpu().numpy() @ sample.exact.T) <= SUM_ERROR


@pytest.mark.parametrize("columns", [16, 64, 80, 128, 144, 256])
def test_every_end_of_k(every_device, encode, columns):
    rng = np.random.default_rng(columns)
    encodings = ENCODINGS if columns == 80 else ("nvfp4", "fp8_blocks")
    samples = [encode(e, rng.standard_normal((32, columns)).astype(np.float32)) for e in encodings]
    x = tokens_of(rng, 27, columns, every_device)
    for sample in samples:
        (got,) = run(x, [moved(sample.weight, every_device)])
        assert relative(got, x.double().cpu().numpy() @ sample.exact.T) <= SUM_ERROR


def test_several_matrices_and_gates(every_device, encode):
    """Matrices that end within a tile and within a warp's two bands; fp16 outputs that overflow; gate and up."""
    rng = np.random.default_rng(8)
    samples = [encode("fp8", rng.standard_normal((rows, 144)).astype(np.float32)) for rows in (96, 32, 416, 64)]
    weights = [moved(sample.weight, every_device) for sample in samples]
    x = tokens_of(rng, 40, 144, every_device)
    for sample, got in zip(samples, run(x, weights), strict=True):
        assert relative(got, x.double().cpu().numpy() @ sample.exact.T) <= SUM_ERROR
    loud = x.clone()
    loud[3] *= 20000
    counts = torch.zeros(40, dtype=torch.int32, device=every_device)
    (got,) = run(loud, weights[2:3], HALF, counts)
    exact = loud.double().cpu().numpy() @ samples[2].exact.T
    beyond = (np.abs(exact) > 65504).sum(axis=1)
    assert counts.tolist() == beyond.tolist() and beyond[3] > 100
    assert relative(got, exact.clip(-65504, 65504)) <= 1e-3
    for rows in (64, 480):  # cut only; whole tiles and cut ones
        gate, up = (encode("nvfp4", rng.standard_normal((rows, 144)).astype(np.float32)) for _ in range(2))
        opened, raised = (x.double().cpu().numpy() @ part.exact.T for part in (gate, up))
        (got,) = run(x, [moved(gate.weight, every_device), moved(up.weight, every_device)], SWIGLU, counts)
        assert relative(got, opened / (1 + np.exp(-opened)) * raised) <= 1e-3


def test_extremes_and_a_scale_a_row(every_device):
    """Pairs of codes under the least and the largest scale, exactly; a scale a row in place of the matrix's own."""
    words = torch.arange(256, dtype=torch.uint8).repeat(32, 1).view(2, 16, 32, 8)
    scales = torch.full((2, 16, 32), 0x7E, dtype=torch.uint8)
    scales[1] = 1
    weight = Nvfp4Weight(words, scales, torch.arange(1, 65, dtype=torch.float32))
    values = (weight.values() * weight.scale[:, None]).numpy()
    x = torch.zeros(32, 256, dtype=torch.float16)
    for start in (0, 96, 224):
        x.zero_()
        x[:, start : start + 32] = torch.eye(32, dtype=torch.float16)
        (got,) = run(x.to(every_device), [moved(weight, every_device)])
        np.testing.assert_array_equal(got.cpu().numpy(), values[:, start : start + 32].T)


def test_what_is_no_number_stays_in_its_token(every_device, encode):
    weight = moved(encode("nvfp4", np.ones((64, 64), np.float32)).weight, every_device)
    x = torch.ones(26, 64, dtype=torch.float16, device=every_device)
    x[0, 5], x[25, 7] = float("inf"), float("nan")
    (y,) = run(x, [weight])
    assert torch.isinf(y[0]).all() and torch.isfinite(y[1:25]).all() and torch.isnan(y[25]).all()


def test_plans_cover_every_tile_and_keep_within_the_workspace():
    for processors in (1, 72, 80, 132):
        for bands in (1, 8, 9, 96, 160, 544, 1088):
            for tokens in (25, 64, 65, 200, 256):
                cut = wide.plan("fp8", tokens, bands, 320, processors)
                assert cut.width * cut.token_blocks >= tokens > cut.width * (cut.token_blocks - 1)
                assert cut.token_blocks * cut.workers <= max(processors, cut.token_blocks)
                assert (-(-bands // wide.TILE_BANDS) - cut.cut) % cut.workers == 0
                assert 4 * cut.partial_elements <= 48 << 20
    assert wide.plan("fp8", 65, 8, 320, 80).width == 48 and wide.plan("half", 65, 8, 320, 80).width == 32
    assert wide.plan("fp8", 64, 1, 8, 132).workers == 1  # one turn is all there is


def test_shared_memory_of_every_card():
    for arch, limit in (("compute_70", 96 << 10), ("sm_80", 163 << 10), ("sm_86", 99 << 10), ("sm_90", 227 << 10)):
        for encoding in ("nvfp4", "fp8", "fp8_blocks"):
            assert wide.widest(encoding, arch, limit) >= 32, (encoding, arch)
    assert wide.widest("fp8", "sm_86", 99 << 10) == 48 and wide.widest("fp8", "sm_90", 227 << 10) == 64
    assert wide.widest("half", "sm_86", 99 << 10) == 0  # takes the other way
