"""Synthetic checkpoints: bytes that depend on the seed alone, words that are legal, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.digest import digest_file
from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings import fp8
from duovolt.checkpoint.encodings.plain import to_float32
from duovolt.checkpoint.manifest import read_manifest
from duovolt.checkpoint.sources import read_form
from duovolt.checkpoint.writer import Planned
from duovolt.cli.main import main
from duovolt.model.config import FULL, ModelConfig
from duovolt.perf import tables
from duovolt.perf.shapes import configuration
from duovolt.perf.synth import Specimen, write_source
from duovolt.runtime.proxy.options import ServeOptions
from duovolt.runtime.proxy.plan import make_plan


def files_of(directory: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in directory.iterdir()}


def synth(target: Path, *options: str) -> int:
    return main(["synth", str(target), "--config", "narrow", "--layers", "4", "--quiet", *options])


def test_a_seed_decides_every_byte_and_workers_decide_none(tmp_path: Path) -> None:
    for name, options in {"one": ["--workers", "1"], "many": ["--workers", "7"], "other": ["--seed", "1"]}.items():
        assert synth(tmp_path / name, "--release", "nvfp4-ct", *options) == 0
    one, many, other = (files_of(tmp_path / name) for name in ("one", "many", "other"))
    assert one == many
    assert all((one[name] == other[name]) != name.endswith(".safetensors") for name in one)


def test_the_bytes_of_a_seed_are_pinned() -> None:
    """Figures of benchmarks name a seed: the same seed must mean the same checkpoint in the next version too."""
    words = tables.block(7, Planned("a.weight", "BF16", (2, 8)), "weight", 0)
    assert words.tobytes().hex() == PINNED


PINNED = "bb3ad9ba14bd163c663c04bcb5ba733cdd3c6d3c5e3ca53ce93c92bccd3c533c"


def test_blocks_do_not_repeat_and_the_last_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 64)
    tensor = Planned("a.weight", "F8_E4M3", (3, 45))
    found = [tables.block(0, tensor, "fp8", number).tobytes() for number in range(tables.blocks(tensor))]
    assert [len(block) for block in found] == [64, 64, 7] and len(set(found)) == 3
    assert tables.block(0, Planned("b.weight", "F8_E4M3", (3, 45)), "fp8", 0).tobytes() != found[0]


@pytest.mark.parametrize("kind, dtype", [("fp8", "F8_E4M3"), ("block scale", "F8_E4M3"), ("nvfp4", "U8")])
def test_tables_of_bytes_hold_legal_words_of_sane_size(kind: str, dtype: str) -> None:
    words = tables.table(kind, dtype).view(np.uint8)
    if kind == "nvfp4":
        assert len(np.unique(words & 15)) > 8 and np.array_equal(np.unique(words & 15), np.unique(words >> 4))
        return
    values = fp8.DECODE[words]
    assert not np.isnan(values).any()
    if kind == "block scale":
        assert values.min() >= 64 and values.max() == 448
    else:
        assert abs(values.mean()) < 1 and 100 < values.std() < 125


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_tables_of_scales_are_positive_and_finite(dtype: str) -> None:
    for kind in ("fp8 scale", "multiplier", "divisor", "one", "gain"):
        if (kind, dtype) == ("multiplier", "F16"):
            continue  # below what F16 holds with any precision, and stored in F32 by every library
        words = tables.table(kind, dtype)
        values = to_float32(words.view(np.float16) if dtype == "F16" else words, dtype)
        assert np.isfinite(values).all() and (values > 0).all(), kind
    weights = tables.table("weight", "F32")
    assert weights.std() == pytest.approx(0.02, rel=1e-3) and np.abs(weights).max() < 0.1


def test_depth_is_cut_and_every_fourth_layer_stays_full(tmp_path: Path) -> None:
    config = configuration("qwen3.8-27b", 9)
    text = ModelConfig.from_dict(config).text
    assert text.num_hidden_layers == 9 and [i for i, kind in enumerate(text.layer_types) if kind == FULL] == [3, 7]
    assert text.hidden_size == 5120
    for release in ("nvfp4-ct", "nvfp4-modelopt", "qwen3.8-fp8", "qwen3.5-bf16"):  # the shallowest model has each form
        assert synth(tmp_path / release, "--release", release, "--layers", "1") == 0
        assert read_form(Checkpoint.open(tmp_path / release)).notices == []


def test_later_stages_are_the_real_ones(tmp_path: Path) -> None:
    assert synth(tmp_path / "source") == 0
    assert synth(tmp_path / "converted", "--stage", "converted", "--recipe", "v100-fp8") == 0
    assert synth(tmp_path / "ranks", "--stage", "ranks", "--tp", "2", "--recipe", "v100-fp8") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "ranks", "source"]
    stages = {"--source": "source", "--converted": "converted", "--ranks": "ranks"}
    places = [str(word) for option, name in stages.items() for word in (option, tmp_path / name)]
    assert main(["verify", "--quiet", *places]) == 0
    assert read_manifest(tmp_path / "ranks" / "rank-1-of-2").tp_size == 2


def test_an_interrupted_run_of_another_seed_is_not_taken_for_this_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duovolt", "synth", str(tmp_path / "c"), "--config", "narrow", "--layers", "4",
               "--stage", "converted", "--quiet"]  # fmt: skip
    assert subprocess.run(command, env=os.environ | {"DUOVOLT_STOP_AT_WRITE": "40"}, timeout=60).returncode < 0
    left = [path.name for path in tmp_path.iterdir()]
    assert left and all(name.startswith(".c.synth-") for name in left)
    assert synth(tmp_path / "c", "--stage", "converted", "--seed", "1") == 0
    assert synth(tmp_path / "d", "--stage", "converted", "--seed", "1") == 0
    assert read_manifest(tmp_path / "c").conversion_id == read_manifest(tmp_path / "d").conversion_id


def test_a_killed_run_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duovolt", "synth", str(tmp_path / "b"), "--config", "narrow", "--layers", "4",
               "--release", "qwen3.8-fp8", "--workers", "2"]  # fmt: skip
    killed = subprocess.run(command, env=os.environ | {"DUOVOLT_STOP_AT_WRITE": "60"}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert subprocess.run(command, timeout=60).returncode == 0
    assert synth(tmp_path / "a", "--release", "qwen3.8-fp8") == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_model_that_can_answer_gets_a_tokenizer(tmp_path: Path) -> None:
    assert synth(tmp_path / "source") == 0
    assert (tmp_path / "source" / "tokenizer.json").exists()
    small = configuration("narrow", 1)
    small["text_config"]["vocab_size"] = 96
    write_source(tmp_path / "small", Specimen(small, "bf16", 0, sparse=False), 1, lambda count: None)
    assert "tokenizer.json" not in Checkpoint.open(tmp_path / "small").side_files


def odd_config(tmp_path: Path, **text: int) -> str:
    config = configuration("narrow", 4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": config["text_config"] | text}))
    return str(tmp_path / "config.json")


REFUSED = {
    "unknown name": (["--config", "qwen9"], "neither a known name"),
    "no such file": (["--config", "nowhere/config.json"], "no such file"),
    "another family": (["--config", "{other}"], "is not supported"),
    "too deep": (["--config", "narrow", "--layers", "65"], "narrow has 64"),
    "no layer": (["--config", "narrow", "--layers", "0"], "give 1 to 64"),
    "no width": (["--config", "narrow", "--stage", "ranks"], "no default number of ranks"),
    "width for nothing": (["--config", "narrow", "--tp", "2"], "go together"),
    "holes cannot be converted": (["--config", "narrow", "--fill", "sparse", "--stage", "converted"], "holes"),
    "no workers": (["--config", "narrow", "--workers", "0"], "--workers"),
    "negative seed": (["--config", "narrow", "--seed", "-1"], "--seed"),
    "not empty": (["--config", "narrow", "--layers", "1"], "not empty"),
    "groups": (["--config", "{odd}", "--release", "nvfp4-ct"], "no multiple of 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_before_anything_is_written(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words = REFUSED[case]
    (tmp_path / "other.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    odd = odd_config(tmp_path, intermediate_size=104)
    options = [option.format(other=tmp_path / "other.json", odd=odd) for option in options]
    target = tmp_path / "target"
    if case == "not empty":
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    assert main(["synth", str(target), *options]) == 2
    assert words in capsys.readouterr().err
    assert not target.exists() or [path.name for path in target.iterdir()] == ["mine.txt"]


def test_what_cannot_be_converted_or_split_is_refused_before_the_source_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hidden source of full size would stay otherwise."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\nlayout = "v100"\nmax_shard_bytes = 100000\n[[rules]]\nroles = ["no.such"]\nencoding = "keep"\n'
    )
    for options in (["--stage", "converted", "--recipe", str(recipe)], ["--stage", "ranks", "--tp", "3"]):
        assert synth(tmp_path / "t", *options) == 2
    assert "over 3 ranks" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


@pytest.mark.parametrize(("name", "merge"), [("narrow", 2), ("other", 4)])
def test_a_specimen_with_a_tower_reads_pictures_and_videos(tmp_path: Path, name: str, merge: int) -> None:
    """The ids of config.json are the tokenizer's, and the processors have the extents of the specimen's own tower."""
    config = configuration("narrow", 4)
    config["vision_config"] |= {"spatial_merge_size": merge}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ranks, chosen = tmp_path / "ranks", str(tmp_path / "config.json") if merge != 2 else "narrow"
    words = ["synth", str(ranks), "--config", chosen, "--layers", "4", "--stage", "ranks", "--tp", "1", "--quiet"]
    assert main(words) == 0
    pictures = make_plan(ServeOptions(ranks=ranks, backend="reference")).pictures
    assert pictures is not None and pictures.videos is not None
    assert set(pictures.pads) == {"<|image_pad|>", "<|video_pad|>"}
    assert pictures.processor.factor == 16 * merge and pictures.processor.max_pixels == 4096 * 4096


def test_a_specimen_without_a_tower_has_no_processors(tmp_path: Path) -> None:
    config = configuration("narrow", 4) | {"vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["synth", str(tmp_path / "text"), "--config", str(tmp_path / "config.json"), "--fill", "sparse", "--quiet"]
    assert main(words) == 0
    names = {path.name for path in (tmp_path / "text").iterdir()}
    assert "tokenizer.json" in names and not any("preprocessor" in name for name in names)
