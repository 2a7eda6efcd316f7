"""Random models in every encoding, as the CUDA executor and as the torch reference hold them; engines over both."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from duovolt.kernels.delta import DeltaWeights
from duovolt.kernels.weights import HalfWeight, Weight
from duovolt.model.config import FULL
from duovolt.model.inventory import EMBED, HEAD, LAYER, NORM, inventory
from duovolt.runtime.engine.cuda.executor import CudaExecutor
from duovolt.runtime.engine.cuda.weights import (
    CudaAttention,
    CudaDelta,
    CudaDraftHead,
    CudaLayer,
    CudaMtp,
    CudaWeights,
    tensors_of,
)
from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.engine.model import Model
from duovolt.runtime.engine.reference import ReferenceExecutor
from duovolt.runtime.engine.sources import WeightSource
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.parallel.base import SoloCollective
from duovolt.runtime.parallel.device import SoloDevice

from ..kernels.conftest import encoded

TEXT = {  # the kernels' own extents, as few of them as there can be
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 160,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "rope_type": "default",
    },
}
MID = TEXT | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "vocab_size": 4096,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
}


def mixture(name: str) -> str:
    """The recipe of the real models: most in nvfp4, what is delicate in fp8, gates and heads in fp16."""
    if "mlp" in name:
        return "nvfp4"
    return "fp8" if "proj" in name else "half"


class Encoded:
    """A source's matrices in the kernels' encodings, and a source of exactly their values."""

    def __init__(self, source: WeightSource, kind: Callable[[str], str] = lambda name: "half") -> None:
        self.weights: dict[str, Weight] = {}
        values: dict[str, np.ndarray] = {}
        for name in inventory(source.config):
            plain = source.read(name)
            if name == EMBED:
                values[name] = torch.from_numpy(plain).bfloat16().float().numpy()
            elif plain.ndim == 2 and not name.endswith("ids"):
                sample = encoded(kind(name) if plain.shape[0] % 32 == 0 else "half", plain)
                self.weights[name] = sample.weight
                values[name] = sample.exact.astype(np.float32)
            else:
                values[name] = plain
        self.source = replace(source, read=values.__getitem__)

    def cuda(self, device: torch.device | str = "cpu") -> CudaWeights:
        """Everything on a device."""
        return cuda_weights(self.source, self.weights.__getitem__, device)


def cut_weights(source: WeightSource, device: torch.device | str = "cpu") -> CudaWeights:
    """One rank's share in fp16 tiles, of a source whose values fp16 holds."""
    return cuda_weights(source, lambda name: HalfWeight.of(torch.from_numpy(source.read(name)).half()), device)


def cuda_weights(source: WeightSource, matrix: Callable[[str], Weight], device: torch.device | str) -> CudaWeights:
    def plain(name: str) -> torch.Tensor:
        return torch.from_numpy(source.read(name)).contiguous()

    def layer(prefix: str, kind: str, index: int) -> CudaLayer:
        own = f"{prefix}.self_attn" if kind == FULL else f"{prefix}.linear_attn"
        if kind == FULL:
            mixer = CudaAttention(
                tuple(matrix(f"{own}.{x}_proj.weight") for x in "qkv"),
                *(plain(f"{own}.{x}_norm.weight") for x in "qk"),
                matrix(f"{own}.o_proj.weight"),
            )
        else:
            conv = plain(f"{own}.conv1d.weight")[:, 0].contiguous()
            mixer = CudaDelta(
                tuple(matrix(f"{own}.in_proj_{x}.weight") for x in ("qkv", "z", "b", "a")),
                DeltaWeights(conv, plain(f"{own}.A_log"), plain(f"{own}.dt_bias")),
                plain(f"{own}.norm.weight"),
                matrix(f"{own}.out_proj.weight"),
            )
        mlp = (matrix(f"{prefix}.mlp.{x}_proj.weight") for x in ("gate", "up", "down"))
        norms = (plain(f"{prefix}.{x}_layernorm.weight") for x in ("input", "post_attention"))
        return CudaLayer(index, next(norms), mixer, next(norms), *mlp)

    config = source.config
    counts = dict.fromkeys(config.text.layer_types, 0)
    layers = []
    for number, kind in enumerate(config.text.layer_types):
        layers.append(layer(f"{LAYER}.{number}", kind, counts[kind]))
        counts[kind] += 1
    mtp = None
    if config.mtp_layers:
        norms = (plain(f"mtp.pre_fc_norm_{x}.weight") for x in ("embedding", "hidden"))
        mtp = CudaMtp(matrix("mtp.fc.weight"), *norms, layer("mtp.layers.0", FULL, 0), plain("mtp.norm.weight"))
    head = matrix(HEAD)
    made = CudaWeights(
        *(config, source.tp_size, source.tp_rank, load_weights(source).sizes),
        *(plain(EMBED).bfloat16(), layers, plain(NORM), head, HEAD in source.cut and source.tp_size > 1, mtp),
        *(None, None, 0),
    )
    return moved(replace(made, nbytes=sum(t.nbytes for t in tensors_of(made))), device)


def moved(part: Any, device: torch.device | str) -> Any:
    """A record of tensors, with all of them on a device."""
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, list | tuple):
        return type(part)(moved(item, device) for item in part)
    if is_dataclass(part) and any(True for _ in tensors_of(part)):
        return type(part)(**{field.name: moved(getattr(part, field.name), device) for field in fields(part)})
    return part


def with_draft_head(weights: CudaWeights, ids: list[int], rows: torch.Tensor) -> CudaWeights:
    """Drafts are drawn from these tokens; rows float [V, H], the whole head."""
    device = weights.device
    head = HalfWeight.of(rows[ids].half().contiguous())
    return replace(
        weights,
        draft_head=CudaDraftHead(moved(head, device), torch.tensor(ids, dtype=torch.int32, device=device), False),
    )


def cuda_engine(weights: CudaWeights, link: Any = None, **settings: Any) -> Engine:
    """An engine over the CUDA executor; defaults as of `reference_engine`."""
    chosen, own = _settings(weights.config.text.vocab_size, settings)
    executor = CudaExecutor(weights, link or SoloDevice(), **own)
    return Engine(executor, **chosen)


def reference_engine(source: WeightSource, collective: Any = None, **settings: Any) -> Engine:
    """An engine over the reference; context 256, one lane, no drafts, every id may be drawn."""
    chosen, own = _settings(source.config.text.vocab_size, settings)
    model = Model(load_weights(source), collective or SoloCollective(), chosen["max_context"])
    return Engine(ReferenceExecutor(model, **own), **chosen)


def _settings(vocabulary: int, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shared = {"max_context": 256, "lanes": 1, "n_sampleable": vocabulary}
    shared |= {name: settings.pop(name) for name in list(shared) if name in settings}
    names = ("prefill_chunk", "drafts_from", "tokenizer", "processor", "image_token", "prefix_bytes", "prefix_interval")
    engine = shared | {name: settings.pop(name) for name in names if name in settings}
    own = {"drafts": 0} | shared | settings
    if engine.get("drafts_from") is not None:
        own["drafts"] = 0
    return engine, own
