"""The Python op on a CPU: what it refuses, and the torch reference against the codec."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.kernels.linear import Fp8Weight, Nvfp4Weight, linear, linear_reference
from duovolt.kernels.module import arches_for


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


def fp8_weight(bands: int = 2, groups: int = 4) -> Fp8Weight:
    return Fp8Weight(torch.zeros(bands, groups, 32, 16, dtype=torch.uint8), torch.ones(32 * bands))


@pytest.mark.parametrize("encoding", ["nvfp4", "fp8"])
def test_reference_equals_the_codec(encode, encoding):
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    sample = encode(encoding, rng.standard_t(2, (96, 80)).astype(np.float32))
    assert sample.weight.shape == (96, 80)
    scaled = sample.weight.values().double() * sample.weight.scale.double().reshape(-1, 1)
    np.testing.assert_array_equal(scaled.numpy(), sample.exact)
    x = torch.from_numpy(rng.standard_normal((3, 80)).astype(np.float16))
    expected = x.double().numpy() @ sample.exact.T
    got = linear_reference(x, sample.weight).double().numpy()
    assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)


def test_out_is_filled_and_returned():
    weight = fp8_weight()
    weight.words.fill_(0x38)  # 1.0
    out = torch.full((2, 64), -1.0)
    assert linear_reference(torch.ones(2, 64, dtype=torch.float16), weight, out) is out
    assert (out == 64).all()


BAD_CALLS = {
    "no token": (half(0, 64), None, r"x is \[0, 64\]: expected \[T, 64\] with T from 1 to 24"),
    "too many tokens": (half(25, 64), None, "T from 1 to 24"),
    "a vector": (half(64), None, r"x is \[64\]: expected \[T, 64\]"),
    "other width": (half(2, 48), None, r"x is \[2, 48\]: expected \[2, 64\]"),
    "other dtype": (half(2, 64).float(), None, "x is torch.float32: expected torch.float16"),
    "strided": (half(2, 128)[:, ::2], None, "x .* is not contiguous"),
    "out of another shape": (half(2, 64), torch.zeros(2, 32), r"out is \[2, 32\]: expected \[2, 64\]"),
    "out of another dtype": (half(2, 64), half(2, 64), "out is torch.float16: expected torch.float32"),
    "strided out": (half(2, 64), torch.zeros(64, 2).t(), "out .* is not contiguous"),
    "x elsewhere": (half(2, 64).to("meta"), None, "x is on meta, the rest on cpu"),
}


@pytest.mark.parametrize("operation", [linear, linear_reference])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(operation, case):
    x, out, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=message):
        operation(x, fp8_weight(), out)


def test_the_kernel_needs_a_cuda_device():
    with pytest.raises(InputError, match="x is on cpu: this kernel runs on a CUDA device"):
        linear(half(1, 64), fp8_weight())


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


BAD_WEIGHTS = {
    "canonical words": (
        lambda: Fp8Weight(words(64, 64), torch.ones(64)),
        r"words is \[64, 64\]: expected \[N/32, K/16",
    ),
    "nvfp4 words": (lambda: Fp8Weight(words(2, 4, 32, 8), torch.ones(64)), r"words is \[2, 4, 32, 8\]"),
    "no band": (lambda: Fp8Weight(words(0, 4, 32, 16), torch.ones(0)), r"words is \[0, 4, 32, 16\]"),
    "signed words": (lambda: Fp8Weight(words(2, 4, 32, 16).to(torch.int8), torch.ones(64)), "words is torch.int8"),
    "short scale": (lambda: Fp8Weight(words(2, 4, 32, 16), torch.ones(32)), r"scale is \[32\]: expected \[64\]"),
    "one scale for fp8": (lambda: Fp8Weight(words(2, 4, 32, 16), torch.ones(1)), r"scale is \[1\]: expected \[64\]"),
    "half scale": (lambda: Fp8Weight(words(2, 4, 32, 16), half(64)), "scale is torch.float16: expected torch.float32"),
    "block scales of another cut": (
        lambda: Nvfp4Weight(words(2, 4, 32, 8), words(2, 3, 32), torch.ones(1)),
        r"block_scale is \[2, 3, 32\]: expected \[2, 4, 32\]",
    ),
    "scalar scale": (
        lambda: Nvfp4Weight(words(2, 4, 32, 8), words(2, 4, 32), torch.ones(())),
        r"scale is \[\]: expected \[64\]",
    ),
    "double scale": (
        lambda: Nvfp4Weight(words(2, 4, 32, 8), words(2, 4, 32), torch.ones(1).double()),
        "scale is torch.float64: expected torch.float32",
    ),
    "transposed words": (
        lambda: Fp8Weight(words(4, 2, 32, 16).transpose(0, 1), torch.ones(64)),
        "words .* is not contiguous",
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_parts_that_do_not_fit_are_refused(case):
    make, message = BAD_WEIGHTS[case]
    with pytest.raises(InputError, match=message):
        make()


def test_a_v100_loads_machine_code_and_newer_cards_their_own_or_the_same_ptx():
    assert arches_for((7, 0)) == ["sm_70"]
    assert [arches_for(c) for c in ((7, 5), (9, 0), (12, 0))] == [
        [f"sm_{number}", "compute_70"] for number in (75, 90, 120)
    ]
    with pytest.raises(EnvironmentFault, match=r"6\.1 is too old"):
        arches_for((6, 1))
