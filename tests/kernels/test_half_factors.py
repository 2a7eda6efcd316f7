"""Weights on their way to fp16 for prompts: what the factors leave of their values. Products themselves need a card."""

import pytest
import torch

from duovolt.kernels.half_factors import half_factors
from duovolt.kernels.weights import Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight, Weight


def through_half(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(the values with their scales, the same after fp16), as csrc/dequantise.cu and the product's last factor make them."""
    factor, back = half_factors(weight)
    scale = weight.scale if weight.scale.numel() == 1 else weight.scale[:, None]
    exact = weight.values().double() * scale.double()
    rounded = (weight.values() * (scale * torch.tensor(factor, dtype=torch.float32))).half()
    return exact, rounded.double() * back


def words(*shape: int) -> torch.Tensor:
    return torch.randint(0, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scale", [1e-4, 0.0123, 7.7, 3e-12])
def test_nvfp4_of_one_scale_is_exact(scale: float) -> None:
    weight = Nvfp4Weight(words(2, 4, 32, 8), words(2, 4, 32) % 56 + 64, torch.tensor([scale]))
    exact, found = through_half(weight)
    assert float(((found - exact).abs() / exact.abs().clamp(min=1e-300)).max()) < 3e-7  # of float32's scale alone


@pytest.mark.parametrize("size", [1e-6, 0.01, 1.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_matrices_keep_fp16s_digits_whatever_their_size(size: float, dtype: torch.dtype) -> None:
    """The largest value that is there decides, not the largest that fp16 has."""
    matrix = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).mul_(size)
    exact, found = through_half(HalfWeight.of(matrix.clamp(-6e4, 6e4).to(dtype)))
    assert float((found - exact).norm() / exact.norm()) < 2**-11


def test_other_words_stay_within_a_rounding() -> None:
    rows = torch.rand(64) + 0.01
    for weight in (
        Fp8Weight(words(2, 4, 32, 16), rows * 1e-3),
        Fp8BlockWeight(words(2, 8, 32, 16), torch.rand(1, 1) * 1e5, (64, 128)),
        Nvfp4Weight(words(2, 4, 32, 8), words(2, 4, 32), rows),
    ):
        exact, found = through_half(weight)
        assert float((found - exact).norm() / exact.norm()) < 2**-11


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e30])
def test_scales_at_the_ends(scale: float) -> None:
    weight = Nvfp4Weight(words(1, 4, 32, 8), words(1, 4, 32), torch.tensor([scale]))
    factor, back = half_factors(weight)
    assert 0 < factor < float("inf") and 0 < back < float("inf")
    assert half_factors(HalfWeight.of(torch.zeros(32, 16).half())) == (1.0, 1.0)
