"""Sources that others quantised, converted: words and scales are theirs to the last bit, at every stage."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.dequantize import tensors_of
from duovolt.convert.pipeline import ConversionReport, convert
from duovolt.convert.recipe import load_recipe
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.model.partition import split_of
from duovolt.shard.split import shard
from duovolt.tests.support import exports
from duovolt.verify.proofs import verify

MODELOPT = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5_modelopt_nvfp4" / "checkpoint"
TINY = exports.TINY


def to(source: Path, target: Path, mtp_from: Path | None = None) -> ConversionReport:
    return convert(source, target, load_recipe("v100"), 2, lambda count: None, mtp_from=mtp_from)


def values(directory: Path, dtype: str = "F32") -> dict[str, np.ndarray]:
    """Every decoded tensor of any directory, as raw words."""
    found = {}
    for tensor in tensors_of(directory, dtype)[0]:
        rows = tensor.shape[0] if tensor.shape else 1
        whole = np.ascontiguousarray(tensor.rows(0, rows)).reshape(tensor.shape)
        found[tensor.name] = whole.view(np.uint32 if whole.itemsize == 4 else np.uint16)
    return found


def require_rank_parts(ranks: Path, tp: int, whole: dict[str, np.ndarray]) -> None:
    """What the engine reads from each rank is the partition table's part of the whole, bit for bit.

    But for the sign of zeros: ModelOpt's own decoding, which `dequantize` follows, has no -0 in nvfp4.
    """
    zero = np.float32(0)
    for rank in range(tp):
        path = ranks / f"rank-{rank}-of-{tp}"
        checkpoint, manifest, config = Checkpoint.open(path), read_manifest(path), ModelConfig.read(path)
        for name, spec in inventory(config).items():
            split = split_of(spec, config, tp)
            expected = whole[name]
            if split.axis is not None:
                index = np.concatenate([np.arange(*pair) for pair in split.ranges[rank]])
                expected = np.take(expected, index, axis=split.axis)
            found = read_weight(checkpoint, manifest, name)
            ours, theirs = ((array + zero).view(np.uint32) for array in (found, expected.view(np.float32)))
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{path} {name}")


@pytest.mark.parametrize("name", exports.EXPORTS)
def test_an_export_survives_every_stage(name: str, tmp_path: Path) -> None:
    """C11: mixed schemes among them, weight by weight."""
    source, converted = tmp_path / "source", tmp_path / "converted"
    written = exports.export(source, name)
    to(source, converted)
    before, after = values(source), values(converted)
    assert before.keys() == after.keys()
    quantised = {f"{module}.weight" for module in written}
    assert len(quantised) > 15
    for weight in quantised:
        np.testing.assert_array_equal(after[weight], before[weight], err_msg=weight)
    for tp in (2, 4) if "block" in name or "pb_wo" in name else (2,):
        ranks = tmp_path / f"ranks{tp}"
        shard(converted, ranks, tp)
        report = verify(source, converted, ranks)
        assert report.ok, [str(failure) for proof in report.failed for failure in proof.failures]
        assert verify(source, None, ranks).ok
        joined = values(ranks)
        for weight, words in after.items():
            np.testing.assert_array_equal(joined[weight], words, err_msg=weight)
        require_rank_parts(ranks, tp, after)


def test_global_scales_keep_direction_and_bits(tmp_path: Path) -> None:
    for name, suffix in (("ct nvfp4", ".weight_global_scale"), ("modelopt nvfp4", ".weight_scale_2")):
        source, converted = tmp_path / name / "source", tmp_path / name / "converted"
        written = exports.export(source, name)
        to(source, converted)
        manifest, before, after = read_manifest(converted), Checkpoint.open(source), Checkpoint.open(converted)
        stored = {module: float(after.read(f"{module}{suffix}")) for module in written}
        assert len(set(stored.values())) == len(written)  # fused partners keep scales of their own
        for module in written:
            assert after.read(f"{module}{suffix}").tobytes() == before.read(f"{module}{suffix}").tobytes()
            assert manifest.tensors[f"{module}{suffix}"].part == "global_scale"
        other = {".weight_global_scale", ".weight_scale_2"} - {suffix}
        assert not any(stored.endswith(tuple(other)) for stored in manifest.tensors)


def test_the_same_weights_from_both_libraries_decode_alike(tmp_path: Path) -> None:
    """A divisor of 2^k and a multiplier of 2^-k mean the same; the number's size tells nothing (Q01)."""
    rng = np.random.default_rng(3)
    divisor = exports.ct_nvfp4("m", (16, 32), rng)
    multiplier = {
        "m.weight": divisor["m.weight_packed"],
        "m.weight_scale": divisor["m.weight_scale"],
        "m.weight_scale_2": (divisor["m.weight_global_scale"] * 0 + 2.0**9).reshape(()),
    }
    divisor["m.weight_global_scale"] = divisor["m.weight_global_scale"] * 0 + 2.0**-9
    found = []
    for name, tensors, config in (
        ("ct", divisor, exports._ct("nvfp4-pack-quantized", [exports._ct_group(["Linear"], "tensor_group", 4)], [])),
        ("modelopt", multiplier, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    ):
        exports.save(tmp_path / name, tensors)
        (tmp_path / name / "config.json").write_text(json.dumps({"quantization_config": config}))
        found.append(values(tmp_path / name)["m.weight"].view(np.float32))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0]).max() > 1000


