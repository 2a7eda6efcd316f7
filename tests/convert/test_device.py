"""Quantising on a torch device: the bytes of the numpy formulas, on values made to part them."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.encodings import fp8, nvfp4, plain
from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.cli.main import main
from duovolt.convert import pipeline
from duovolt.convert.quantisers import QUANTISERS, compiled, device, encoders
from duovolt.convert.quantisers.bands import BandEncoder
from duovolt.convert.recipe import load_recipe

from .conftest import contents

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]
NUMPY = compiled.Loops(None, "asked for")
TILED, FLAT = ("v100-nvfp4", "v100-scale", "v100-fp8"), ("canonical",) * 3


def hostile(rng: np.random.Generator, rows: int, columns: int, exponent: int) -> np.ndarray:
    """Ties, subnormals, zeros of both signs, zero blocks and rows, tiny blocks beside huge ones; float32."""
    values = rng.standard_t(1.5, (rows, columns)) * 2.0**exponent
    values = np.clip(values, -3e38, 3e38).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = -0.0
    values[rng.random(values.shape) < 0.05] = 1e-45
    values[rng.random((rows, columns)) < 0.05] = -1.1754942e-38
    values[:, :16] *= np.float32(1e-7)
    values[1] = 0
    values[2, 16:32] = 0
    values[3] = np.round(np.clip(rng.standard_normal(columns) * 9, -100, 100) * 4) / 4 * 2.0**exponent
    values[4] = np.float32(448) * np.float32(2.0**exponent)
    return values


def require_same(where: torch.device, source: np.ndarray, dtype: str, quantiser: str, layouts: tuple[str, ...]) -> None:
    values, rules = plain.to_float32(source, dtype), QUANTISERS[quantiser]
    ours, theirs = device.DeviceEncoder(quantiser, where), BandEncoder(quantiser, NUMPY)
    scale = rules.global_scale(float(np.abs(values).max()), dtype)
    found = ours.nvfp4(source, dtype, scale, *layouts[:2])
    wanted = theirs.nvfp4(source, dtype, scale, *layouts[:2])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.reshape(-1), np.asarray(b).view(np.uint8).reshape(-1))
    row_scales = rules.row_scales(np.abs(values).max(axis=1), dtype)
    found_words = ours.fp8(source, dtype, row_scales, layouts[2])
    np.testing.assert_array_equal(found_words, theirs.fp8(source, dtype, row_scales, layouts[2]).reshape(-1))
    assert ours.nonzero(found_words, "fp8_e4m3") == np.count_nonzero(found_words & 0x7F)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([-140, -126, -60, -6, 0, 8, 90]),
    st.sampled_from(["BF16", "F16", "F32"]),
    st.sampled_from(sorted(QUANTISERS)),
    st.sampled_from([TILED, FLAT]),
)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the libraries' own formulas overflow out there
def test_torch_gives_the_bytes_of_numpy(
    seed: int, exponent: int, dtype: str, quantiser: str, layouts: tuple[str, ...]
) -> None:
    require_same(torch.device("cpu"), *words_of(seed, exponent, dtype, quantiser), quantiser, layouts)


def words_of(
    seed: int, exponent: int, dtype: str, quantiser: str, shape: tuple[int, int] = (32, 80)
) -> tuple[np.ndarray, str]:
    """Hostile words of a dtype, as far out as dtype and quantiser have finite scales."""
    low = {"F16": -20, "F32": -140, "BF16": -140}[dtype]
    low = max(low, {"modelopt": -100, "compressed-tensors": 0 if dtype == "F16" else -20}.get(quantiser, low))
    high = 8 if dtype == "F16" or quantiser == "compressed-tensors" else 90
    values = hostile(np.random.default_rng(seed), *shape, min(max(exponent, low), high))
    if high == 8:
        values = np.clip(values, -65504, 65504)
    return plain.from_float32(values, dtype), dtype


def test_every_bit_pattern_rounds_alike() -> None:
    """Every BF16 word as a float32, and its neighbours, through both roundings."""
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[(words & 0x7F80) != 0x7F80]
    values = plain.to_float32(words, "BF16")
    near = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))])
    near = near[np.isfinite(near)]
    tensor = torch.from_numpy(near)
    np.testing.assert_array_equal(device.to_e4m3(tensor).numpy(), fp8.to_e4m3(near))
    np.testing.assert_array_equal(device.to_e2m1(tensor).numpy(), nvfp4.to_e2m1(near))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts_are_those_of_the_checkpoint(layout: str) -> None:
    words = np.random.default_rng(1).integers(0, 256, (96, 80), dtype=np.uint8)
    found = device.laid_out(torch.from_numpy(words), layout).numpy()
    np.testing.assert_array_equal(found, LAYOUTS[layout].apply(words).reshape(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("quantiser", sorted(QUANTISERS))
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_card_gives_the_bytes_of_numpy(dtype: str, quantiser: str) -> None:
    """Run by hand on an NVIDIA GPU: `pytest -m gpu tests/convert/test_device.py`."""
    for seed, exponent in enumerate((-140, -126, -60, -20, -6, 0, 8, 90)):
        for layouts in (TILED, FLAT):
            require_same(
                torch.device("cuda"), *words_of(seed, exponent, dtype, quantiser, (256, 2048)), quantiser, layouts
            )


def converted_with(source: Path, target: Path, encoder: object, monkeypatch: Patch, recipe: str) -> dict[str, bytes]:
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "choose_encoder", lambda quantiser, arithmetic, device, nbytes: encoder)
        pipeline.convert(source, target, load_recipe(recipe), 2, lambda count: None)
    return contents(target)


@pytest.mark.parametrize("recipe", ["v100", "v100-nvfp4"])
def test_a_whole_conversion_has_the_same_bytes(recipe: str, source: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Bands of another size, another device: files, manifest and conversion id are equal."""
    ours = converted_with(
        source, tmp_path / "a", device.DeviceEncoder("default", torch.device("cpu")), monkeypatch, recipe
    )
    assert ours == converted_with(source, tmp_path / "b", BandEncoder("default", NUMPY), monkeypatch, recipe)


