"""The tiny model as other libraries would export it: random words and scales in each library's names and shapes.

`export(path, name)` writes one of `EXPORTS`; which modules are quantised, and how, is a table of that export.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TINY = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
DELTA = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj"))

Tensors = dict[str, torch.Tensor]
Write = Callable[[str, tuple[int, int], np.random.Generator], Tensors]


def tiny_tensors() -> Tensors:
    """Every tensor of the tiny BF16 model."""
    found: Tensors = {}
    for file in sorted(TINY.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _bytes(shape: tuple[int, ...], rng: np.random.Generator, scale: bool = False) -> torch.Tensor:
    """Random E4M3 words without NaN; `scale`: positive and normal."""
    words = rng.integers(8, 0x7F, shape, dtype=np.uint8) if scale else rng.integers(0, 256, shape, dtype=np.uint8)
    words = np.where((words & 0x7F) == 0x7F, np.uint8(3), words)
    return torch.from_numpy(words).view(torch.float8_e4m3fn)


def _floats(shape: tuple[int, ...], rng: np.random.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(rng.uniform(1e-4, 1e-2, shape), np.float32)).to(dtype)


def _packed(shape: tuple[int, int], rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8))


def ct_nvfp4(module: str, shape: tuple[int, int], rng: np.random.Generator) -> Tensors:
    return {
        f"{module}.weight_packed": _packed(shape, rng),
        f"{module}.weight_scale": _bytes((shape[0], shape[1] // 16), rng, scale=True),
        f"{module}.weight_global_scale": torch.tensor([rng.uniform(1e3, 1e5)], dtype=torch.float32),
    }


def ct_nvfp4_w4a4(module: str, shape: tuple[int, int], rng: np.random.Generator) -> Tensors:
    return ct_nvfp4(module, shape, rng) | {f"{module}.input_global_scale": _floats((1,), rng, torch.float32)}


def modelopt_nvfp4(module: str, shape: tuple[int, int], rng: np.random.Generator) -> Tensors:
    return {
        f"{module}.weight": _packed(shape, rng),
        f"{module}.weight_scale": _bytes((shape[0], shape[1] // 16), rng, scale=True),
        f"{module}.weight_scale_2": _floats((), rng, torch.float32),
        f"{module}.input_scale": _floats((), rng, torch.float32),
    }


def _fp8(suffix: str, dtype: torch.dtype, shape_of: Callable[[int, int], tuple[int, ...]], **extra: Any) -> Write:
    def write(module: str, shape: tuple[int, int], rng: np.random.Generator) -> Tensors:
        found = {f"{module}.weight": _bytes(shape, rng), f"{module}.{suffix}": _floats(shape_of(*shape), rng, dtype)}
        return found | {f"{module}.{name}": _floats(size, rng, dtype) for name, size in extra.items()}

    return write


def _grid(n: int, k: int) -> tuple[int, int]:
    return -(-n // 128), -(-k // 128)


def _grid4(n: int, k: int) -> tuple[int, ...]:
    grid = _grid(n, k)
    return () if grid == (1, 1) else (grid[0], 1, grid[1], 1)


ct_channel = _fp8("weight_scale", torch.bfloat16, lambda n, k: (n, 1))
ct_tensor = _fp8("weight_scale", torch.bfloat16, lambda n, k: (1,))
ct_static = _fp8("weight_scale", torch.bfloat16, lambda n, k: (1,), input_scale=(1,))
ct_block = _fp8("weight_scale", torch.bfloat16, _grid)
modelopt_tensor = _fp8("weight_scale", torch.float32, lambda n, k: (), input_scale=())
modelopt_channel = _fp8("weight_scale", torch.float32, lambda n, k: (n,))
modelopt_block = _fp8("weight_scale", torch.float32, _grid4)
modelopt_block_inv = _fp8("weight_scale_inv", torch.float32, _grid)
static_tensor = _fp8("weight_scale_inv", torch.float32, lambda n, k: (), activation_scale=())
block_f32 = _fp8("weight_scale_inv", torch.float32, _grid)
block_bf16 = _fp8("weight_scale_inv", torch.bfloat16, _grid)


def _ct_group(targets: list[str], strategy: str, bits: int = 8, activations: bool = False) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    weights |= {"group_size": 16} if bits == 4 else {}
    weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
    form = "nvfp4-pack-quantized" if bits == 4 else "float-quantized"
    return {"targets": targets, "weights": weights, "format": form, "input_activations": {} if activations else None}


def _ct(form: str, groups: list[dict[str, Any]], ignore: list[str], kv: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ignore,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"} if kv else None,
    }  # fmt: skip


CT_IGNORE = ["lm_head", "re:.*visual.*", "re:^mtp.*", "re:.*in_proj_[ab]$", "re:.*conv1d$", "re:.*embed_tokens$"]
MODELOPT_IGNORE = ["lm_head", "model.visual*", "*in_proj_a", "*in_proj_b", "*conv1d", "*embed_tokens"]
FP8_IGNORE = ["lm_head", "model.visual", "in_proj_a", "in_proj_b", "conv1d", "mtp.fc", "embed_tokens"]


def _modelopt(algorithm: str, **extra: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": MODELOPT_IGNORE} | extra


def _mixed_modelopt(modules: dict[str, Write]) -> dict[str, Any]:
    names = {modelopt_nvfp4: {"quant_algo": "NVFP4", "group_size": 16}, modelopt_tensor: {"quant_algo": "FP8"}}
    layers = {module: names[write] for module, write in modules.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}


def _everywhere(write: Write) -> Callable[[str], Write | None]:
    return lambda module: write if module.endswith((*MLP, *ATTENTION, *DELTA)) and "visual" not in module else None


def _text_only(write: Write) -> Callable[[str], Write | None]:
    return lambda module: None if module.startswith("mtp") else _everywhere(write)(module)


def _ct_mixed(module: str) -> Write | None:
    if module.startswith("mtp") or "visual" in module:
        return None
    late = "layers.3." in module
    if module.endswith(MLP):
        return ct_channel if late else ct_nvfp4
    return ct_channel if module.endswith((*ATTENTION, *DELTA)) or module == "lm_head" else None


def _modelopt_mixed(module: str) -> Write | None:
    if module == "lm_head" or (module.endswith(MLP) and not module.startswith("mtp") and "visual" not in module):
        return modelopt_nvfp4
    return modelopt_tensor if _text_only(modelopt_tensor)(module) else None


# name -> (module -> how it is written, or None; the configuration, given what was written)
Export = tuple[Callable[[str], Write | None], Callable[[dict[str, Write]], dict[str, Any]]]
EXPORTS: dict[str, Export] = {
    "ct nvfp4": (
        _text_only(ct_nvfp4),
        lambda m: _ct("nvfp4-pack-quantized", [_ct_group(["Linear"], "tensor_group", 4)], CT_IGNORE),
    ),
    "ct nvfp4 w4a4": (
        _text_only(ct_nvfp4_w4a4),
        lambda m: _ct("nvfp4-pack-quantized", [_ct_group(["Linear"], "tensor_group", 4, True)], CT_IGNORE),
    ),
    "ct fp8 channel": (
        _text_only(ct_channel),
        lambda m: _ct("float-quantized", [_ct_group(["Linear"], "channel")], CT_IGNORE),
    ),
    "ct fp8 tensor": (
        _text_only(ct_tensor),
        lambda m: _ct("float-quantized", [_ct_group(["Linear"], "tensor")], CT_IGNORE),
    ),
    "ct fp8 static": (
        _text_only(ct_static),
        lambda m: _ct("float-quantized", [_ct_group(["Linear"], "tensor", 8, True)], CT_IGNORE),
    ),
    "ct fp8 block": (
        _text_only(ct_block),
        lambda m: _ct("float-quantized", [_ct_group(["Linear"], "block")], CT_IGNORE),
    ),
    "ct mixed with late fp8 and KV scales": (
        _ct_mixed,
        lambda m: _ct(
            "mixed-precision",
            [
                _ct_group(["re:.*self_attn.*_proj$", "re:.*linear_attn.(in_proj_qkv|in_proj_z|out_proj)$",
                           "re:.*layers.3.mlp.*_proj$", "lm_head"], "channel"),
                _ct_group([r"re:.*mlp\.(gate|up|down)_proj$"], "tensor_group", 4),
            ],
            CT_IGNORE[1:], kv=True,
        ),
    ),
    "modelopt nvfp4": (_text_only(modelopt_nvfp4), lambda m: _modelopt("NVFP4", group_size=16)),
    "modelopt fp8": (_text_only(modelopt_tensor), lambda m: _modelopt("FP8")),
    "modelopt fp8 per channel": (
        _text_only(modelopt_channel), lambda m: _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "modelopt fp8_pb_wo": (_text_only(modelopt_block), lambda m: _modelopt("fp8_pb_wo")),
    "modelopt fp8_pb_wo, rank 2": (_text_only(modelopt_block_inv), lambda m: _modelopt("fp8_pb_wo")),
    "modelopt mixed with nvfp4 head": (_modelopt_mixed, _mixed_modelopt),
    "fp8 by tensor, static": (
        _everywhere(static_tensor),
        lambda m: {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "ignored_layers": FP8_IGNORE,
        },
    ),
    "fp8 blocks, F32 scales": (
        _everywhere(block_f32),
        lambda m: {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                   "activation_scheme": "dynamic", "modules_to_not_convert": FP8_IGNORE},
    ),
    "fp8 blocks, BF16 scales": (
        _everywhere(block_bf16),
        lambda m: {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                   "activation_scheme": "dynamic", "modules_to_not_convert": FP8_IGNORE},
    ),
}  # fmt: skip


def export(path: Path, name: str, seed: int = 1) -> dict[str, Write]:
    """Write an export of the tiny model: a shard a layer, an index with empty metadata. Returns what was quantised."""
    choose, configure = EXPORTS[name]
    rng = np.random.default_rng(seed)
    tensors, written = {}, {}
    for tensor, value in tiny_tensors().items():
        module = tensor.removesuffix(".weight")
        write = choose(module) if value.ndim == 2 else None
        if write is None:
            tensors[tensor] = value
        else:
            tensors |= write(module, (value.shape[0], value.shape[1]), rng)
            written[module] = write
        if name.endswith("KV scales") and tensor.endswith("k_proj.weight"):
            attention = module.rpartition(".")[0]
            tensors |= {f"{attention}.{n}_scale": torch.ones(1, dtype=torch.bfloat16) for n in "kv"}
    save(path, tensors)
    config = json.loads((TINY / "config.json").read_text()) | {"quantization_config": configure(written)}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return written


def save(path: Path, tensors: Tensors) -> None:
    """Shards named after layers, and an index without metadata."""
    path.mkdir(parents=True)
    shards: dict[str, Tensors] = {}
    for name, value in tensors.items():
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name and "mtp" not in name else "outside"
        shards.setdefault(f"layers-{layer}.safetensors", {})[name] = value.contiguous()
    for file, content in shards.items():
        save_file(content, path / file)
    weight_map = {name: file for file, content in shards.items() for name in content}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if not (path / "config.json").exists():
        shutil.copy(TINY / "config.json", path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
