"""Q08: values that became zero are counted for each tensor, told, and too many of them stop the conversion."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.encodings import fp8, nvfp4
from duovolt.checkpoint.encodings.plain import to_bf16
from duovolt.checkpoint.errors import CheckFailed
from duovolt.checkpoint.manifest import has_manifest, read_manifest
from duovolt.cli.main import main
from duovolt.convert.pipeline import ConversionReport, convert
from duovolt.convert.quantisers import QUANTISERS, compiled
from duovolt.convert.quantisers.bands import BandEncoder
from duovolt.convert.quantisers.flushed import Flushed, nonzero_codes, noted
from duovolt.convert.recipe import load_recipe
from duovolt.verify.proofs import verify

from .conftest import rewrite

QKV = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
UP = "model.language_model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 4099])
def test_every_code_is_told_from_zero(size: int) -> None:
    words = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    words[::3] &= 0x80
    assert nonzero_codes(words, "fp8_e4m3") == np.count_nonzero(words & 0x7F)
    assert nonzero_codes(words, "nvfp4/divisor") == np.count_nonzero(nvfp4.unpack(words[None]) & 7)
    for encoding in ("fp8_e4m3", "nvfp4"):
        every = np.arange(256, dtype=np.uint8)
        expected = 254 if encoding == "fp8_e4m3" else 2 * 14 * 16
        assert nonzero_codes(every, encoding) == expected
        loops = BandEncoder("default", compiled.choose("compiled", 0))
        assert loops.nonzero(words, encoding) == nonzero_codes(words, encoding)
        assert loops.nonzero(every, encoding) == expected


def to(source: Path, target: Path, recipe: str = "v100-nvfp4") -> ConversionReport:
    return convert(source, target, load_recipe(recipe), 2, lambda count: None)


def flushing(words: np.ndarray) -> np.ndarray:
    """Half of the blocks hold one large value and many far below its smallest code."""
    words = words.copy()
    rows = words[: len(words) // 2]
    rows[:] = to_bf16(np.full(rows.shape, 1e-4, np.float32))
    rows[:, ::16] = 0x3F80  # 1
    return words


def test_the_share_is_that_of_the_decoded_values(source: Path, tmp_path: Path) -> None:
    """The counts of the conversion, and of verify, which decodes; a little more than 15/32 lost by construction."""
    rewrite(source, UP, flushing)
    report = to(source, tmp_path / "c", str(_recipe(tmp_path, 1.0)))
    found = report.flushed[UP]
    rows = {row.tensor: row for row in verify(source, tmp_path / "c").errors}
    assert rows.keys() == report.flushed.keys()
    assert all(rows[name].flushed == report.flushed[name].share for name in rows)
    assert 15 / 32 < found.share < 0.55 and found.encoding == "nvfp4"
    assert all(
        0.02 < other.share < 0.15 for n, other in report.flushed.items() if n != UP and other.encoding == "nvfp4"
    )


def _recipe(place: Path, limit: float, more: str = "") -> Path:
    text = (Path(__file__).parents[2] / "convert" / "recipes" / "v100-nvfp4.toml").read_text()
    rules = text.index("[[rules]]")
    (place / "r.toml").write_text(f"{text[:rules]}max_flushed_share = {limit}\n{more}\n{text[rules:]}")
    return place / "r.toml"


def test_too_many_stop_the_conversion_by_name_and_keeping_the_tensor_helps(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(source, UP, flushing)
    with pytest.raises(CheckFailed, match=rf"{UP}.*became zero in nvfp4.*max_flushed_share is 40%") as refusal:
        to(source, tmp_path / "c")
    assert refusal.value.exit_code == 1 and not has_manifest(tmp_path / "c")
    assert main(["convert", str(source), str(tmp_path / "d"), "--recipe", "v100-nvfp4", "--quiet"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    keep = f'[[rules]]\nnames = ["{UP}"]\nencoding = "fp8_e4m3"\n'
    report = to(source, tmp_path / "kept", str(_recipe(tmp_path, 0.4, keep)))
    assert report.flushed[UP].encoding == "fp8_e4m3" and not verify(source, tmp_path / "kept").failed


def test_a_small_block_in_a_large_tensor_survives(source: Path, tmp_path: Path) -> None:
    """A block of largest magnitude 0.004 in a tensor of 1: the global scale keeps its block scale within E4M3."""

    def small(words: np.ndarray) -> np.ndarray:
        words[0, 0] = 0x3F80  # 1
        words[32:64] = to_bf16(np.linspace(-0.004, 0.004, words[32:64].size, dtype=np.float32)).reshape(32, -1)
        return words

    rewrite(source, QKV, small)
    assert to(source, tmp_path / "c").flushed[QKV].share < 0.12


def test_the_report_names_the_worst_tensor(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(source, UP, flushing)
    command = ["convert", str(source), str(tmp_path / "c"), "--recipe", str(_recipe(tmp_path, 0.6))]
    assert main([*command, "--json", str(tmp_path / "r.json")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nvfp4: ")]
    assert "non-zero values became zero" in line and UP in line
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["flushed"][UP]["share"] > 0.4 and found["conversion_id"] == read_manifest(tmp_path / "c").conversion_id
    assert main([*command, "--json", str(tmp_path / "no" / "r.json")]) == 2


def test_the_limit_decides_no_byte(source: Path, tmp_path: Path) -> None:
    one = to(source, tmp_path / "one", str(_recipe(tmp_path, 0.9))).manifest
    two = to(source, tmp_path / "two").manifest
    assert one.conversion_id == two.conversion_id
    assert (one.recipe["max_flushed_share"], "max_flushed_share" in two.recipe) == (0.9, False)
    assert verify(source, tmp_path / "one").ok and verify(source, tmp_path / "two").ok


def test_a_resumed_conversion_tells_the_same(source: Path, tmp_path: Path, command: Callable[..., object]) -> None:
    recipe = (Path(__file__).parents[2] / "convert" / "recipes" / "v100.toml").read_text()
    (tmp_path / "r.toml").write_text(recipe.replace("2147483648", "100000"))
    whole = to(source, tmp_path / "whole", str(tmp_path / "r.toml"))
    count = tmp_path / "count"
    command("convert", source, tmp_path / "d", "--recipe", tmp_path / "r.toml", DUOVOLT_COUNT_WRITES=str(count))
    late = str(int(count.read_text()) * 3 // 4)
    command("convert", source, tmp_path / "c", "--recipe", tmp_path / "r.toml", DUOVOLT_STOP_AT_WRITE=late)
    report = to(source, tmp_path / "c", str(tmp_path / "r.toml"))
    assert report.resumed and report.flushed == whole.flushed


@pytest.mark.parametrize("limit", ["-0.1", "1.5", "nan", "'most'"])
def test_nonsense_limits(limit: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "convert" / "recipes" / "v100.toml").read_text()
    (tmp_path / "r.toml").write_text(f"max_flushed_share = {limit}\n{text}")
    assert main(["convert", str(source), str(tmp_path / "c"), "--recipe", str(tmp_path / "r.toml")]) == 2
    assert "max_flushed_share" in capsys.readouterr().err


def test_zeros_are_not_lost() -> None:
    """Only what was not zero can be lost: a matrix of zeros, of both signs, has a share of none."""
    zeros = np.array([[0.0, -0.0] * 16], np.float32)
    for quantiser in ("default", "search", "compressed-tensors"):
        rules = QUANTISERS[quantiser]
        words, _ = rules.nvfp4_words(zeros, rules.global_scale(0.0, "BF16"), "BF16")
        assert nonzero_codes(words, "nvfp4") == 0
        assert (
            nonzero_codes(rules.fp8_words(zeros, rules.row_scales(np.zeros(1, np.float32), "BF16"), "BF16"), "fp8_e4m3")
            == 0
        )
    assert Flushed("nvfp4", 0, 0).share == 0 and fp8.to_e4m3(zeros).max() == 0


@pytest.mark.parametrize(
    "note",
    [
        {},
        {"flushed": 3},
        {"flushed": {"w": {"nonzero": 1}}},
        {"flushed": {"w": ["nvfp4", 1, 1]}},
        {"flushed": {"w": None}},
    ],
)
def test_a_note_of_another_form_counts_nothing(note: dict[str, object]) -> None:
    """Notes come from a journal on disk."""
    assert noted(note) == {}


def test_a_note_is_what_was_counted() -> None:
    assert noted({"flushed": {"w": {"encoding": "nvfp4", "nonzero": 4, "lost": 1}}}) == {"w": Flushed("nvfp4", 4, 1)}
