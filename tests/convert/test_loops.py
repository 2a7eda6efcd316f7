"""Compiled loops and the search: the bytes of the numpy formulas, and less error than without a search."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.encodings import fp8, nvfp4, plain
from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.convert import pipeline
from duovolt.convert.quantisers import QUANTISERS, bands, compiled, compressed_tensors, modelopt, search
from duovolt.convert.recipe import load_recipe

from .conftest import contents

pytest.importorskip("numba")

NUMPY = compiled.Loops(None, "asked for")
LAYOUT = {True: ("v100-nvfp4", "v100-scale", "v100-fp8"), False: ("canonical", "canonical", "canonical")}


@pytest.fixture(scope="module")
def loops() -> compiled.Loops:
    found = compiled.choose("compiled", 0)
    assert str(found) == "compiled"
    return found


@st.composite
def sources(draw: st.DrawFn) -> tuple[np.ndarray, str]:
    """Words of any finite values: huge, tiny and subnormal, zeros of both signs, whole zero blocks and rows."""
    rows, groups = 32 * draw(st.integers(1, 2)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_t(draw(st.sampled_from([1.2, 4, 50])), (rows, 16 * groups))
    values = np.clip(values * 2.0 ** draw(st.sampled_from([-140, -30, -6, 0, 60])), -3e38, 3e38).astype(np.float32)
    values[rng.random(values.shape) < draw(st.sampled_from([0, 0.3, 0.97]))] = 0
    values[rng.random(rows) < 0.1] = -0.0
    values[:, :16] *= np.float32(draw(st.sampled_from([1, 1e-4, 1e-7])))
    # Multiples of a quarter hit every tie of E2M1 when the scale is a power of two.
    if draw(st.booleans()):
        values = np.round(np.clip(values, -100, 100) * 4) / np.float32(4)
    dtype = draw(st.sampled_from(["BF16", "F16", "F32"]))
    if dtype == "F16":
        values = np.clip(values, -65504, 65504)
    return plain.from_float32(values, dtype), dtype


@settings(max_examples=120, deadline=None)
@given(sources(), st.booleans(), st.sampled_from(sorted(bands.COMPILED)))
def test_loops_give_the_bytes_of_numpy(
    loops: compiled.Loops, drawn: tuple[np.ndarray, str], tiled: bool, name: str
) -> None:
    source, dtype = drawn
    weight, quantiser = plain.to_float32(source, dtype), QUANTISERS[name]
    words, scales, fp8_words = LAYOUT[tiled]
    multiplier = quantiser.global_scale(float(np.abs(weight).max()), dtype)
    ours = bands.BandEncoder(name, loops).nvfp4(source, dtype, multiplier, words, scales)
    theirs = bands.BandEncoder(name, NUMPY).nvfp4(source, dtype, multiplier, words, scales)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.reshape(-1), np.ascontiguousarray(other).reshape(-1))
    rows = quantiser.row_scales(np.abs(weight).max(axis=1), dtype)
    mine = bands.BandEncoder(name, loops).fp8(source, dtype, rows, fp8_words)
    other = bands.BandEncoder(name, NUMPY).fp8(source, dtype, rows, fp8_words)
    np.testing.assert_array_equal(mine.reshape(-1), np.ascontiguousarray(other).reshape(-1))


def test_loops_take_every_bf16_value_as_numpy_does(loops: compiled.Loops) -> None:
    magnitudes = np.arange(0x7F80, dtype=np.uint16)
    source = np.concatenate([magnitudes, magnitudes | np.uint16(0x8000)])  # every finite word, block by block
    source = source.reshape(-1, 16)[: len(source) // 512 * 32].reshape(-1, 64)
    source = source[: len(source) // 32 * 32]
    for scale in (np.float32(2.0**-126), np.float32(1e-3), np.float32(1), np.float32(1e30)):
        for layouts in LAYOUT.values():
            with np.errstate(over="ignore"):
                ours = bands.BandEncoder("default", loops).nvfp4(source, "BF16", scale, *layouts[:2])
                theirs = bands.BandEncoder("default", NUMPY).nvfp4(source, "BF16", scale, *layouts[:2])
                rows = np.full(len(source), scale)
                mine = bands.BandEncoder("default", loops).fp8(source, "BF16", rows, layouts[2])
                other = bands.BandEncoder("default", NUMPY).fp8(source, "BF16", rows, layouts[2])
            np.testing.assert_array_equal(ours[0].reshape(-1), theirs[0].reshape(-1))
            np.testing.assert_array_equal(ours[1].reshape(-1), theirs[1].reshape(-1))
            np.testing.assert_array_equal(mine.reshape(-1), other.reshape(-1))


def test_columns_that_fill_no_group_are_left_to_numpy(loops: compiled.Loops) -> None:
    source = plain.to_bf16(np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32))
    scales = np.ones(32, np.float32)
    found = bands.BandEncoder("default", loops).fp8(source, "BF16", scales, "canonical")
    np.testing.assert_array_equal(found, fp8.encode_rows(plain.to_float32(source, "BF16"), scales))


def squared_error(weight: np.ndarray, words: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Per block."""
    miss = nvfp4.decode(words, factors).astype(np.float64) - weight
    return (miss**2).reshape(len(weight), -1, 16).sum(axis=2)


