"""dequantize: the same float32 values from a converted directory, from its ranks, and from the encodings' own decode."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings import plain
from duovolt.checkpoint.encodings.weights import read_weight, weights_of
from duovolt.checkpoint.manifest import read_manifest

from .conftest import contents

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def stages(source: Path, tmp_path: Path, command: Command) -> tuple[Path, Path, Path]:
    converted, ranks = tmp_path / "converted", tmp_path / "ranks"
    assert command("convert", source, converted).returncode == 0
    assert command("shard", converted, ranks, "--tp", 2).returncode == 0
    return source, converted, ranks


def test_converted_and_ranks_give_the_decoded_values(
    stages: tuple[Path, Path, Path], tmp_path: Path, command: Command
) -> None:
    _, converted, ranks = stages
    for name, directory in (("a", converted), ("b", ranks)):
        result = command("dequantize", directory, tmp_path / name, "--dtype", "float32")
        assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    manifest, checkpoint, decoded = (
        read_manifest(converted),
        Checkpoint.open(converted),
        Checkpoint.open(tmp_path / "a"),
    )
    assert set(decoded.tensors) == set(weights_of(manifest))
    for weight in decoded.tensors:
        np.testing.assert_array_equal(decoded.read(weight), read_weight(checkpoint, manifest, weight))


def test_bfloat16_is_one_rounding_and_keeps_plain_words(
    stages: tuple[Path, Path, Path], tmp_path: Path, command: Command
) -> None:
    source, converted, _ = stages
    assert command("dequantize", converted, tmp_path / "plain").returncode == 0
    manifest, before, exact = read_manifest(converted), Checkpoint.open(source), Checkpoint.open(converted)
    decoded = Checkpoint.open(tmp_path / "plain")
    for weight, parts in weights_of(manifest).items():
        if "plain" in parts:
            np.testing.assert_array_equal(decoded.read(weight), before.read(weight))
        else:
            values = torch.from_numpy(read_weight(exact, manifest, weight)).to(torch.bfloat16)
            np.testing.assert_array_equal(decoded.read(weight), values.view(torch.uint16).numpy())


def test_the_result_loads_in_transformers(stages: tuple[Path, Path, Path], tmp_path: Path, command: Command) -> None:
    _, converted, _ = stages
    assert command("dequantize", converted, tmp_path / "plain").returncode == 0
    AutoConfig.from_pretrained(tmp_path / "plain")
    _, info = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]


def test_a_source_keeps_its_words(source: Path, tmp_path: Path, command: Command) -> None:
    assert command("dequantize", source, tmp_path / "bf16").returncode == 0
    assert command("dequantize", source, tmp_path / "f32", "--dtype", "float32").returncode == 0
    before, bf16, f32 = (Checkpoint.open(p) for p in (source, tmp_path / "bf16", tmp_path / "f32"))
    for name, entry in before.tensors.items():
        np.testing.assert_array_equal(bf16.read(name), before.read(name))
        np.testing.assert_array_equal(f32.read(name), plain.to_float32(before.read(name), entry.dtype))
    with safe_open(tmp_path / "f32" / "model-00001-of-00001.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("fault", ["rank missing", "rank twice", "unfinished", "not empty", "inside"])
def test_bad_input(fault: str, stages: tuple[Path, Path, Path], tmp_path: Path, command: Command) -> None:
    ranks = stages[2]
    target, words = tmp_path / "plain", ""
    if fault == "rank missing":
        shutil.rmtree(ranks / "rank-1-of-2")
        words = "rank"
    elif fault == "rank twice":
        shutil.rmtree(ranks / "rank-1-of-2")
        shutil.copytree(ranks / "rank-0-of-2", ranks / "rank-1-of-2")
        words = "rank"
    elif fault == "unfinished":
        (ranks / "rank-1-of-2" / "duovolt.json").unlink()
        words = "unfinished"
    elif fault == "not empty":
        target.mkdir()
        (target / "x").write_text("x")
        words = "not empty"
    else:
        target, words = ranks / "plain", "Choose another place"
    result = command("dequantize", ranks, target)
    assert result.returncode in (1, 2) and words in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(target.glob("*.safetensors"))
