"""What other libraries wrote, decoded to those libraries' own values, bit for bit; any architecture."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.sources import read_form
from duovolt.cli.main import main

FIXTURES = Path(__file__).parent.parent / "fixtures"

# fixture -> producer, encodings of its quantised weights, number of tensors that no weight needs
FORMS = {
    "ct_fp8_block": ("compressed-tensors", {"fp8_e4m3/128x128": 3}, 0),
    "ct_fp8_channel": ("compressed-tensors", {"fp8_e4m3": 8}, 0),
    "ct_fp8_tensor": ("compressed-tensors", {"fp8_e4m3/tensor": 8}, 0),
    "ct_mixed_nvfp4_fp8": ("compressed-tensors", {"fp8_e4m3": 4, "nvfp4/divisor": 3}, 0),
    "ct_nvfp4_w4a4": ("compressed-tensors", {"nvfp4/divisor": 2}, 2),
    "ct_nvfp4a16": ("compressed-tensors", {"nvfp4/divisor": 8}, 0),
    "fp8_block_transformers": ("fp8", {"fp8_e4m3/128x128": 2}, 0),
    "modelopt_fp8": ("modelopt", {"fp8_e4m3/tensor": 7}, 9),
    "modelopt_fp8_per_channel": ("modelopt", {"fp8_e4m3": 7}, 0),
    "modelopt_mixed_nvfp4_fp8": ("modelopt", {"fp8_e4m3/tensor": 4, "nvfp4": 3}, 7),
    "modelopt_nvfp4_kvfp8": ("modelopt", {"nvfp4": 7}, 9),
    "modelopt_w4a16_nvfp4": ("modelopt", {"nvfp4": 7}, 0),
    "tiny_qwen3_5_modelopt_nvfp4": ("modelopt", {"nvfp4": 25}, 25),
}
REFERENCES = [name for name in FORMS if (FIXTURES / name / "ref" / "dequant_sha256.json").exists()]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_recognised(name: str) -> None:
    producer, encodings, dropped = FORMS[name]
    form = read_form(Checkpoint.open(FIXTURES / name / "checkpoint"))
    found: dict[str, int] = {}
    for weight in form.weights.values():
        if "plain" not in weight.parts:
            found[weight.encoding] = found.get(weight.encoding, 0) + 1
    assert (form.producer, found, len(form.dropped), form.notices) == (producer, encodings, dropped, [])


@pytest.mark.parametrize("name", REFERENCES)
def test_decoded_values_are_the_peers_own(name: str, tmp_path: Path) -> None:
    references = json.loads((FIXTURES / name / "ref" / "dequant_sha256.json").read_text())
    compared = 0
    for file, tensors in references.items():
        dtype = "float32" if "fp32" in file else "bfloat16"
        target = tmp_path / dtype
        if not target.exists():
            assert (
                main(["dequantize", str(FIXTURES / name / "checkpoint"), str(target), "--dtype", dtype, "--quiet"]) == 0
            )
        decoded = Checkpoint.open(target)
        for tensor, reference in tensors.items():
            assert list(decoded.tensors[tensor].shape) == reference["shape"]
            assert hashlib.sha256(decoded.read(tensor).tobytes()).hexdigest() == reference["sha256"], tensor
            compared += 1
    assert compared >= sum(FORMS[name][1].values())


@pytest.mark.parametrize("name", ["modelopt_nvfp4_kvfp8", "ct_mixed_nvfp4_fp8", "fp8_block_transformers"])
def test_the_result_is_a_plain_checkpoint(name: str, tmp_path: Path) -> None:
    source, target = FIXTURES / name / "checkpoint", tmp_path / "plain"
    assert main(["dequantize", str(source), str(target), "--dtype", "float32", "--quiet"]) == 0
    before, after = Checkpoint.open(source), Checkpoint.open(target)
    assert "quantization_config" not in after.config and not (target / "hf_quant_config.json").exists()
    assert {**after.config, "quantization_config": before.config["quantization_config"]} == before.config
    scales = ("_scale", "_scale_2", "_scale_inv")
    assert set(after.tensors) == {name.replace("_packed", "") for name in before.tensors if not name.endswith(scales)}
    assert {entry.dtype for entry in after.tensors.values()} == {"F32"}


def test_a_w4a4_weight_is_decoded_with_its_divisor(tmp_path: Path) -> None:
    source, target = FIXTURES / "ct_nvfp4_w4a4" / "checkpoint", tmp_path / "plain"
    assert main(["dequantize", str(source), str(target), "--dtype", "float32", "--quiet"]) == 0
    raw = Checkpoint.open(source)
    values = load_file(target / "model-00001-of-00001.safetensors")
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    exponent = np.arange(128) >> 3
    e4m3 = np.where(exponent == 0, (np.arange(128) & 7) / 512, (8 + (np.arange(128) & 7)) * 2.0 ** (exponent - 10))
    for module in ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"):
        words = raw.read(f"{module}.weight_packed")
        codes = np.stack([words & 15, words >> 4], -1).reshape(len(words), -1)
        factor = e4m3.astype(np.float32)[raw.read(f"{module}.weight_scale")]
        factor = factor / raw.read(f"{module}.weight_global_scale")
        expected = e2m1[codes] * np.repeat(factor, 16, axis=1)
        np.testing.assert_array_equal(values[f"{module}.weight"].view(np.uint32), expected.view(np.uint32))
