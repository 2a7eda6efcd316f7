"""verify finds what went astray in words and scales that a source has quantised, and records that claim too much."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duovolt.checkpoint.manifest import read_manifest
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.shard.split import shard
from duovolt.tests.support import exports
from duovolt.tests.support.damage import edit_manifest, edit_tensor, refit
from duovolt.verify.proofs import verify

LAYER = "model.language_model.layers.0"
UP = f"{LAYER}.mlp.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, converted and ranks of three exports, made once."""
    place = tmp_path_factory.mktemp("made")
    for name in ("ct nvfp4", "fp8 blocks, F32 scales", "ct fp8 tensor"):
        folder = place / name
        exports.export(folder / "source", name)
        convert(folder / "source", folder / "converted", load_recipe("v100"), 2, lambda count: None)
        shard(folder / "converted", folder / "ranks", 2)
    return place


def flip(data: np.ndarray) -> None:
    data[9] ^= 1


def failures(folder: Path, **chosen: bool) -> list[tuple[str, str | None]]:
    places = {key: folder / key if chosen.get(key, True) else None for key in ("source", "converted", "ranks")}
    report = verify(places["source"], places["converted"], places["ranks"])
    return [(proof.name, failure.tensor) for proof in report.failed for failure in proof.failures]


REPACKED = {
    "nvfp4 words": ("ct nvfp4", f"{UP}.weight"),
    "nvfp4 block scales": ("ct nvfp4", f"{UP}.weight_scale"),
    "fp8 words": ("fp8 blocks, F32 scales", f"{UP}.weight"),
}


@pytest.mark.parametrize("case", REPACKED)
def test_a_changed_word_that_every_digest_fits_is_found_against_the_source(
    case: str, made: Path, tmp_path: Path
) -> None:
    name, tensor = REPACKED[case]
    shutil.copytree(made / name, tmp_path / "x")
    edit_tensor(tmp_path / "x" / "converted", tensor, flip)
    refit(tmp_path / "x" / "converted")
    assert ("source -> converted: kept words", tensor) in failures(tmp_path / "x", ranks=False)


SCALES = {
    "divisor": ("ct nvfp4", f"{UP}.weight_global_scale"),
    "tile scale": ("fp8 blocks, F32 scales", f"{UP}.weight_scale"),
    "tensor scale": ("ct fp8 tensor", f"{UP}.weight_scale"),
}


@pytest.mark.parametrize("case", SCALES)
def test_a_changed_scale_is_found_against_the_source(case: str, made: Path, tmp_path: Path) -> None:
    name, tensor = SCALES[case]
    shutil.copytree(made / name, tmp_path / "x")
    edit_tensor(tmp_path / "x" / "converted", tensor, lambda data: data.__setitem__(0, data[0] ^ 1))
    refit(tmp_path / "x" / "converted")
    assert ("source -> converted: kept words", tensor) in failures(tmp_path / "x", ranks=False)


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_not_sane(case: str, value: float, made: Path, tmp_path: Path) -> None:
    name, tensor = SCALES[case]
    shutil.copytree(made / name / "converted", tmp_path / "converted")
    edit_tensor(tmp_path / "converted", tensor, lambda data: data.view(np.float32).__setitem__(0, value))
    refit(tmp_path / "converted")
    report = verify(None, tmp_path / "converted")
    assert [(p.name, f.tensor) for p in report.failed for f in p.failures] == [("converted: sane values", tensor)]


