"""The forms in which the family is published, as data: which tensors stand for a weight, in which file, declared how.

Each follows a release on the hub: its file names, its index, its scales, its configuration. What a tensor is filled
with is told by its `kind`, a name of perf/tables.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..checkpoint.files import plan_files
from ..checkpoint.writer import Planned
from ..model.config import ModelConfig
from ..model.inventory import TensorSpec, inventory

SHARD_BYTES = 5_000_000_000
TILE = 128
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
)
PLAIN_KINDS = {"linear_attn.A_log": "log decay", "linear_attn.norm": "gain"}


@dataclass(frozen=True)
class Stored:
    """A tensor of a release: `kind` says what its values are."""

    tensor: Planned
    kind: str


Write = Callable[[TensorSpec, int], Iterator[Stored]]  # (weight, number of layers) -> the tensors that stand for it
Place = Callable[[TensorSpec, int], str]
Declare = Callable[[ModelConfig], dict[str, Any] | None]


@dataclass(frozen=True)
class Release:
    """`place` None: shards of 5 GB. `total_size`: the index says it; some releases leave its metadata empty.

    `declare` gives config.json's quantization_config, `hf_quant` whether hf_quant_config.json says it too.
    """

    summary: str
    write: Write
    place: Place | None
    declare: Declare
    total_size: bool = True
    hf_quant: bool = False

    def files(self, config: ModelConfig) -> list[tuple[str, list[Stored]]]:
        """(file name, its tensors in order) of this release of a model."""
        layers = config.text.num_hidden_layers
        groups = [(spec, list(self.write(spec, layers))) for spec in inventory(config).values()]
        stored = {item.tensor.name: item for _, group in groups for item in group}
        if self.place is None:
            planned = plan_files([[item.tensor for item in group] for _, group in groups], SHARD_BYTES)
            return [(name, [stored[tensor.name] for tensor in tensors]) for name, tensors in planned]
        files: dict[str, list[Stored]] = {}
        for spec, group in groups:
            if group:
                files.setdefault(self.place(spec, layers), []).extend(group)
        return [(name.replace("{n}", f"{len(files):05}"), items) for name, items in files.items()]


def module_of(spec: TensorSpec) -> str:
    """The module that a weight belongs to."""
    return spec.name.removesuffix(".weight")


def layer_of(spec: TensorSpec) -> int:
    """The index of the layer that a weight of one belongs to."""
    return int(spec.name.split("layers.")[1].split(".")[0])


def _plain(spec: TensorSpec, layers: int, dtype: str = "BF16") -> Iterator[Stored]:
    yield Stored(Planned(spec.name, dtype, spec.shape), PLAIN_KINDS.get(spec.role, "weight"))


def _with_f32(spec: TensorSpec, layers: int) -> Iterator[Stored]:
    """3.5 keeps A_log and the gated norm in F32."""
    return _plain(spec, layers, "F32" if spec.role in PLAIN_KINDS else "BF16")


def _block_fp8(spec: TensorSpec, layers: int) -> Iterator[Stored]:
    if spec.role not in (*MLP, *PROJECTIONS):
        yield from _plain(spec, layers)
        return
    grid = (-(-spec.shape[0] // TILE), -(-spec.shape[1] // TILE))
    yield Stored(Planned(spec.name, "F8_E4M3", spec.shape), "fp8")
    yield Stored(Planned(f"{module_of(spec)}.weight_scale_inv", "BF16", grid), "fp8 scale")


def _channel_fp8(spec: TensorSpec) -> Iterator[Stored]:
    yield Stored(Planned(spec.name, "F8_E4M3", spec.shape), "fp8")
    yield Stored(Planned(f"{module_of(spec)}.weight_scale", "BF16", (spec.shape[0], 1)), "fp8 scale")


def _packed_nvfp4(spec: TensorSpec) -> Iterator[Stored]:
    module, (rows, columns) = module_of(spec), spec.shape
    yield Stored(Planned(f"{module}.weight_packed", "U8", (rows, columns // 2)), "nvfp4")
    yield Stored(Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)), "block scale")
    yield Stored(Planned(f"{module}.weight_global_scale", "F32", (1,)), "divisor")
    yield Stored(Planned(f"{module}.input_global_scale", "F32", (1,)), "divisor")


def early_layers(layers: int) -> int:
    """Layers whose MLP the mixed release has in nvfp4: 56 of 64, at any depth all but the last eighth."""
    return layers * 7 // 8


def _compressed_tensors(spec: TensorSpec, layers: int) -> Iterator[Stored]:
    vision = spec.group == "vision" and len(spec.shape) == 2 and spec.name.endswith(".weight")
    if spec.group == "mtp":
        yield from _plain(spec, layers)
    elif spec.role in MLP and layer_of(spec) < early_layers(layers):
        yield from _packed_nvfp4(spec)
    elif spec.role in (*MLP, *PROJECTIONS, "lm_head") or (vision and "embed" not in spec.name):
        yield from _channel_fp8(spec)
    else:
        yield from _plain(spec, layers)
    if spec.role == "self_attn.k_proj" and spec.group == "text":
        for name in ("k_scale", "v_scale"):
            yield Stored(Planned(f"{module_of(spec).rpartition('.')[0]}.{name}", "BF16", (1,)), "one")


def _modelopt(spec: TensorSpec, layers: int) -> Iterator[Stored]:
    if spec.group == "mtp":  # the exporter lost it
        return
    module = module_of(spec)
    if spec.role in MLP or spec.role == "lm_head":
        rows, columns = spec.shape
        yield Stored(Planned(spec.name, "U8", (rows, columns // 2)), "nvfp4")
        yield Stored(Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)), "block scale")
        yield Stored(Planned(f"{module}.weight_scale_2", "F32", ()), "multiplier")
        yield Stored(Planned(f"{module}.input_scale", "F32", ()), "multiplier")
    elif spec.role in PROJECTIONS:
        yield Stored(Planned(spec.name, "F8_E4M3", spec.shape), "fp8")
        yield Stored(Planned(f"{module}.weight_scale", "F32", ()), "fp8 scale")
        yield Stored(Planned(f"{module}.input_scale", "F32", ()), "fp8 scale")
    else:
        yield from _plain(spec, layers)


def _by_layer(spec: TensorSpec, layers: int) -> str:
    if spec.group == "mtp":
        return "mtp.safetensors"
    return f"layers-{layer_of(spec)}.safetensors" if ".layers." in spec.name else "outside.safetensors"


def _odd_names(spec: TensorSpec, layers: int) -> str:
    number = 1
    if "layers." in spec.name:
        index, shards = layer_of(spec), min(10, layers)
        number = index * shards // layers + 2 if spec.group == "text" else 2
    return f"model.safetensors-{number:05}-of-{{n}}.safetensors"


def _block_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": [
            "lm_head", "model.visual", "in_proj_a", "in_proj_b", "conv1d", "mtp.fc", "embed_tokens",
        ],
    }  # fmt: skip


def _group(targets: list[str], bits: int, strategy: str, inputs: dict[str, Any], form: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if bits == 4:
        weights |= {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    return {"targets": targets, "weights": weights, "input_activations": inputs, "format": form}


def _compressed_tensors_config(config: ModelConfig) -> dict[str, Any]:
    early = early_layers(config.text.num_hidden_layers)
    groups = {}
    if early:
        layers = "|".join(map(str, range(early)))
        local = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
        target = rf"re:.*layers\.({layers})\.mlp\.(gate|up|down)_proj$"
        groups["group_0"] = _group([target], 4, "tensor_group", local, "nvfp4-pack-quantized")
    token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    groups["group_1"] = _group(["Linear"], 8, "channel", token, "float-quantized")
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed",
        "config_groups": groups, "ignore": ["re:^mtp.*", "re:.*in_proj_[ab]$", "re:.*embed.*", "re:.*conv1d$"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }  # fmt: skip


def _modelopt_config(config: ModelConfig) -> dict[str, Any]:
    layers = {}
    for spec in inventory(config).values():
        if spec.group != "mtp" and spec.role in (*MLP, *PROJECTIONS, "lm_head"):
            fp8 = spec.role in PROJECTIONS
            layers[module_of(spec)] = {"quant_algo": "FP8"} if fp8 else {"quant_algo": "NVFP4", "group_size": 16}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}


def _undeclared(config: ModelConfig) -> None:
    return None


RELEASES = {
    "bf16": Release("plain BF16, as the 3.6 and 3.8 releases", _plain, None, _undeclared),
    "qwen3.5-bf16": Release(
        "Qwen3.5-27B: BF16, A_log and the gated norm F32, 11 shards with odd names", _with_f32, _odd_names, _undeclared
    ),
    "qwen3.8-fp8": Release(
        "Qwen3.8-27B-FP8: 128 x 128 block FP8, a shard a layer, empty index metadata", _block_fp8, _by_layer,
        _block_config, total_size=False,
    ),
    "nvfp4-ct": Release(
        "compressed-tensors mixed: MLP nvfp4 W4A4, the last eighth, attention, head and vision FP8, KV scales",
        _compressed_tensors, _by_layer, _compressed_tensors_config, total_size=False,
    ),
    "nvfp4-modelopt": Release(
        "ModelOpt mixed: MLP and head nvfp4, attention FP8, no MTP layer", _modelopt, _by_layer, _modelopt_config,
        hf_quant=True,
    ),
}  # fmt: skip
