"""Sources that contradict themselves, or hold what no sound source holds: one message, before any output is written."""

import copy
import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.sources import read_form
from duovolt.cli.main import main
from duovolt.tests.support import exports

LAYER = "model.language_model.layers.0"
DOWN = f"{LAYER}.mlp.down_proj"
QKV = f"{LAYER}.linear_attn.in_proj_qkv"
INDEX = "model.safetensors.index.json"

Damage = Callable[[Path], object]


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors of the shard of layer 0; the index follows."""

    def damage(directory: Path) -> None:
        path = directory / "layers-0.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
        index = json.loads((directory / INDEX).read_text())
        kept = {name: file for name, file in index["weight_map"].items() if file != path.name}
        index["weight_map"] = kept | dict.fromkeys(tensors, path.name)
        (directory / INDEX).write_text(json.dumps(index))

    return damage


def edit_config(change: Callable[[dict[str, Any]], object], whole: bool = False) -> Damage:
    """Change quantization_config, or the whole config.json."""

    def damage(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        change(config if whole else config["quantization_config"])
        (directory / "config.json").write_text(json.dumps(config))

    return damage


def put(name: str, value: Any) -> Damage:
    return edit_config(lambda config: config.__setitem__(name, value))


def poke_byte(name: str, byte: int) -> Damage:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8)[1, 2] = byte

    return edit_tensors(change)


def fill(name: str, value: float) -> Damage:
    return edit_tensors(lambda tensors: tensors[name].fill_(value))


def drop(name: str) -> Damage:
    return edit_tensors(lambda tensors: tensors.pop(name))


def rename(old: str, new: str) -> Damage:
    return edit_tensors(lambda tensors: tensors.__setitem__(new, tensors.pop(old)))


def replace(name: str, value: torch.Tensor) -> Damage:
    return edit_tensors(lambda tensors: tensors.__setitem__(name, value))


def both(*damages: Damage) -> Damage:
    return lambda directory: [damage(directory) for damage in damages]


def hf_quant(**quantization: Any) -> Damage:
    return lambda d: (d / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


def fused(directory: Path) -> None:
    """in_proj_qkv and in_proj_z as one BF16 tensor, while the rules still name the parts."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "in_proj_qkv." in name or "in_proj_z." in name]:
            tensors.pop(name)
        tensors[f"{LAYER}.linear_attn.in_proj_qkvz.weight"] = torch.zeros(1024, 64, dtype=torch.bfloat16)

    edit_tensors(change)(directory)
    ours = [f"{LAYER}.linear_attn.in_proj_qkv", f"{LAYER}.linear_attn.in_proj_z"]
    edit_config(lambda config: config["ignore"].extend(ours))(directory)


def group(**changes: Any) -> Damage:
    return edit_config(lambda c: c["config_groups"]["group_0"]["weights"].update(changes))


CT4, CT8, MO4, MO8, BLOCK = "ct nvfp4", "ct fp8 channel", "modelopt nvfp4", "modelopt fp8", "fp8 blocks, F32 scales"
MIXED = "modelopt mixed with nvfp4 head"

