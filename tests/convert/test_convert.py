"""Whole conversions: what is stored, that nothing but input and recipe decides its bytes, and that kills do no harm."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from duovolt.checkpoint.digest import digest_bytes, digest_file
from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.download_record import DownloadRecord, finish_record
from duovolt.checkpoint.encodings import fp8, nvfp4, plain
from duovolt.checkpoint.encodings.weights import canonical, read_weight
from duovolt.checkpoint.manifest import read_manifest
from duovolt.convert import converter
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import Recipe, load_recipe
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory

from .conftest import contents, rewrite

Command = Callable[..., subprocess.CompletedProcess[str]]


def to(source: Path, target: Path, recipe: Recipe | None = None, workers: int = 2) -> Path:
    convert(source, target, recipe or load_recipe("v100"), workers, lambda count: None)
    return target


def test_every_tensor_becomes_what_the_recipe_says(source: Path, tmp_path: Path) -> None:
    converted = to(source, tmp_path / "converted")
    manifest, before, after = read_manifest(converted), Checkpoint.open(source), Checkpoint.open(converted)
    specs = inventory(ModelConfig.read(source))
    encodings: dict[str, set[str]] = {}
    for name, spec in specs.items():
        encodings.setdefault(manifest.tensors[name].encoding, set()).add(f"{spec.group}:{spec.role}")
        values = plain.to_float32(before.read(name), before.tensors[name].dtype)
        record = manifest.tensors[name]
        if record.part == "plain":
            assert bytes(after.read(name).data) == bytes(before.read(name).data)
            continue
        scale_name = name.removesuffix(".weight") + (
            ".weight_scale_2" if record.encoding == "nvfp4" else ".weight_scale"
        )
        scale = after.read(scale_name)
        words = canonical(after, name, record)
        if record.encoding == "nvfp4":
            expected_scale = nvfp4.multiplier(float(np.abs(values).max()))
            expected, block_scale = nvfp4.encode(values, expected_scale)
            stored = name.removesuffix(".weight") + ".weight_scale"
            np.testing.assert_array_equal(canonical(after, stored, manifest.tensors[stored]), block_scale)
            assert scale == expected_scale and scale.shape == ()
        else:
            expected_scale = fp8.row_scales(np.abs(values).max(axis=1))
            expected = fp8.encode_rows(values, expected_scale)
            np.testing.assert_array_equal(scale, expected_scale)
        np.testing.assert_array_equal(words, expected)
        assert np.abs(read_weight(after, manifest, name) - values).max() < 0.2 * np.abs(values).max()
    assert {role for role in encodings["nvfp4"]} == {"text:mlp.gate_proj", "text:mlp.up_proj", "text:mlp.down_proj"}
    attention = {f"self_attn.{p}_proj" for p in "qkvo"}
    linear = {f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "out_proj")}
    assert encodings["fp8_e4m3"] == (
        {f"text:{role}" for role in attention | linear | {"lm_head"}}
        | {f"mtp:{role}" for role in attention | {"mtp.fc", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}}
    )
    kept = encodings["bf16"]
    assert {
        "text:embed_tokens",
        "text:linear_attn.A_log",
        "text:linear_attn.conv1d",
        "text:linear_attn.in_proj_a",
    } <= kept
    assert sum(role.startswith("vision:") for role in kept) == len(
        {s.role for s in specs.values() if s.group == "vision"}
    )


def test_manifest_and_headers_tell_the_truth(source: Path, tmp_path: Path) -> None:
    converted = to(source, tmp_path / "converted")
    manifest = read_manifest(converted)
    checkpoint = Checkpoint.open(converted)
    assert set(manifest.files) == {p.name for p in converted.iterdir()} - {"duovolt.json"}
    for name, record in manifest.files.items():
        assert (converted / name).stat().st_size == record.size and digest_file(converted / name) == record.digest
    assert set(manifest.tensors) == set(checkpoint.tensors)
    origin = Checkpoint.open(source)
    for name, record in manifest.tensors.items():
        entry = checkpoint.tensors[name]
        assert (record.dtype, tuple(record.shape), record.file) == (entry.dtype, entry.shape, entry.path.name)
        assert record.digest == digest_bytes(bytes(checkpoint.read_range(name, 0, entry.nbytes)))
        (reference,) = record.sources
        whole = origin.read_range(reference.name, 0, origin.tensors[reference.name].nbytes)
        assert reference.digest == digest_bytes(bytes(whole))
    for name, record in manifest.source.files.items():
        assert digest_file(source / name) == record.digest
    for file in checkpoint.headers:
        with safe_open(converted / file, "np") as opened:  # the reference reader accepts every file we write
            assert opened.metadata() == {
                "format": "pt",
                "duovolt.format_version": "1",
                "duovolt.conversion_id": manifest.conversion_id,
            }


def test_bytes_depend_on_neither_workers_nor_bands_nor_shard_boundaries_of_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = contents(to(source, tmp_path / "one", workers=1))
    monkeypatch.setattr(converter, "BAND_BYTES", 4096)
    monkeypatch.setattr(converter, "SPOOL_BYTES", 64)
    assert contents(to(source, tmp_path / "many", workers=5)) == one


def test_conversion_id_follows_every_input_and_nothing_else(source: Path, tmp_path: Path) -> None:
    first = read_manifest(to(source, tmp_path / "a")).conversion_id
    (source / "README.md").write_text("a side file")
    second = read_manifest(to(source, tmp_path / "b")).conversion_id
    rewrite(source, "model.language_model.norm.weight", lambda words: words ^ 1)
    third = read_manifest(to(source, tmp_path / "c")).conversion_id
    other = msgspec.structs.replace(load_recipe("v100"), layout="canonical")
    fourth = read_manifest(to(source, tmp_path / "d", other)).conversion_id
    assert len({first, second, third, fourth}) == 4
    DownloadRecord(1, "a/b", "main", "0123", {}).write_pending(source)
    finish_record(source)
    again = read_manifest(to(source, tmp_path / "e", other))
    assert again.conversion_id == fourth and again.provenance["commit"] == "0123"


def test_small_shards_keep_a_weight_and_its_scales_together(source: Path, tmp_path: Path) -> None:
    small = msgspec.structs.replace(load_recipe("v100"), max_shard_bytes=60_000)
    manifest = read_manifest(to(source, tmp_path / "converted", small))
    files: dict[str, set[str]] = {}
    for record in manifest.tensors.values():
        files.setdefault(record.weight, set()).add(record.file)
    assert all(len(found) == 1 for found in files.values())
    assert len({record.file for record in manifest.tensors.values()}) > 5


def test_plain_words_survive_whatever_they_are(source: Path, tmp_path: Path) -> None:
    """Q12: a copy is no arithmetic."""
    odd = np.array([0x0001, 0x8000, 0x8001, 0x0080], np.uint16)  # subnormals, -0, the smallest normal
    rewrite(source, "model.language_model.layers.0.linear_attn.norm.weight", lambda words: np.resize(odd, words.shape))
    converted = Checkpoint.open(to(source, tmp_path / "converted"))
    words = converted.read("model.language_model.layers.0.linear_attn.norm.weight")
    np.testing.assert_array_equal(words, np.resize(odd, words.shape))


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640)])
def test_modes_follow_the_umask(source: Path, tmp_path: Path, command: Command, umask: int, mode: int) -> None:
    import os

    old = os.umask(umask)
    try:
        assert command("convert", source, tmp_path / "converted").returncode == 0
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "converted").iterdir()} == {mode}


def test_side_files_arrive_byte_for_byte(source: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "foo_config.json"):
        (source / name).write_bytes(f"content of {name} \x00\xff".encode("latin-1"))
    (source / "pytorch_model.bin").write_bytes(b"not ours")
    (source / "hf_quant_config.json").write_text('{"quantization": {}}')
    converted = to(source, tmp_path / "converted")
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "foo_config.json", "config.json"):
        assert (converted / name).read_bytes() == (source / name).read_bytes()
    assert not (converted / "pytorch_model.bin").exists() and not (converted / "hf_quant_config.json").exists()
    assert read_manifest(converted).source.hf_quant_config == {"quantization": {}}


def test_a_kill_at_any_write_resumes_to_the_same_bytes(source: Path, tmp_path: Path, command: Command) -> None:
    recipe = tmp_path / "small.toml"
    text = json.dumps(load_recipe("v100").resolved())
    settings = json.loads(text) | {"max_shard_bytes": 150_000}
    rules = "".join(
        f'[[rules]]\ngroup = "{r["group"]}"\nroles = {json.dumps(r["roles"])}\nencoding = "{r["encoding"]}"\n'
        for r in settings["rules"]
    )
    recipe.write_text(f'name = "small"\nlayout = "v100"\nmax_shard_bytes = {settings["max_shard_bytes"]}\n{rules}')
    counted = tmp_path / "writes"
    assert (
        command("convert", source, tmp_path / "whole", "--recipe", recipe, DUOVOLT_COUNT_WRITES=str(counted)).returncode
        == 0
    )
    whole, writes = contents(tmp_path / "whole"), int(counted.read_text())
    assert writes > 50
    for stop in sorted({1, 2, 5, writes // 3, writes // 2, 2 * writes // 3, writes - 2, writes - 1}):
        target = tmp_path / f"stopped-{stop}"
        killed = command("convert", source, target, "--recipe", recipe, DUOVOLT_STOP_AT_WRITE=str(stop))
        assert killed.returncode == -9
        if not (target / "duovolt.json").exists():
            unfinished = command("shard", target, tmp_path / "ranks", "--tp", "2")
            assert unfinished.returncode == 2 and "unfinished" in unfinished.stderr
        again = command("convert", source, target, "--recipe", recipe)
        assert again.returncode == 0, again.stderr
        assert contents(target) == whole
