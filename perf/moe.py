"""Members of the family with routed experts (Qwen3.5-35B-A3B): counted from headers, though the runtime does not run them.

Such a model is a dense one whose MLP is the shared expert, and beside it a router and the experts. Bytes are those that are
stored; on `tp` ranks every expert is cut along its inner dimension, and the router is on all of them.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..checkpoint.directory import Checkpoint
from ..checkpoint.errors import InputError
from ..checkpoint.sources import read_form
from ..checkpoint.sources.base import SourceWeight
from ..model.config import ARCHITECTURE, MODEL_TYPE, ModelConfig, without_mtp
from ..model.inventory import inventory
from ..model.names import family_name
from .sheet import Experts, Layer, Matrix, Mtp, Sheet, sheet_of

MOE_TYPE = "qwen3_5_moe"
MAX_EXPERTS = 1 << 16
# Releases store experts as two stacks, or one by one.
_DOWN, _GATE_UP = ("down_proj",), ("gate_up_proj", "gate_proj", "up_proj")


def is_moe(config: Any) -> bool:
    """True for a configuration of the family's mixtures of experts."""
    return isinstance(config, dict) and config.get("model_type") == MOE_TYPE


def moe_sheet(checkpoint: Checkpoint, tp: int) -> Sheet:
    """One of `tp` ranks. Raises InputError for missing tensors and numbers that make no sense."""
    where = str(checkpoint.path)
    text = checkpoint.config.get("text_config")
    if not isinstance(text, dict):
        raise InputError(f"{where}/config.json: text_config: missing or not a JSON object.")
    count, used = (_whole(text, key, where) for key in ("num_experts", "num_experts_per_tok"))
    inner = _whole(text, "moe_intermediate_size", where)
    if used > count or inner % tp:
        raise InputError(f"{where}: {used} of {count} experts a token, {inner} wide, over {tp} ranks make no sense.")
    dense = _as_dense(checkpoint.config, text, where)
    weights = {family_name(weight.name): weight for weight in read_form(checkpoint).weights.values()}
    if not any(name.startswith("mtp.") for name in weights):
        dense = without_mtp(dense)
    config = ModelConfig.from_dict(dense, where)
    encodings = {}
    for name in inventory(config):
        stored = weights.get(name.replace(".mlp.", ".mlp.shared_expert."))
        if stored is not None:
            encodings[name] = stored.encoding
    sheet = sheet_of(f"{checkpoint.path.name}, as it is", config, encodings, tp)
    experts = _Experts(weights, where, count, used, tp)
    layers = tuple(experts.added(layer) for layer in sheet.layers)
    mtp = sheet.mtp and Mtp(sheet.mtp.fc, experts.added(sheet.mtp.layer))
    return replace(sheet, layers=layers, mtp=mtp)


def _whole(text: dict[str, Any], key: str, where: str) -> int:
    found = text.get(key)
    if type(found) is not int or not 1 <= found <= MAX_EXPERTS:
        raise InputError(f"{where}/config.json: {key} is {found!r}, expected a whole number from 1 to {MAX_EXPERTS}.")
    return found


def _as_dense(config: dict[str, Any], text: dict[str, Any], where: str) -> dict[str, Any]:
    shared = _whole(text, "shared_expert_intermediate_size", where)
    return config | {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "vision_config": None,
        "text_config": text | {"intermediate_size": shared},
    }


class _Experts:
    """The routed experts of a checkpoint, layer by layer."""

    def __init__(self, weights: dict[str, SourceWeight], where: str, count: int, used: int, tp: int) -> None:
        self.weights, self.where, self.count, self.used, self.tp = weights, where, count, used, tp
        self.by_layer: dict[str, list[SourceWeight]] = {}
        for name, weight in weights.items():
            prefix, found, _ = name.partition(".mlp.experts.")
            if found:
                self.by_layer.setdefault(prefix, []).append(weight)

    def added(self, layer: Layer) -> Layer:
        """The layer with its experts."""
        mine = self.by_layer.get(layer.name, [])
        down = [weight for weight in mine if self._last(weight) in _DOWN]
        gate_up = [weight for weight in mine if self._last(weight) in _GATE_UP]
        if not down or not gate_up or len(down) + len(gate_up) != len(mine):
            raise InputError(f"{self.where}: {layer.name}.mlp.experts: {len(mine)} tensors, not those of experts.")
        router = self._matrix(f"{layer.name}.mlp.gate.weight")
        if router is None:
            raise InputError(f"{self.where}: {layer.name}.mlp.gate.weight is missing.")
        gate = self._matrix(f"{layer.name}.mlp.shared_expert_gate.weight")
        wide, narrow = (_stored(part) // self.count // self.tp for part in (gate_up, down))
        return replace(layer, experts=Experts(self.count, self.used, wide, narrow, router, gate))

    @staticmethod
    def _last(weight: SourceWeight) -> str:
        return weight.name.removesuffix(".weight").rpartition(".")[2]

    def _matrix(self, name: str) -> Matrix | None:
        weight = self.weights.get(name)
        if weight is None:
            return None
        rows, columns = (*weight.shape, 1)[:2] if weight.shape else (1, 1)
        return Matrix(name, rows, columns, weight.encoding, _stored([weight]))


def _stored(weights: Iterable[SourceWeight]) -> int:
    return sum(part.nbytes for weight in weights for part in weight.parts.values())
