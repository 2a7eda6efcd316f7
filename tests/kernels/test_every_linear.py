"""Every kernel of the decode linear with all that may follow it, on the host: for few tokens and many, between guard bands.

Results are judged by float64 and by the float output's own bits: a residual is added to them, half outputs are rounded from them.
"""

import ctypes

import numpy as np
import pytest
import torch

from duovolt.kernels.task import FLOAT, HALF, SWIGLU
from duovolt.kernels.weights import Nvfp4Weight

from . import test_slices
from .test_emulation import ENCODINGS, guarded, inner, run

TOKENS = (1, 8, 9, 16, 24)
COLUMNS = 16 * 9  # a turn cut short
KINDS = {  # of kernels, with the rows of an item: encodings, token counts
    "bands": (32, ENCODINGS, TOKENS),
    "halves": (16, ("nvfp4", "fp8"), (1, 8, 9, 24)),
    "deep": (16, ("fp8",), (1, 8)),
    "any": (32, ENCODINGS, (1, 9, 24)),
}
CASES = [
    (kind, encoding, tokens)
    for kind, (_, encodings, counts) in KINDS.items()
    for encoding in encodings
    for tokens in counts
]


class Launch:
    """Launches of one kind of kernel, each with its outputs between guards. `samples`: two of one shape, and a smaller one;
    `company`: of another encoding, where a launch has several."""

    def __init__(self, emulated, encode, kind: str, encoding: str, tokens: int) -> None:
        rng = np.random.default_rng(31)
        x = torch.from_numpy(rng.standard_normal((24, COLUMNS)).astype(np.float16))
        rows = (52, 36) if encoding in ("half", "bf16") else (64, 32)
        self.samples = [
            encode(encoding, rng.standard_normal((n, COLUMNS)).astype(np.float32)) for n in (rows[0], *rows)
        ]
        other = "half" if encoding == "fp8" else "fp8"
        self.company = encode(other, rng.standard_normal((32, COLUMNS)).astype(np.float32)) if kind == "any" else None
        self.x = x[:tokens].clone()
        self.stream = torch.from_numpy(rng.standard_normal((24, 256)).astype(np.float32))[:tokens]
        self.emulated, self.kind, self.tokens = emulated, kind, tokens

    def outs(self, samples, epilogue: int, residual: str | None = None) -> tuple[torch.Tensor, int]:
        """Outputs of `samples` and their company, and how many were cut off. residual: None, "beside", "in place"."""
        weights = [sample.weight for sample in samples]
        weights += [self.company.weight] if self.company is not None else []
        counts = [weights[0].shape[0]] if epilogue == SWIGLU else [weight.shape[0] for weight in weights]
        width, kind = sum(counts), torch.float32 if epilogue == FLOAT else torch.float16
        buffer = guarded(self.tokens, width, kind)
        out, given, beside = inner(buffer, width), None, None
        if residual is not None:
            beside = out if residual == "in place" else self.stream[:, :width].contiguous()
            beside.copy_(self.stream[:, :width])
            given = list(beside.split(counts, dim=1))
        overflows = torch.zeros(1, dtype=torch.int32)
        blocks = None if self.company is not None else 1
        options = {
            "blocks": blocks,
            "rows": KINDS[self.kind][0],
            "halves": self.kind,
            "residuals": given,
            "overflows": overflows,
        }
        run(self.emulated, self.x, weights, list(out.split(counts, dim=1)), epilogue, **options)
        if residual == "beside":
            assert torch.equal(beside, self.stream[:, :width])
        return inner(buffer, width), int(overflows)

    def exact(self, samples) -> np.ndarray:
        every = [*samples, *([self.company] if self.company is not None else [])]
        return self.x.double().numpy() @ np.concatenate([sample.exact for sample in every]).T


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def cut_off(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-65504, 65504).half()


@pytest.fixture(scope="session")
def whole() -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Products and gates of 24 tokens in bands, by host and encoding: what every kernel's bits must be."""
    return {}


