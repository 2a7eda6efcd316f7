"""Public releases of the 27B by shape: sparse files with true headers, judged by `plan` and `inspect` from headers alone."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.writer import Planned, encode_header
from duovolt.cli.main import main
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import TensorSpec, inventory
from duovolt.tests.support.exports import FP8_IGNORE, _ct, _ct_group

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "vocab_size": 248320,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
    },
}  # fmt: skip

Tensors = Iterator[tuple[str, str, tuple[int, ...]]]
Write = Callable[[TensorSpec], Tensors]
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PROJECTIONS = (
    *(f"self_attn.{n}_proj" for n in "qkvo"),
    *(f"linear_attn.{n}" for n in ("in_proj_qkv", "in_proj_z", "out_proj")),
)


def module_of(spec: TensorSpec) -> str:
    return spec.name.removesuffix(".weight")


def plain(spec: TensorSpec, dtype: str = "BF16") -> Tensors:
    yield spec.name, dtype, spec.shape


def bf16(spec: TensorSpec) -> Tensors:
    """3.5: A_log and the gated norm are F32, all else is BF16."""
    return plain(spec, "F32" if spec.role in ("linear_attn.A_log", "linear_attn.norm") else "BF16")


def block_fp8(spec: TensorSpec) -> Tensors:
    if spec.role not in (*MLP, *PROJECTIONS):
        return plain(spec)
    rows, columns = spec.shape
    grid = (-(-rows // 128), -(-columns // 128))
    return iter([(spec.name, "F8_E4M3", spec.shape), (f"{module_of(spec)}.weight_scale_inv", "BF16", grid)])


def ct_channel(spec: TensorSpec) -> Tensors:
    yield spec.name, "F8_E4M3", spec.shape
    yield f"{module_of(spec)}.weight_scale", "BF16", (spec.shape[0], 1)


def ct_nvfp4(spec: TensorSpec) -> Tensors:
    module, (rows, columns) = module_of(spec), spec.shape
    yield f"{module}.weight_packed", "U8", (rows, columns // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{module}.weight_global_scale", "F32", (1,)
    yield f"{module}.input_global_scale", "F32", (1,)


def layer_of(spec: TensorSpec) -> int:
    return int(spec.name.split("layers.")[1].split(".")[0])


def ct_mixed(spec: TensorSpec) -> Tensors:
    """MLP of layers 0..55 nvfp4 W4A4, the late ones, attention, delta net, head and vision FP8, KV scales."""
    if spec.group == "mtp":
        yield from plain(spec)
    elif spec.role in MLP and layer_of(spec) < 56:
        yield from ct_nvfp4(spec)
    elif spec.role in (*MLP, *PROJECTIONS, "lm_head") or (
        spec.group == "vision" and len(spec.shape) == 2 and "embed" not in spec.name and spec.name.endswith("weight")
    ):
        yield from ct_channel(spec)
    else:
        yield from plain(spec)
    if spec.role == "self_attn.k_proj" and spec.group == "text":
        for name in ("k_scale", "v_scale"):
            yield f"{module_of(spec).rpartition('.')[0]}.{name}", "BF16", (1,)


def modelopt_fp8(spec: TensorSpec) -> Tensors:
    yield spec.name, "F8_E4M3", spec.shape
    yield f"{module_of(spec)}.weight_scale", "F32", ()
    yield f"{module_of(spec)}.input_scale", "F32", ()


def modelopt_nvfp4(spec: TensorSpec) -> Tensors:
    module, (rows, columns) = module_of(spec), spec.shape
    yield spec.name, "U8", (rows, columns // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{module}.weight_scale_2", "F32", ()
    yield f"{module}.input_scale", "F32", ()


def modelopt_mixed(spec: TensorSpec) -> Tensors:
    """MLP and head nvfp4, attention and delta net FP8; the exporter lost the MTP layer."""
    if spec.group == "mtp":
        return iter(())
    if spec.role in MLP or spec.role == "lm_head":
        return modelopt_nvfp4(spec)
    return modelopt_fp8(spec) if spec.role in PROJECTIONS else plain(spec)


def by_layer(spec: TensorSpec) -> str:
    if spec.group == "mtp":
        return "mtp.safetensors"
    return f"layers-{layer_of(spec)}.safetensors" if ".layers." in spec.name else "outside.safetensors"


def odd_names(spec: TensorSpec) -> str:
    number = 1 if "layers." not in spec.name else layer_of(spec) * 10 // 64 + 2
    return f"model.safetensors-{number:05}-of-00011.safetensors"


def specimen(path: Path, write: Write, place: Callable[[TensorSpec], str], quantisation: dict[str, Any] | None) -> None:
    """Write the release: headers as they would be, data as holes."""
    path.mkdir()
    files: dict[str, list[Planned]] = {}
    for spec in inventory(ModelConfig.from_dict(CONFIG)).values():
        files.setdefault(place(spec), []).extend(Planned(*tensor) for tensor in write(spec))
    files = {name: tensors for name, tensors in files.items() if tensors}
    for name, tensors in files.items():
        header = encode_header(tensors, {})
        with (path / name).open("wb") as handle:
            handle.write(header)
            handle.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = CONFIG if quantisation is None else CONFIG | {"quantization_config": quantisation}
    (path / "config.json").write_text(json.dumps(config))


def _layers(specs: Iterator[TensorSpec]) -> dict[str, dict[str, Any]]:
    nvfp4, fp8 = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
    found = {}
    for spec in specs:
        if spec.group != "mtp" and spec.role in (*MLP, *PROJECTIONS, "lm_head"):
            found[module_of(spec)] = fp8 if spec.role in PROJECTIONS else nvfp4
    return found


BLOCK_CONFIG = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": FP8_IGNORE,
}  # fmt: skip
CT_MIXED_CONFIG = _ct(
    "mixed-precision",
    [
        _ct_group([r"re:.*layers\.([0-9]|[1-4][0-9]|5[0-5])\.mlp\.(gate|up|down)_proj$"], "tensor_group", 4, True),
        _ct_group(["Linear"], "channel"),
    ],
    ["re:^mtp.*", "re:.*in_proj_[ab]$", "re:.*embed.*", "re:.*conv1d$"],
    kv=True,
)
MODELOPT_MIXED_CONFIG = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": [],
    "quantized_layers": _layers(iter(inventory(ModelConfig.from_dict(CONFIG)).values())),
}  # fmt: skip

# name -> (tensors, file names, configuration, files, tensors, GB, weights by encoding in the plan, words of notices)
RELEASES: dict[str, tuple[Any, ...]] = {
    "3.5, 11 odd shards": (
        bf16, odd_names, None, 11, 1199, 55.562872800, {"fp8_e4m3": 217, "nvfp4": 192}, []),
    "3.8 FP8, 66 shards": (
        block_fp8, by_layer, BLOCK_CONFIG, 66, 1606, 30.866663264, {"fp8_e4m3/128x128": 407, "fp8_e4m3": 2}, []),
    "mixed by compressed-tensors": (
        ct_mixed, by_layer, CT_MIXED_CONFIG, 66, 1199 + 3 * 168 + 343 + 32, 22.962005568,
        {"nvfp4/divisor": 168, "fp8_e4m3": 343 + 8}, ["168 input_global_scale, 16 k_scale, 16 v_scale"]),
    "mixed by ModelOpt, nvfp4 head": (
        modelopt_mixed, by_layer, MODELOPT_MIXED_CONFIG, 65, 1184 + 3 * 193 + 2 * 208, 21.072029288,
        {"nvfp4": 193, "fp8_e4m3/tensor": 208}, ["the MTP layer is missing", "401 input_scale"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_passes_the_intake(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, place, quantisation, files, tensors, gigabytes, encodings, notices = RELEASES[name]
    specimen(tmp_path / "release", write, place, quantisation)
    assert main(["inspect", str(tmp_path / "release"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["plan", str(tmp_path / "release"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (len(facts["files"]), facts["tensors"], facts["bytes"] / 1e9) == (files, tensors, gigabytes)
    assert "unknown" not in facts["by_part_of_the_model"] and not facts["notices"]
    assert {k: v["weights"] for k, v in plan["by_encoding"].items() if k not in ("bf16", "fp32")} == encodings
    assert len(plan["notices"]) == len(notices)
    assert all(any(words in notice for notice in plan["notices"]) for words in notices), plan["notices"]