# case -> (export, damage, words of the message)
CONFIGURATIONS: dict[str, tuple[str, Damage, list[str]]] = {
    "unknown method": (CT4, put("quant_method", "gptq"), ["quant_method 'gptq'", "compressed-tensors"]),
    "no method at all": (BLOCK, edit_config(lambda c: c.pop("quant_method")), ["quant_method 'None'"]),
    "config is text": (
        CT4,
        edit_config(lambda c: c.__setitem__("quantization_config", "fp8"), whole=True),
        ["quantization_config is 'fp8'"],
    ),
    "unknown format": (CT4, put("format", "pack-quantized"), ["format 'pack-quantized'"]),
    "not compressed": (CT4, put("quantization_status", "frozen"), ["quantization_status 'frozen'"]),
    "transformed weights": (CT4, put("transform_config", {"hadamard": {}}), ["transform_config"]),
    "integers": (CT4, group(type="int"), ["4-bit int"]),
    "groups of 32": (CT4, group(group_size=32), ["group_size 32"]),
    "asymmetric": (CT8, group(symmetric=False), ["config_groups group_0"]),
    "groups are a list": (CT4, put("config_groups", []), ["config_groups is '[]'"]),
    "targets are text": (
        CT4,
        edit_config(lambda c: c["config_groups"]["group_0"].__setitem__("targets", "Linear")),
        ["targets is 'Linear'"],
    ),
    "bad expression": (CT4, put("ignore", ["re:(("]), ["'re:(('", "no regular expression"]),
    "ignore is text": (CT4, put("ignore", "lm_head"), ["ignore is 'lm_head'"]),
    "unknown algorithm": (MO4, put("quant_algo", "NVFP4_AWQ"), ["quant_algo 'NVFP4_AWQ'"]),
    "algorithm is a list": (MO4, put("quant_algo", ["NVFP4"]), ["quant_algo ['NVFP4']"]),
    "modelopt in groups of 32": (MO4, put("group_size", 32), ["group_size 32"]),
    "two files, two algorithms": (MO4, hf_quant(quant_algo="FP8"), ["quant_algo is 'NVFP4'", "'FP8'"]),
    "two files, two lists": (
        MO4,
        hf_quant(quant_algo="NVFP4", group_size=16, exclude_modules=["lm_head"]),
        ["exclude_modules", "differ", "*embed_tokens"],
    ),
    "two libraries": (CT4, hf_quant(quant_algo="NVFP4"), ["hf_quant_config.json", "Which one holds"]),
    "no layers": (MIXED, edit_config(lambda c: c.pop("quantized_layers")), ["quantized_layers"]),
    "unknown layer algorithm": (
        MIXED,
        edit_config(lambda c: c["quantized_layers"][DOWN].__setitem__("quant_algo", "INT4")),
        ["quant_algo 'INT4'"],
    ),
    "fp8 of another kind": (BLOCK, put("fmt", "e5m2"), ["fmt 'e5m2'"]),
    "block of one number": (BLOCK, put("weight_block_size", [128]), ["weight_block_size is [128]"]),
    "text_config says otherwise": (
        BLOCK,
        edit_config(lambda c: c["text_config"].__setitem__("quantization_config", {"quant_method": "fp8"}), whole=True),
        ["top level", "text_config differ"],
    ),
}
CONTRADICTIONS: dict[str, tuple[str, Damage, list[str]]] = {
    "declared nowhere": (
        CT4,
        edit_config(lambda c: c.pop("quantization_config"), whole=True),
        ["quantised or a scale", "declares no quantisation"],
    ),
    "declared fp8, stored nvfp4": (MO4, put("quant_algo", "FP8"), ["stored as nvfp4", "declares fp8_e4m3"]),
    "declared nvfp4, stored fp8": (MO8, put("quant_algo", "NVFP4"), ["stored as fp8_e4m3", "declares nvfp4"]),
    "declared a channel, stored a tensor": (
        "ct fp8 tensor",
        group(strategy="channel"),
        ["one a tensor", "declares one a row"],
    ),
    "declared a tensor, stored a channel": (CT8, group(strategy="tensor"), ["one a row", "declares one a tensor"]),
    "declared other blocks": (
        BLOCK,
        put("weight_block_size", [64, 64]),
        ["one a tensor", "declares one a tile of 64 x 64"],
    ),
    "ignored, but quantised": (
        CT4,
        edit_config(lambda c: c["ignore"].append(DOWN)),
        [f"'{DOWN}' is stored quantised, but declared plain", "ignored by"],
    ),
    "not listed, but quantised": (
        MIXED,
        edit_config(lambda c: c["quantized_layers"].pop(DOWN)),
        [f"'{DOWN}' is stored quantised", "named by no rule"],
    ),
    "declared, but plain": (
        CT8,
        both(drop(f"{DOWN}.weight_scale"), replace(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.bfloat16))),
        [f"'{DOWN}.weight' BF16 [64, 128] is stored plain, but declared quantised (by 'Linear')"],
    ),
    "listed, but plain": (
        MIXED,
        edit_config(
            lambda c: c["quantized_layers"].__setitem__(f"{LAYER}.linear_attn.in_proj_a", {"quant_algo": "FP8"})
        ),
        ["in_proj_a.weight' BF16 [12, 64] is stored plain"],
    ),
    "ignore rule without a module": (
        CT4,
        edit_config(lambda c: c["ignore"].append("model.layers.0.mlp.side_proj")),
        ["the rule 'model.layers.0.mlp.side_proj' matches nothing"],
    ),
    "ignore expression without a module": (
        CT4,
        edit_config(lambda c: c["ignore"].append("re:.*experts.*")),
        ["the rule 're:.*experts.*' matches nothing"],
    ),
    "exclude pattern without a module": (
        MO4,
        edit_config(lambda c: c["ignore"].append("*router*")),
        ["the rule '*router*' matches nothing"],
    ),
    "target without a module": (
        "ct mixed with late fp8 and KV scales",
        edit_config(lambda c: c["config_groups"]["group_0"]["targets"].append("re:.*qkv_proj")),
        ["the rule 're:.*qkv_proj' matches nothing"],
    ),
    "layer table with old names": (
        MIXED,
        edit_config(lambda c: c["quantized_layers"].__setitem__("model.layers.0.mlp.up_proj", {"quant_algo": "NVFP4"})),
        ["the rule 'model.layers.0.mlp.up_proj' matches nothing"],
    ),
    "module list with old names": (
        BLOCK,
        edit_config(lambda c: c["modules_to_not_convert"].append("model.layers.0.router")),
        ["matches nothing"],
    ),
    "fused projection": (CT8, fused, ["in_proj_qkv' matches nothing", "in_proj_qkvz.weight' BF16", "stored plain"]),
}
STORED: dict[str, tuple[str, Damage, list[str]]] = {
    "no block scale": (CT4, drop(f"{DOWN}.weight_scale"), [f"'{DOWN}' lacks its weight_scale"]),
    "no global scale": (CT4, drop(f"{DOWN}.weight_global_scale"), ["direction of its global scale is unknown"]),
    "no multiplier": (MO4, drop(f"{DOWN}.weight_scale_2"), ["direction of its global scale is unknown"]),
    "no row scale": (CT8, drop(f"{DOWN}.weight_scale"), [f"'{DOWN}' lacks its weight_scale"]),
    "no block scales": (BLOCK, drop(f"{DOWN}.weight_scale_inv"), [f"'{DOWN}' lacks its weight_scale"]),
    "no words": (CT4, drop(f"{DOWN}.weight_packed"), ["has scales", "but no weight"]),
    "a third name": (
        CT4,
        rename(f"{DOWN}.weight_global_scale", f"{DOWN}.weight_scale_3"),
        ["direction of its global scale is unknown"],
    ),
    "the other library's name": (
        CT4,
        rename(f"{DOWN}.weight_global_scale", f"{DOWN}.weight_scale_2"),
        ["two libraries' conventions"],
    ),
    "both directions": (
        MO4,
        replace(f"{DOWN}.weight_global_scale", torch.ones(1)),
        ["weight_global_scale and weight_scale_2"],
    ),
    "both words": (
        CT4,
        replace(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.bfloat16)),
        ["both weight and weight_packed"],
    ),
    "plain with scales": (
        CT8,
        replace(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.bfloat16)),
        ["stored plain, but has quantised scales"],
    ),
    "words of another type": (CT8, replace(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.int8)), ["I8 [64, 128]"]),
    "e5m2 words": (
        CT8,
        replace(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.float8_e5m2)),
        ["F8_E5M2 [64, 128]"],
    ),
    "scale of another type": (
        CT4,
        replace(f"{DOWN}.weight_scale", torch.ones(64, 8, dtype=torch.bfloat16)),
        ["BF16 [64, 8]: expected F8_E4M3"],
    ),
    "scale of another shape": (
        CT4,
        replace(f"{DOWN}.weight_scale", torch.ones(64, 4).to(torch.float8_e4m3fn)),
        ["not words and scales of groups of 16"],
    ),
    "two global scales": (MO4, replace(f"{DOWN}.weight_scale_2", torch.ones(2)), ["expected a single global scale"]),
    "row scales that do not fit": (
        CT8,
        replace(f"{DOWN}.weight_scale", torch.ones(63, 1, dtype=torch.bfloat16)),
        ["of no known arrangement"],
    ),
    "one tensor, two names": (
        CT4,
        replace("language_model.model.layers.0.input_layernorm.weight", torch.zeros(64, dtype=torch.bfloat16)),
        ["layers.0.input_layernorm.weight"],
    ),
}
VALUES: dict[str, tuple[str, Damage, list[str]]] = {
    "nan scale 0x7f": (CT4, poke_byte(f"{DOWN}.weight_scale", 0x7F), ["NaN scale byte 0x7f at index [1, 2]", DOWN]),
    "nan scale 0xff": (MO4, poke_byte(f"{DOWN}.weight_scale", 0xFF), ["NaN scale byte 0xff at index [1, 2]", DOWN]),
    "nan code 0x7f": (CT8, poke_byte(f"{DOWN}.weight", 0x7F), ["NaN code 0x7f at index [1, 2]", DOWN]),
    "nan code 0xff": (BLOCK, poke_byte(f"{QKV}.weight", 0xFF), ["NaN code 0xff at index [1, 2]", QKV]),
}
for _name, _export, _tensor in (
    ("divisor", CT4, "weight_global_scale"),
    ("multiplier", MO4, "weight_scale_2"),
    ("row scale", CT8, "weight_scale"),
    ("tensor scale", MO8, "weight_scale"),
    ("tile scale", BLOCK, "weight_scale_inv"),
):
    for _value in (0.0, -1.0, float("inf"), float("nan")):
        _words = [f"the scale {_value}", f"{DOWN}.{_tensor}", "finite and above zero"]
        VALUES[f"{_name} of {_value}"] = (_export, fill(f"{DOWN}.{_tensor}", _value), _words)