def test_scales_are_repeated_where_a_cut_falls_inside_a_tile(made: Path) -> None:
    """S10: 128 x 128 tiles of a [128, 64] matrix cut at row 64: each rank has its half of the one tile, and its scale."""
    folder = made / "fp8 blocks, F32 scales"
    for rank in (0, 1):
        manifest = read_manifest(folder / "ranks" / f"rank-{rank}-of-2")
        record = manifest.tensors[f"{UP}.weight_scale"]
        assert record.encoding == "fp8_e4m3/128x128" and record.canonical_shape == [1, 1]
        assert record.split is not None and record.split.ranges == [(rank, rank + 1)]
        mixed = manifest.tensors[f"{LAYER}.linear_attn.in_proj_qkv.weight_scale"]
        assert mixed.split is not None  # q, k: 128 rows each, v: 384; a rank has 64, 64 and 192 of them
        assert mixed.split.ranges == [(r, r + n) for r, n in ((rank, 1), (2 + rank, 1), (4 + 3 * rank, 3))]
        assert mixed.canonical_shape == [5, 1]


def test_a_repeated_scale_that_differs_is_found(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(made / "fp8 blocks, F32 scales", folder)
    tensor = f"{LAYER}.linear_attn.in_proj_qkv.weight_scale"
    edit_tensor(folder / "ranks" / "rank-1-of-2", tensor, lambda data: data.__setitem__(13, data[13] ^ 1))
    refit(folder / "ranks" / "rank-1-of-2")
    assert ("converted -> ranks: words", tensor) in failures(folder)
    assert ("ranks: joined whole", tensor) in failures(folder, source=False, converted=False)


def change_record(tensor: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["tensors"][tensor].update(changes)


def recode(folder: Path, parts: tuple[str, ...], encoding: str) -> None:
    """Claim another encoding for every part of one weight at once."""

    def change(manifest: dict[str, Any]) -> None:
        for part in parts:
            manifest["tensors"][f"{UP}.{part}"]["encoding"] = encoding

    edit_manifest(folder, change)


def test_another_tile_or_direction_in_the_manifest_is_found(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(made / "fp8 blocks, F32 scales" / "converted", folder)
    recode(folder, ("weight", "weight_scale"), "fp8_e4m3/64x64")
    (failed,) = verify(None, folder).failed
    assert failed.name == "converted: manifest" and f"{UP}.weight_scale" in str(failed.failures[0])
    other = tmp_path / "y"
    shutil.copytree(made / "ct nvfp4" / "converted", other)
    recode(other, ("weight", "weight_scale", "weight_global_scale"), "nvfp4")
    (failed,) = verify(None, other).failed
    assert failed.name == "converted: manifest" and f"{UP}.weight_scale_2" in str(failed.failures[0])


CLAIMS: dict[str, tuple[Callable[[dict[str, Any]], object], str, str | None]] = {
    "dropped a weight": (
        lambda m: m["source"].setdefault("dropped", {}).__setitem__(f"{UP}.weight_packed", "why not"),
        "source -> converted: source bytes",
        f"{UP}.weight_packed",
    ),
    "dropped what was never there": (
        lambda m: m["source"].setdefault("dropped", {}).__setitem__("x.input_scale", "why not"),
        "source -> converted: source bytes",
        "x.input_scale",
    ),
    "another quantisation": (
        lambda m: m["source"]["quantization_config"].__setitem__("format", "float-quantized"),
        "source -> converted: side files",
        None,
    ),
    "absent, but there": (
        lambda m: m["source"].__setitem__("absent", ["mtp"]),
        "source -> converted: side files",
        None,
    ),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_records_about_the_source_are_not_taken_on_trust(case: str, made: Path, tmp_path: Path) -> None:
    change, proof, tensor = CLAIMS[case]
    shutil.copytree(made / "ct nvfp4", tmp_path / "x")
    edit_manifest(tmp_path / "x" / "converted", change)
    assert (proof, tensor) in failures(tmp_path / "x", ranks=False)


def test_manifests_of_plain_sources_say_nothing_of_it(tmp_path: Path) -> None:
    """Directories that an earlier version wrote keep their digests."""
    convert(exports.TINY, tmp_path / "converted", load_recipe("v100"), 2, lambda count: None)
    written = json.loads((tmp_path / "converted" / "duovolt.json").read_text())
    assert set(written["source"]) == {"quantization_config", "hf_quant_config", "files"}