def test_the_peers_export_of_the_family(tmp_path: Path) -> None:
    report = to(MODELOPT, tmp_path / "converted")
    assert any("the MTP layer is missing" in notice and "--mtp-from" in notice for notice in report.notices)
    manifest = report.manifest
    assert manifest.source.absent == ["mtp"] and not manifest.source.second
    assert len(manifest.source.dropped) == 25 and all("activations" in why for why in manifest.source.dropped.values())
    before, after = values(MODELOPT), values(tmp_path / "converted")
    quantised = [
        name for name, record in manifest.tensors.items() if record.part == "words" and name != "lm_head.weight"
    ]
    assert len(quantised) == 25
    for name in quantised:
        np.testing.assert_array_equal(before[name], after[name])
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    result = verify(MODELOPT, tmp_path / "converted", tmp_path / "ranks")
    assert result.ok and any("words and scales of 25 weights" in proof.detail for proof in result.proofs)
    config = ModelConfig.read(tmp_path / "converted")
    assert config.mtp_layers == 0
    written = Checkpoint.open(tmp_path / "converted").config
    assert "quantization_config" not in written and not (tmp_path / "converted" / "hf_quant_config.json").exists()
    assert manifest.source.quantization_config == Checkpoint.open(MODELOPT).config["quantization_config"]
    assert manifest.source.hf_quant_config is not None


def test_a_recipe_without_rules_changes_no_value_at_all(tmp_path: Path) -> None:

    recipe = msgspec.structs.replace(load_recipe("v100"), rules=[])
    convert(MODELOPT, tmp_path / "converted", recipe, 2, lambda count: None)
    for dtype in ("F32", "BF16"):
        before, after = values(MODELOPT, dtype), values(tmp_path / "converted", dtype)
        assert before.keys() == after.keys()
        for name, words in before.items():
            np.testing.assert_array_equal(after[name], words, err_msg=name)


def test_a_missing_mtp_layer_comes_from_a_second_source(tmp_path: Path) -> None:
    report = to(MODELOPT, tmp_path / "converted", mtp_from=TINY)
    assert report.manifest.source.second == ["mtp"] and report.manifest.source.absent == []
    assert ModelConfig.read(tmp_path / "converted").mtp_layers == 1
    alone = verify(MODELOPT, tmp_path / "converted")
    assert alone.ok and any("second source" in note for note in alone.notes)
    both = verify(MODELOPT, tmp_path / "converted", mtp_from=TINY)
    assert both.ok and not any("second source" in note for note in both.notes)
    plain = values(TINY)
    norm = "mtp.norm.weight"
    np.testing.assert_array_equal(values(tmp_path / "converted")[norm], plain[norm])


def test_a_second_source_may_be_quantised_too(tmp_path: Path) -> None:
    exports.export(tmp_path / "second", "fp8 blocks, BF16 scales")
    to(MODELOPT, tmp_path / "converted", mtp_from=tmp_path / "second")
    whole, second = values(tmp_path / "converted"), values(tmp_path / "second")
    manifest = read_manifest(tmp_path / "converted")
    name = "mtp.layers.0.mlp.up_proj.weight"
    assert manifest.tensors[name].encoding == "fp8_e4m3/128x128"
    np.testing.assert_array_equal(whole[name], second[name])
    assert verify(MODELOPT, tmp_path / "converted", mtp_from=tmp_path / "second").ok


@pytest.mark.parametrize("recipe", ["v100-nvfp4", "v100-fp8", "bf16"])
@pytest.mark.parametrize("quantiser", ["default", "modelopt", "compressed-tensors"])
def test_a_recipe_is_for_what_is_plain(
    recipe: str, quantiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate is nvfp4 in the source, up is not: gate keeps its words and scale, and lends them to nobody."""

    def gate_alone(module: str) -> exports.Write | None:
        return exports.modelopt_nvfp4 if module.endswith("mlp.gate_proj") and not module.startswith("mtp") else None

    monkeypatch.setitem(exports.EXPORTS, "gate alone", (gate_alone, exports._mixed_modelopt))
    source, whole = tmp_path / "source", msgspec.structs.replace(load_recipe(recipe), quantiser=quantiser)
    written = exports.export(source, "gate alone")
    assert len(written) == 4
    manifest = convert(source, tmp_path / "converted", whole, 2, lambda count: None).manifest
    usual = convert(TINY, tmp_path / "usual", whole, 2, lambda count: None).manifest
    before, after = values(source), values(tmp_path / "converted")
    for name, record in manifest.tensors.items():
        if record.weight.removesuffix(".weight") in written:
            assert record.encoding == "nvfp4"
            np.testing.assert_array_equal(after[record.weight], before[record.weight])
        elif not ("up_proj" in name and quantiser != "default"):  # the libraries let gate and up share a scale
            assert record.digest == usual.tensors[name].digest, name
    assert verify(source, tmp_path / "converted").ok
