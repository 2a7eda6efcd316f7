"""Forms of a source that the table of exports lacks: every plain type, ModelOpt's second algorithm, its KV scales, and
where it may say so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.manifest import Manifest
from duovolt.cli.main import main
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.shard.split import shard
from duovolt.tests.support import exports
from duovolt.verify.proofs import verify


def through(source: Path, place: Path) -> Manifest:
    """Converted, split over two ranks, every proof held."""
    report = convert(source, place / "converted", load_recipe("v100"), 2, lambda count: None)
    shard(place / "converted", place / "ranks", 2)
    assert verify(source, place / "converted", place / "ranks").ok
    return report.manifest


def decoded(directory: Path) -> dict[str, np.ndarray]:
    target = directory.with_name(f"{directory.name}-decoded")
    assert main(["dequantize", str(directory), str(target), "--dtype", "float32", "--quiet"]) == 0
    plain = Checkpoint.open(target)
    return {name: plain.read(name).view(np.uint32) for name in plain.tensors}


PLAIN: dict[str, Callable[[str], torch.dtype]] = {
    "F16": lambda name: torch.float16,
    "F32": lambda name: torch.float32,
    "one of each": lambda name: (torch.bfloat16, torch.float16, torch.float32)[len(name) % 3],
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_sources_of_every_type(case: str, tmp_path: Path) -> None:
    """What is kept keeps its type, whatever config.json says; what is quantised is quantised from its own values."""
    tensors = {name: tensor.to(PLAIN[case](name)) for name, tensor in exports.tiny_tensors().items()}
    exports.save(tmp_path / "source", tensors)
    manifest = through(tmp_path / "source", tmp_path)
    names = {torch.float16: "F16", torch.float32: "F32", torch.bfloat16: "BF16"}
    for record in manifest.tensors.values():
        (ref,) = record.sources
        assert ref.dtype == names[tensors[ref.name].dtype]
        assert record.part != "plain" or record.dtype == ref.dtype
    kinds = {record.encoding for record in manifest.tensors.values()}
    assert {"nvfp4", "fp8_e4m3"} < kinds and ("bf16" in kinds) == (case == "one of each")


def _w4a16(directory: Path) -> None:
    """The weight-only algorithm: no scales of activations."""
    _edit(directory, lambda config: config.update(quant_algo="W4A16_NVFP4"))
    _tensors(directory, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.endswith("input_scale")])


def _kv_scales(directory: Path) -> None:
    """Scales of an FP8 KV cache lie within k_proj and v_proj."""
    _edit(directory, lambda config: config.update(kv_cache_quant_algo="FP8", kv_cache_scheme={"num_bits": 8}))

    def add(tensors: exports.Tensors) -> None:
        for name in [name for name in tensors if name.endswith("k_proj.weight") and not name.startswith("mtp")]:
            attention = name.removesuffix(".k_proj.weight")
            tensors |= {f"{attention}.{n}_proj.{n}_scale": torch.tensor(0.5) for n in "kv"}

    _tensors(directory, add)


def _said_apart(directory: Path) -> None:
    """Older exports have no quantization_config, only ModelOpt's own file."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    stated = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    quantization = {k: v for k, v in stated.items() if k not in ("quant_method", "ignore")}
    quantization |= {"exclude_modules": stated["ignore"]} if stated["ignore"] else {}
    (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))


def _said_twice(directory: Path) -> None:
    before = (directory / "config.json").read_text()
    _said_apart(directory)
    (directory / "config.json").write_text(before)


def _edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def _tensors(directory: Path, change: Callable[[exports.Tensors], Any]) -> None:
    """Rewrite the whole source with its tensors changed, keeping its configuration."""
    from safetensors.torch import load_file

    config = (directory / "config.json").read_text()
    tensors: exports.Tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    change(tensors)
    for path in list(directory.iterdir()):
        path.unlink()
    directory.rmdir()
    exports.save(directory, tensors)
    (directory / "config.json").write_text(config)


# form -> (export, change, encodings of what was quantised, scales left out)
FORMS: dict[str, tuple[str, Callable[[Path], None], set[str], dict[str, int]]] = {
    "W4A16_NVFP4": ("modelopt nvfp4", _w4a16, {"nvfp4"}, {}),
    "NVFP4 with KV scales": ("modelopt nvfp4", _kv_scales, {"nvfp4"}, {"input_scale": 25, "k_scale": 1, "v_scale": 1}),
    "FP8 with KV scales": ("modelopt fp8", _kv_scales, {"fp8_e4m3/tensor"}, {"input_scale": 25, "k_scale": 1, "v_scale": 1}),
    "NVFP4, hf_quant_config.json alone": ("modelopt nvfp4", _said_apart, {"nvfp4"}, {"input_scale": 25}),
    "mixed, hf_quant_config.json alone": (
        "modelopt mixed with nvfp4 head", _said_apart, {"nvfp4", "fp8_e4m3/tensor"}, {"input_scale": 26},
    ),
    "mixed, said twice": (
        "modelopt mixed with nvfp4 head", _said_twice, {"nvfp4", "fp8_e4m3/tensor"}, {"input_scale": 26},
    ),
    "fp8_pb_wo, hf_quant_config.json alone": (
        "modelopt fp8_pb_wo", _said_apart, {"fp8_e4m3/128x128", "fp8_e4m3/tensor"}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_modelopts_other_forms(form: str, tmp_path: Path) -> None:
    export, change, encodings, left_out = FORMS[form]
    exports.export(tmp_path / "source", export)
    change(tmp_path / "source")
    manifest = through(tmp_path / "source", tmp_path)
    quantised = {
        n: r for n, r in manifest.tensors.items() if r.part == "words" and r.sources[0].dtype in ("U8", "F8_E4M3")
    }
    assert {record.encoding for record in quantised.values()} == encodings
    kinds = [name.rpartition(".")[2] for name in manifest.source.dropped]
    assert {kind: kinds.count(kind) for kind in kinds} == left_out
    ours, theirs = decoded(tmp_path / "converted"), decoded(tmp_path / "source")
    for record in quantised.values():
        np.testing.assert_array_equal(ours[record.weight], theirs[record.weight])