def test_the_self_test_finds_another_rounding(monkeypatch: Patch) -> None:
    encoder = device.DeviceEncoder("search", torch.device("cpu"))
    encoders.self_test(encoder)
    monkeypatch.setattr(device, "to_e2m1", lambda y: (y.abs() * 2).round().clamp(max=7).to(torch.uint8))
    with pytest.raises(ArithmeticError):
        encoders.self_test(encoder)


def test_a_card_that_cannot_be_had(source: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Asked for: refused with the way out. Left to choose: the processor does it, whatever went wrong."""
    monkeypatch.setattr(encoders, "DRIVERS", (tmp_path / "no-driver",))
    encoders._on_card.cache_clear()
    command = ["convert", str(source), str(tmp_path / "c"), "--quiet"]
    assert main([*command, "--device", "cuda"]) == 3
    assert "no NVIDIA driver" in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert main([*command, "--device", "cuda", "--arithmetic", "numpy"]) == 2
    monkeypatch.setattr(encoders, "DRIVERS", (Path("/"),))

    def fails() -> bool:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    encoders._on_card.cache_clear()
    chosen = encoders.choose_encoder("default", "auto", "auto", encoders.WORTH_A_CARD)
    assert isinstance(chosen, BandEncoder)
    with pytest.raises(EnvironmentFault, match="driver too old"):
        encoders.choose_encoder("default", "auto", "cuda", 1)
    encoders._on_card.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["v100", "v100-nvfp4", "v100-fp8"])
def test_a_card_converts_to_the_same_bytes(recipe: str, source: Path, tmp_path: Path) -> None:
    for place, where in (("a", "cuda"), ("b", "cpu")):
        report = pipeline.convert(source, tmp_path / place, load_recipe(recipe), 2, lambda count: None, device=where)
        assert ("cuda" in report.arithmetic) == (where == "cuda")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.gpu
def test_speed_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged: transfers both ways and the layout included; `pytest -m gpu -s tests/convert/test_device.py`."""
    source = plain.to_bf16(np.random.default_rng(0).standard_normal((1024, 17408), dtype=np.float32))
    for quantiser in sorted(QUANTISERS):
        encoder = device.DeviceEncoder(quantiser, torch.device("cuda"))
        scale = QUANTISERS[quantiser].global_scale(6.0, "BF16")
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            encoder.nvfp4(source, "BF16", scale, *TILED[:2])
            seconds.append(time.perf_counter() - begin)
        with capsys.disabled():
            print(f"{encoder}: {quantiser} nvfp4 {source.nbytes / min(seconds) / 1e9:.2f} GB/s of BF16")