@pytest.mark.parametrize("tail", [1.5, 3, 1000])
def test_search_is_better_than_the_default_and_both_libraries(tail: float) -> None:
    values = (np.random.default_rng(3).standard_t(tail, (64, 256)) * 0.02).astype(np.float32)
    weight = plain.to_float32(plain.to_bf16(values), "BF16")
    amax = float(np.abs(weight).max())
    scale, divisor = nvfp4.multiplier(amax), compressed_tensors.divisor(amax, "BF16")
    words, scales = search.nvfp4_words(weight, scale)
    found = squared_error(weight, words, nvfp4.factors(scales, multiplier=scale))
    words, scales = nvfp4.encode(weight, scale)
    default = squared_error(weight, words, nvfp4.factors(scales, multiplier=scale))
    assert (found <= default * (1 + 1e-12)).all()  # block by block
    words, scales = modelopt.nvfp4_words(weight, modelopt.multiplier(amax, "BF16"), "BF16")
    theirs = squared_error(weight, words, nvfp4.factors(scales, multiplier=scale)).sum()
    words, scales = compressed_tensors.nvfp4_words(weight, divisor, "BF16")
    others = squared_error(weight, words, nvfp4.factors(scales, divisor=divisor)).sum()
    assert found.sum() < 0.95 * min(default.sum(), theirs, others)


def test_search_finds_the_best_candidate_and_prefers_the_default() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :16] = [6, 3, 2, 1.5, 1, 0.5] + [0] * 10  # exact with the usual scale of 1
    weight[0, 16:] = [4, 3, 2, 1.5, 1, 0.5] + [0] * 10  # exact with scale 1, not with the usual 4/6
    words, scales = search.nvfp4_words(weight, np.float32(1))
    assert scales.tolist() == [[nvfp4.ONE, nvfp4.ONE]]
    np.testing.assert_array_equal(nvfp4.decode(words, nvfp4.factors(scales, multiplier=np.float32(1))), weight)


def test_column_weights_move_the_error_to_where_it_counts_least() -> None:
    weight = np.random.default_rng(5).standard_normal((64, 64)).astype(np.float32)
    scale = nvfp4.multiplier(float(np.abs(weight).max()))
    importance = np.where(np.arange(64) % 16 < 2, 100.0, 1.0)

    def weighted(column_weights: np.ndarray | None) -> float:
        words, scales = search.nvfp4_words(weight, scale, column_weights)
        decoded = nvfp4.decode(words, nvfp4.factors(scales, multiplier=scale))
        return float((((decoded - weight).astype(np.float64)) ** 2 * importance).sum())

    assert weighted(importance) < 0.8 * weighted(None)
    for bad in (np.ones(63), np.zeros(64), np.full(64, np.nan)):
        with pytest.raises(InputError, match="column weights"):
            search.nvfp4_words(weight, scale, bad)


def test_conversions_do_not_depend_on_the_arithmetic(source: Path, tmp_path: Path) -> None:
    for name in ("default", "search"):
        recipe = tmp_path / f"{name}.toml"
        text = (Path(pipeline.__file__).parent / "recipes" / "v100.toml").read_text()
        recipe.write_text(text.replace('name = "v100"', f'name = "x"\nquantiser = "{name}"'))
        found = []
        for arithmetic in ("compiled", "numpy"):
            target = tmp_path / f"{name}-{arithmetic}"
            report = pipeline.convert(
                source, target, load_recipe(str(recipe)), 3, lambda count: None, arithmetic=arithmetic
            )
            assert report.arithmetic.startswith(arithmetic)
            found.append(contents(target))
        assert found[0] == found[1]


def test_what_is_small_is_not_worth_compiling() -> None:
    assert str(compiled.choose("auto", compiled.WORTH_COMPILING - 1)) == "numpy (little to quantise)"
    assert str(compiled.choose("auto", compiled.WORTH_COMPILING)) == "compiled"


PROBE = """
from duovolt.convert.quantisers import compiled
print(compiled.choose({arithmetic!r}, 1 << 40))
"""


def probe(arithmetic: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(arithmetic=arithmetic)], capture_output=True, text=True, timeout=170,
        env=os.environ | environment,
    )  # fmt: skip


def test_the_cache_may_be_damaged_or_absent(tmp_path: Path) -> None:
    assert compiled.cache_directory().name == "loops"
    cache = compiled.cache_directory()
    assert any(cache.rglob("*.nbi"))  # written by this very process
    copy = tmp_path / "duovolt" / "loops"
    for path in cache.rglob("*.nb?"):
        (copy / path.relative_to(cache)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(cache)).write_bytes(b"torn")
    found = probe("auto", XDG_CACHE_HOME=str(tmp_path))
    assert found.returncode == 0 and found.stdout.startswith(("compiled", "numpy (")), found.stderr


def test_a_user_without_a_home_has_a_place_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert Path(compiled._place_for_code()).is_dir()


@pytest.mark.slow  # compiles anew, several times
def test_processes_compile_at_once_and_without_a_place_to_keep_it(tmp_path: Path) -> None:
    places = [str(tmp_path), str(tmp_path), "/dev/null"]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda place: probe("compiled", XDG_CACHE_HOME=place), places))
    assert [item.stdout for item in found] == ["compiled\n"] * 3, [item.stderr for item in found]
    assert probe("compiled", XDG_CACHE_HOME=str(tmp_path)).stdout == "compiled\n"


def test_without_numba_auto_is_numpy_and_compiled_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('numba needs another numpy')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    found = probe("auto", PYTHONPATH=path)
    assert found.stdout == "numpy (ImportError: numba needs another numpy)\n", found.stderr
    found = probe("compiled", PYTHONPATH=path)
    assert found.returncode == 1 and EnvironmentFault.__name__ in found.stderr and "numpy" in found.stderr


def test_every_layout_with_loops_exists() -> None:
    assert set(bands._TILED) == {*LAYOUTS, "canonical"}
