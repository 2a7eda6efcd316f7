"""Public releases by shape, made by `duovolt synth`: full size as headers over holes, reduced depth through every stage."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duovolt.checkpoint.directory import INDEX, Checkpoint
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.runtime.engine.cuda.loading import plan_load

# name -> (files, tensors, GB, weights by encoding in the plan, words of the plan's notices)
RELEASES: dict[str, tuple[Any, ...]] = {
    "bf16": (12, 1199, 55.562855904, {"fp8_e4m3": 217, "nvfp4": 192}, []),
    "qwen3.5-bf16": (11, 1199, 55.562872800, {"fp8_e4m3": 217, "nvfp4": 192}, []),
    "qwen3.8-fp8": (66, 1606, 30.866663264, {"fp8_e4m3/128x128": 407, "fp8_e4m3": 2}, []),
    "nvfp4-ct": (
        66, 1199 + 3 * 168 + 343 + 32, 22.962005568, {"nvfp4/divisor": 168, "fp8_e4m3": 343 + 8},
        ["168 input_global_scale, 16 k_scale, 16 v_scale"]),
    "nvfp4-modelopt": (
        65, 1184 + 3 * 193 + 2 * 208, 21.072029288, {"nvfp4": 193, "fp8_e4m3/tensor": 208},
        ["the MTP layer is missing", "401 input_scale"]),
}  # fmt: skip


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_of_full_size_passes_the_intake(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, tensors, gigabytes, encodings, notices = RELEASES[name]
    path = tmp_path / "release"
    run("synth", path, "--config", "qwen3.8-27b", "--release", name, "--fill", "sparse")
    assert f"{gigabytes * 1e3:,.2f} MB" in capsys.readouterr().out
    on_disk = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    assert on_disk < 8 << 20
    run("inspect", path, "--json")
    facts = json.loads(capsys.readouterr().out)
    run("plan", path, "--json")
    plan = json.loads(capsys.readouterr().out)
    assert (len(facts["files"]), facts["tensors"], facts["bytes"] / 1e9) == (files, tensors, gigabytes)
    assert "unknown" not in facts["by_part_of_the_model"] and not facts["notices"]
    assert {k: v["weights"] for k, v in plan["by_encoding"].items() if k not in ("bf16", "fp32")} == encodings
    assert len(plan["notices"]) == len(notices)
    assert all(any(words in notice for notice in plan["notices"]) for words in notices), plan["notices"]


def test_the_odd_things_of_each_release_are_there(tmp_path: Path) -> None:
    """Odd shard names, F32 tensors, empty index metadata, both of ModelOpt's configuration files."""
    opened = {}
    for name in RELEASES:
        run("synth", tmp_path / name, "--config", "qwen3.8-27b", "--release", name, "--fill", "sparse", "--quiet")
        opened[name] = Checkpoint.open(tmp_path / name)
    odd = opened["qwen3.5-bf16"]
    assert sorted(odd.headers)[0] == "model.safetensors-00001-of-00011.safetensors"
    assert sum(entry.dtype == "F32" for entry in odd.tensors.values()) == 96
    assert odd.tensors["model.language_model.layers.0.linear_attn.A_log"].dtype == "F32"
    for name, empty in (("qwen3.8-fp8", True), ("nvfp4-ct", True), ("bf16", False)):
        assert (json.loads((tmp_path / name / INDEX).read_text())["metadata"] == {}) == empty
    mixed = opened["nvfp4-ct"]
    assert mixed.tensors["model.language_model.layers.55.mlp.up_proj.weight_packed"].dtype == "U8"
    assert mixed.tensors["model.language_model.layers.56.mlp.up_proj.weight"].dtype == "F8_E4M3"
    assert mixed.tensors["model.language_model.layers.3.self_attn.k_scale"].shape == (1,)
    both = opened["nvfp4-modelopt"]
    stated = json.loads((both.path / "hf_quant_config.json").read_text())["quantization"]
    assert stated["quantized_layers"] == both.config["quantization_config"]["quantized_layers"]
    assert "exclude_modules" not in stated and not any(name.startswith("mtp.") for name in both.tensors)


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_of_reduced_depth_passes_every_stage(name: str, tmp_path: Path) -> None:
    """Convert, shard and verify; source, conversion and ranks decode to the same words where the source is quantised."""
    source, converted, ranks = tmp_path / "source", tmp_path / "converted", tmp_path / "ranks"
    run("synth", source, "--config", "narrow", "--layers", 8, "--release", name)
    run("convert", source, converted)
    run("shard", converted, ranks, "--tp", 2)
    run("verify", "--source", source, "--converted", converted, "--ranks", ranks)
    manifest = read_manifest(converted)
    kinds = {record.encoding for record in manifest.tensors.values()}
    assert kinds - {"bf16", "fp32"} == set(RELEASES[name][3])
    assert manifest.provenance["weights"] == {"text": 109, "mtp": 0 if name == "nvfp4-modelopt" else 15, "vision": 33}
    first, second = decoded(source), decoded(converted)
    kept = {r.weight for r in manifest.tensors.values() if r.sources[0].dtype not in ("BF16", "F32")}
    assert bool(kept) == ("bf16" not in name)
    assert all(np.array_equal(first[weight].view(np.uint32), second[weight].view(np.uint32)) for weight in kept)
    for rank in range(
        2
    ):  # and a card's engine takes it, whatever the release has quantised: here the vision tower, too
        plan = plan_load(ranks / f"rank-{rank}-of-2")
        tower = {weight: form.encoding for weight, form in plan.stored.items() if weight.startswith("model.visual.")}
        assert set(tower.values()) == ({"fp8_e4m3"} if name == "nvfp4-ct" else set())
        assert len(tower) == (10 if name == "nvfp4-ct" else 0)  # four of each of two blocks, two of the merger
        assert 0 < plan.vision < plan.nbytes


def decoded(directory: Path) -> dict[str, np.ndarray]:
    """Every weight of a source or converted directory, float32."""
    place = directory.with_name(f"{directory.name}-decoded")
    run("dequantize", directory, place, "--dtype", "float32", "--quiet")
    plain = Checkpoint.open(place)
    return {name: plain.read(name) for name in plain.tensors}
