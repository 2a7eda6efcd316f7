"""The convention of compressed-tensors (and llmcompressor): `config_groups` of targets, `ignore` before them.

nvfp4: `weight_packed` U8 [N, K/2], `weight_scale` F8_E4M3 [N, K/16], `weight_global_scale` F32 [1], a divisor.
FP8: `weight` F8_E4M3 [N, K], `weight_scale` BF16: [1] a tensor, [N, 1] a channel, [ceil(N/128), ceil(K/128)] a block.
"""

from typing import Any

from ..errors import InputError
from .base import TILE, Declaration, Rule, Scheme, everything, exact, expression, pair, section, strings

FP8_SCALES = {"tensor": "tensor", "channel": "row", "block": "tile"}
FORMATS = ("float-quantized", "mixed-precision", "naive-quantized", "nvfp4-pack-quantized")
STATUSES = (None, "compressed")


def _rule(text: str, where: str) -> Rule:
    if text.startswith("re:"):
        return expression(text, text[3:], where)
    return everything(text) if text == "Linear" else exact(text)


def _scheme(group: str, weights: dict[str, Any], form: Any, where: str) -> Scheme:
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    label = f"{group}: {bits}-bit {kind}, strategy {strategy}"
    if kind == "float" and weights.get("symmetric", True) is True:
        if bits == 4 and strategy == "tensor_group" and weights.get("group_size") == 16:
            if form in ("nvfp4-pack-quantized", None):
                return Scheme("nvfp4", ("divisor",), label)
        elif bits == 8 and strategy in tuple(FP8_SCALES) and form in ("float-quantized", "naive-quantized", None):
            tile = TILE
            if strategy == "block":
                tile = pair(weights.get("block_structure"), "block_structure", f"{where}: {group}")
            return Scheme("fp8_e4m3", (FP8_SCALES[strategy],), label, tile)
    raise InputError(
        f"{where}: config_groups {label}, group_size {weights.get('group_size')}, format {form!r}: not a form that this "
        "duovolt reads (nvfp4-pack-quantized in groups of 16, float-quantized by tensor, channel or block)."
    )


def declare(config: dict[str, Any], where: str) -> Declaration:
    """Rules of a `quantization_config` of quant_method compressed-tensors. Raises InputError for what is not read."""
    top = config.get("format")
    if top not in FORMATS and top is not None:
        raise InputError(f"{where}: format {top!r} is not one that this duovolt reads ({', '.join(FORMATS)}).")
    if (status := config.get("quantization_status")) not in STATUSES:
        raise InputError(f"{where}: quantization_status {status!r}: only compressed checkpoints are read.")
    if config.get("transform_config"):
        raise InputError(f"{where}: transform_config: weights that were transformed before quantising are not read.")
    targets: list[tuple[Rule, Scheme]] = []
    for name, value in section(config.get("config_groups"), "config_groups", where).items():
        group = section(value, f"config_groups {name}", where)
        if group.get("weights") is None:  # scales of activations or of the KV cache alone
            continue
        weights = section(group["weights"], f"config_groups {name} weights", where)
        form = group.get("format") or (None if top == "mixed-precision" else top)
        scheme = _scheme(name, weights, form, where)
        targets += [(_rule(text, where), scheme) for text in strings(group.get("targets"), "targets", where)]
    ignored = [_rule(text, where) for text in strings(config.get("ignore"), "ignore", where)]
    return Declaration("compressed-tensors", where, targets, ignored)
