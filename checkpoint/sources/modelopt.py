"""ModelOpt's convention: `quant_algo` for everything but `exclude_modules`, or MIXED_PRECISION with `quantized_layers`.

nvfp4: `weight` U8 [N, K/2], `weight_scale` F8_E4M3 [N, K/16], `weight_scale_2` F32 [], a multiplier. FP8: `weight`
F8_E4M3 [N, K], `weight_scale` F32: [] a tensor, [N] a channel, [N/128, 1, K/128, 1] a block ([] if there is only one);
some exports with the block algorithm ship `weight_scale_inv` of rank 2 instead.
"""

from typing import Any

from ..errors import InputError
from .base import Declaration, Rule, Scheme, everything, exact, section, strings, wildcard

# quant_algo in capitals (exporters write `fp8_pb_wo` in small letters) -> words, allowed scales
ALGORITHMS = {
    "NVFP4": ("nvfp4", ("multiplier",)),
    "W4A16_NVFP4": ("nvfp4", ("multiplier",)),
    "FP8": ("fp8_e4m3", ("tensor",)),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", ("row",)),
    "FP8_PB_WO": ("fp8_e4m3", ("tile", "tensor")),
}
MIXED = "MIXED_PRECISION"


def _scheme(algorithm: Any, group_size: Any, where: str) -> Scheme:
    known = ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if known is None:
        raise InputError(
            f"{where}: quant_algo {algorithm!r} is not one that this duovolt reads ({', '.join(ALGORITHMS)}, {MIXED})."
        )
    words, scales = known
    if words == "nvfp4" and group_size not in (None, 16):
        raise InputError(f"{where}: {algorithm} with group_size {group_size!r}; NVFP4 has groups of 16.")
    return Scheme(words, scales, algorithm)


def _rule(text: str) -> Rule:
    return wildcard(text) if any(mark in text for mark in "*?[") else exact(text)


def _one(name: str, first: Any, second: Any, where: str) -> Any:
    """A fact that two files may both state. Raises InputError if they differ."""
    same = first == second or (isinstance(first, str) and isinstance(second, str) and first.upper() == second.upper())
    if first is not None and second is not None and not same:
        raise InputError(f"{where}: {name} is {first!r} in one file and {second!r} in the other. Which one holds?")
    return second if first is None else first


def declare(config: dict[str, Any] | None, hf_quant: dict[str, Any] | None, where: str) -> Declaration:
    """Rules of config.json's `quantization_config`, of hf_quant_config.json, or of both where they agree.

    Raises InputError for an algorithm that is not read, and for files that contradict each other.
    """
    ours = config or {}
    theirs = section(hf_quant.get("quantization"), "quantization", where) if hf_quant else {}
    algorithm = _one("quant_algo", ours.get("quant_algo"), theirs.get("quant_algo"), where)
    ignored = strings(ours.get("ignore"), "ignore", where) or strings(ours.get("exclude_modules"), "ignore", where)
    excluded = strings(theirs.get("exclude_modules"), "exclude_modules", where)
    if config and hf_quant and "exclude_modules" in theirs and set(ignored) != set(excluded):
        odd = sorted(set(ignored) ^ set(excluded))
        raise InputError(f"{where}: ignore and exclude_modules of the two files differ: {', '.join(odd[:4])}.")
    rules = [_rule(text) for text in (ignored or excluded)]
    if isinstance(algorithm, str) and algorithm.upper() == MIXED:
        layers = section(
            _one("quantized_layers", ours.get("quantized_layers"), theirs.get("quantized_layers"), where),
            "quantized_layers",
            where,
        )
        targets = []
        for name, value in layers.items():
            layer = section(value, f"quantized_layers {name}", where)
            targets.append((_rule(name), _scheme(layer.get("quant_algo"), layer.get("group_size"), where)))
        return Declaration("modelopt", where, targets, rules)
    cache = (ours.get("kv_cache_scheme"), ours.get("kv_cache_quant_algo"), theirs.get("kv_cache_quant_algo"))
    if algorithm is None and any(cache):  # plain weights, and scales for the KV cache alone
        return Declaration("modelopt", where, [], rules)
    group_size = _one("group_size", ours.get("group_size"), theirs.get("group_size"), where)
    scheme = _scheme(algorithm, group_size, where)
    return Declaration("modelopt", where, [(everything(scheme.label), scheme)], rules)