@pytest.mark.parametrize("kind, encoding, tokens", CASES)
def test_what_follows_a_product(host_kernels, encode, request, whole, kind, encoding, tokens):
    arch = request.node.callspec.params["host_kernels"]
    if kind in ("halves", "deep") and arch == "volta":
        pytest.skip("sm_70 has bands only")
    if (arch, encoding) not in whole:
        every = Launch(host_kernels, encode, "bands", encoding, 24)
        whole[arch, encoding] = (every.outs(every.samples[::2], FLOAT)[0], every.outs(every.samples[:2], SWIGLU)[0])
    products, gates = (values[:tokens] for values in whole[arch, encoding])
    launch = Launch(host_kernels, encode, kind, encoding, tokens)
    several = launch.samples[::2]
    plain, _ = launch.outs(several, FLOAT)
    exact = launch.exact(several)
    assert np.linalg.norm(plain.numpy() - exact) <= 1e-6 * np.linalg.norm(exact)
    assert same(plain[:, : products.shape[1]], products)
    if kind == "bands":
        assert same(launch.outs(several[:1], FLOAT)[0], plain[:, : several[0].weight.shape[0]])
    stream = launch.stream[:, : plain.shape[1]]
    assert same(launch.outs(several, FLOAT, "in place")[0], stream + plain)
    if kind == "bands":
        halves, count = launch.outs(several, HALF)
        assert same(halves, plain.half()) and count == 0
    launch.stream[0, 3], launch.stream[-1, 40] = 1e6, -1e6
    halves, count = launch.outs(several, HALF, "beside")
    assert same(halves, cut_off(stream + plain)) and count == 2
    if kind in ("bands", "halves"):
        pair = launch.samples[:2]
        found, count = launch.outs(pair, SWIGLU)
        opened, raised = (launch.x.double().numpy() @ sample.exact.T for sample in pair)
        wanted = opened / (1 + np.exp(-opened)) * raised
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=1e-3, atol=2e-3)
        assert same(found, gates) and count == 0


SLICED = 64 * 65  # columns: slices of five fours and of four


@pytest.mark.parametrize("tokens", [1, 8, 9, 24])
def test_what_follows_a_product_in_slices(host_kernels, encode, request, tokens):
    if request.node.callspec.params["host_kernels"] == "volta":
        pytest.skip("sm_70 has no slices")
    rng = np.random.default_rng(33)
    pair = [encode("nvfp4", rng.standard_normal((32, SLICED)).astype(np.float32) / 40) for _ in range(2)]
    x = torch.from_numpy(rng.standard_normal((24, SLICED)).astype(np.float16))[:tokens].clone()
    stream = torch.from_numpy(rng.standard_normal((24, 32)).astype(np.float32))[:tokens]

    def found(epilogue: int, residual: torch.Tensor | None = None, in_place: bool = False) -> torch.Tensor:
        buffer = guarded(tokens, 32, torch.float32 if epilogue == FLOAT else torch.float16)
        out = inner(buffer, 32)
        if in_place:
            residual = out.copy_(stream)
        weights: list[Nvfp4Weight] = [sample.weight for sample in (pair if epilogue == SWIGLU else pair[:1])]
        test_slices.launch(host_kernels, x, weights, [out], epilogue, blocks=1, residuals=[residual] * len(weights))
        return inner(buffer, 32)

    plain = found(FLOAT)
    opened, raised = (x.double().numpy() @ sample.exact.T for sample in pair)
    assert np.linalg.norm(plain.numpy() - opened) <= 1e-6 * np.linalg.norm(opened)
    assert same(found(FLOAT, in_place=True), stream + plain)
    assert same(found(HALF), plain.half())
    stream[0, 3] = 1e6
    assert same(found(HALF, stream), cut_off(stream + plain))
    wanted = opened / (1 + np.exp(-opened)) * raised
    np.testing.assert_allclose(found(SWIGLU).double().numpy(), wanted, rtol=1e-3, atol=2e-3)


def test_no_kernel_is_left_out(host_kernels, request):
    """Of those that the sources define; launches in one pass have tests of their own."""
    names = [f"linear_{name}_{tokens}" for name in (*ENCODINGS[:4], "any") for tokens in (8, 16, 24)]
    if request.node.callspec.params["host_kernels"] != "volta":
        names += [f"linear_{name}_halves_{tokens}" for name in ("nvfp4", "fp8") for tokens in (8, 16, 24)]
        names += [f"linear_nvfp4_sliced_{tokens}" for tokens in (16, 24)]
        names += ["linear_fp8_deep_8", "linear_nvfp4_slices_8", "linear_nvfp4_pass_8", "linear_nvfp4_pairs_8"]
    assert all(ctypes.cast(getattr(host_kernels, name), ctypes.c_void_p).value for name in names)