CASES = CONFIGURATIONS | CONTRADICTIONS | STORED | VALUES
ONLY_THE_FAMILY = {"one tensor, two names"}  # formats are judged without knowing the family's names


@pytest.mark.parametrize("name", CASES)
def test_refused_before_anything_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C06 (tables with old names), C07 (rules without effect), C11 (no scale), Q01 (direction)."""
    export, damage, words = CASES[name]
    source, target = tmp_path / "source", tmp_path / "target"
    exports.export(source, export)
    damage(source)
    for command in ("convert", "dequantize"):
        if command == "dequantize" and name in ONLY_THE_FAMILY:
            continue
        assert main([command, str(source), str(target)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("duovolt: ") and message.count("\n") == 1, message
        assert all(word in message for word in words), message
        assert not target.exists()
    assert main(["plan", str(source)]) == (0 if name in VALUES else 2)  # plan reads headers alone


def test_every_contradiction_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C07: a fused tensor, rules for its parts: both faults are reported."""
    source = tmp_path / "source"
    exports.export(source, CT8)
    fused(source)
    assert main(["convert", str(source), str(tmp_path / "target")]) == 2
    message = capsys.readouterr().err
    assert message.count("matches nothing") == 2 and message.count("stored plain, but declared quantised") == 1


def test_a_fused_projection_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S14: the order of its rows is not known.

    Without a rule that stumbles over it, the closed inventory knows what it is; never is it misread.
    """
    source = tmp_path / "source"
    exports.export(source, CT8)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "in_proj_qkv." in name or "in_proj_z." in name]:
            tensors.pop(name)
        name = f"{LAYER}.linear_attn.in_proj_qkvz"
        tensors |= {f"{name}.weight": torch.zeros(1024, 64).to(torch.float8_e4m3fn)}
        tensors |= {f"{name}.weight_scale": torch.ones(1024, 1, dtype=torch.bfloat16)}

    edit_tensors(change)(source)
    assert main(["convert", str(source), str(tmp_path / "target")]) == 2
    message = capsys.readouterr().err
    assert "in_proj_qkvz" in message and "interleaved by key head" in message


def test_a_fused_mlp_is_no_weight_of_the_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S02: a fused gate_up is never cut in half; it is refused.

    Q10: one scalar for a fused matrix is never spread over slots that it was not made for.
    """
    source = tmp_path / "source"
    exports.export(source, MO8)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "gate_proj" in name or "up_proj" in name]:
            tensors.pop(name)
        name = f"{LAYER}.mlp.gate_up_proj"
        tensors |= {
            f"{name}.weight": torch.zeros(256, 64).to(torch.float8_e4m3fn),
            f"{name}.weight_scale": torch.ones(()),
        }

    edit_tensors(change)(source)
    assert main(["convert", str(source), str(tmp_path / "target")]) == 2
    message = capsys.readouterr().err
    assert "gate_up_proj" in message and "unknown" in message and not (tmp_path / "target").exists()


ODD: list[Any] = [
    None, 0, -1, 1.5, "", "x", "re:(", "re:.*", [], {}, [1], [None], ["a"], {"a": 1}, True, [[]], "Linear", [128, 128], 10**30,
]  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [deeper for key, inner in items for deeper in _paths(inner, (*path, key))]


@pytest.mark.parametrize("name", [CT4, MO4, BLOCK, "ct mixed with late fp8 and KV scales"])
def test_odd_values_anywhere_in_a_configuration_give_a_message_or_a_reading(name: str, tmp_path: Path) -> None:
    exports.export(tmp_path / "source", name)
    checkpoint = Checkpoint.open(tmp_path / "source")
    rng = random.Random(5)
    refused = 0
    for _ in range(120):
        config = copy.deepcopy(checkpoint.config)
        path = rng.choice(_paths(config["quantization_config"]))
        inner = config["quantization_config"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = rng.choice(ODD)
        try:
            form = read_form(dataclasses.replace(checkpoint, config=config))
            assert form.weights
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and "config.json" in str(error)
    assert refused > 60
