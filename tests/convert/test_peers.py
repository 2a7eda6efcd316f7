"""The libraries' bytes: every quantised tensor of the files that ModelOpt and compressed-tensors wrote, made again."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from duovolt.checkpoint.encodings import fp8, nvfp4, plain
from duovolt.checkpoint.errors import InputError
from duovolt.convert.quantisers import QUANTISERS, compressed_tensors, modelopt, rounding

FIXTURES = Path(__file__).parent.parent / "fixtures"
Tensors = dict[str, torch.Tensor]


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def values(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


def source(folder: str = "source_small") -> dict[str, np.ndarray]:
    return {name: values(tensor) for name, tensor in load_file(FIXTURES / folder / "model.safetensors").items()}


def shared_amax(weights: dict[str, np.ndarray], name: str, partners: tuple[tuple[str, ...], ...]) -> float:
    """Largest magnitude of a weight and its partners."""
    for group in partners:
        for role in group:
            if name.endswith(f"{role}.weight"):
                return max(float(np.abs(weights[name.replace(role, other)]).max()) for other in group)
    return float(np.abs(weights[name]).max())


@pytest.mark.parametrize(
    "folder, partners, count",
    [
        ("ct_nvfp4a16", compressed_tensors.PARTNERS, 8),
        ("ct_mixed_nvfp4_fp8", compressed_tensors.PARTNERS, 3),
        ("ct_nvfp4_w4a4", (), 2),  # compressed one module at a time
    ],
)
def test_compressed_tensors_nvfp4(folder: str, partners: tuple[tuple[str, ...], ...], count: int) -> None:
    weights, theirs = source(), load_file(FIXTURES / folder / "checkpoint" / "model.safetensors")
    names = [name for name in theirs if name.endswith(".weight_packed")]
    assert len(names) == count
    for packed in names:
        name = packed.removesuffix("_packed")
        divisor = compressed_tensors.divisor(shared_amax(weights, name, partners), "BF16")
        assert divisor == theirs[f"{name}_global_scale"].item()
        ours, scales = compressed_tensors.nvfp4_words(weights[name], divisor, "BF16")
        np.testing.assert_array_equal(ours, theirs[packed].numpy(), name)
        np.testing.assert_array_equal(scales, words(theirs[f"{name}_scale"]), name)


@pytest.mark.parametrize(
    "folder, count", [("modelopt_nvfp4_kvfp8", 7), ("modelopt_w4a16_nvfp4", 7), ("modelopt_mixed_nvfp4_fp8", 3)]
)
def test_modelopt_nvfp4(folder: str, count: int) -> None:
    weights, theirs = source(), load_file(FIXTURES / folder / "checkpoint" / "model.safetensors")
    names = [name.removesuffix("_scale_2") for name in theirs if name.endswith(".weight_scale_2")]
    assert len(names) == count
    for name in names:
        multiplier = modelopt.multiplier(shared_amax(weights, name, modelopt.PARTNERS), "BF16")
        assert multiplier == theirs[f"{name}_scale_2"].item()
        ours, scales = modelopt.nvfp4_words(weights[name], multiplier, "BF16")
        np.testing.assert_array_equal(ours, theirs[name].numpy(), name)
        np.testing.assert_array_equal(scales, words(theirs[f"{name}_scale"]), name)


def test_modelopt_nvfp4_of_ties_zero_blocks_and_underflows() -> None:
    theirs = load_file(FIXTURES / "modelopt_nvfp4_edge" / "edge.safetensors")
    weight = values(theirs["source"])
    multiplier = modelopt.multiplier(float(np.abs(weight).max()), "BF16")
    assert multiplier == theirs["weight_scale_2"].item()
    ours, scales = modelopt.nvfp4_words(weight, multiplier, "BF16")
    np.testing.assert_array_equal(ours, theirs["weight"].numpy())
    np.testing.assert_array_equal(scales, words(theirs["weight_scale"]))
    decoded = nvfp4.decode(ours, nvfp4.factors(scales, multiplier=multiplier))
    np.testing.assert_array_equal(decoded, theirs["dequant_fp32"].numpy())


Fp8 = Callable[[np.ndarray, torch.Tensor], tuple[np.ndarray, np.ndarray]]


def ct_rows(weight: np.ndarray, theirs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    scale = compressed_tensors.row_scales(np.abs(weight).max(axis=1), "BF16")
    return compressed_tensors.fp8_rows(weight, scale, "BF16"), scale[:, None]


def ct_tensor(weight: np.ndarray, theirs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    ours, scale = compressed_tensors.fp8_tensor(weight, "BF16")
    return ours, np.array([scale])


def ct_blocks(weight: np.ndarray, theirs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return compressed_tensors.fp8_blocks(weight, "BF16")


def modelopt_rows(weight: np.ndarray, theirs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    scale = modelopt.row_scales(np.abs(weight).max(axis=1), "BF16")
    return modelopt.fp8_rows(weight, scale, "BF16"), scale


def modelopt_tensor(weight: np.ndarray, theirs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    # Partners share a magnitude in some exports; either way it is one of the source's own.
    scale = modelopt.tensor_scale(float(np.abs(weight).max()))
    return modelopt.fp8_tensor(weight, scale, "BF16"), np.array(scale)


@pytest.mark.parametrize(
    "folder, inputs, rule, count",
    [
        ("ct_fp8_channel", "source_small", ct_rows, 8),
        ("ct_mixed_nvfp4_fp8", "source_small", ct_rows, 4),
        ("ct_fp8_tensor", "source_small", ct_tensor, 8),
        ("ct_fp8_block", "source_block", ct_blocks, 3),
        ("modelopt_fp8", "source_small", modelopt_tensor, 7),
        ("modelopt_mixed_nvfp4_fp8", "source_small", modelopt_tensor, 4),
        ("modelopt_fp8_per_channel", "source_small", modelopt_rows, 7),
    ],
)
def test_fp8(folder: str, inputs: str, rule: Fp8, count: int) -> None:
    weights, theirs = source(inputs), load_file(FIXTURES / folder / "checkpoint" / "model.safetensors")
    names = [n for n, t in theirs.items() if n.endswith(".weight") and t.dtype == torch.float8_e4m3fn]
    assert len(names) == count
    for name in names:
        ours, scale = rule(weights[name], theirs[f"{name}_scale"])
        np.testing.assert_array_equal(scale, values(theirs[f"{name}_scale"]), name)
        np.testing.assert_array_equal(ours, words(theirs[name]), name)


def test_a_tensor_of_zeros_is_refused_where_the_library_writes_nan() -> None:
    with pytest.raises(InputError, match="zeros"):
        modelopt.multiplier(0.0, "BF16")
    with pytest.raises(InputError, match="zeros"):
        modelopt.tensor_scale(0.0)
    assert compressed_tensors.divisor(0.0, "BF16") == 1
    ours, scales = compressed_tensors.nvfp4_words(np.zeros((1, 16), np.float32), np.float32(1), "BF16")
    assert not ours.any() and scales.tolist() == [[0x20]]


@pytest.mark.parametrize("name", sorted(QUANTISERS))
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_quantiser_stays_near_the_weights(name: str, dtype: str) -> None:
    rng = np.random.default_rng(7)
    weight = rounding.through((rng.standard_t(4, (48, 64)) * 0.02).astype(np.float32), dtype)
    weight[3], weight[5, 16:32] = 0, 0
    quantiser = QUANTISERS[name]
    scale = quantiser.global_scale(float(np.abs(weight).max()), dtype)
    codes, block_scale = quantiser.nvfp4_words(weight, scale, dtype)
    kind = {"divisor": scale} if quantiser.encoding.endswith("divisor") else {"multiplier": scale}
    decoded = nvfp4.decode(codes, nvfp4.factors(block_scale, **kind))
    assert np.linalg.norm(decoded - weight) < 0.11 * np.linalg.norm(weight)
    rows = quantiser.row_scales(np.abs(weight).max(axis=1), dtype)
    decoded = fp8.decode_rows(quantiser.fp8_words(weight, rows, dtype), rows)
    assert np.linalg.norm(decoded - weight) < 0.03 * np.linalg.norm(weight)


@pytest.mark.parametrize(
    "dtype, torch_dtype", [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)]
)
def test_rounding_through_a_dtype_is_torchs(dtype: str, torch_dtype: torch.dtype) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    bits = np.append(bits[np.isfinite(bits)], np.float32([0, -0.0, 65519, 65520, 1e-8, 2**-25])).astype(np.float32)
    expected = torch.from_numpy(bits).to(torch_dtype).float().numpy()
    np.testing.assert_array_equal(rounding.through(bits, dtype), expected)
    assert plain.from_float32(expected, dtype).dtype.itemsize == torch_dtype.itemsize


def test_a_scale_beyond_the_dtype_is_refused_where_the_library_writes_infinity() -> None:
    """In F16 1 / amax x 2688 passes 65504 for every matrix below 0.041."""
    assert np.isfinite(compressed_tensors.divisor(0.05, "F16"))
    for amax, dtype in ((0.04, "F16"), (1e-36, "BF16"), (1e-40, "F32")):
        with pytest.raises(InputError, match=f"no compressed-tensors scale in {dtype}"):
            compressed_tensors.divisor(amax, dtype)
