"""Weights of any model of the family, made on the device at random: for measuring, where no file of that size is at hand.

Sizes and encodings are those of a rank of a real conversion; values are of a scale at which hidden states stay finite.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from ..kernels.weights import BAND, GROUP, Fp8Weight, HalfWeight, Nvfp4Weight, Weight
from ..model.config import ModelConfig
from ..model.inventory import DRAFT_IDS, EMBED, TensorSpec, inventory
from ..model.partition import split_of
from ..runtime.engine.cuda.loading import assemble, is_matrix
from ..runtime.engine.cuda.weights import CudaWeights
from ..runtime.engine.sources import WeightSource

_ONE = 0x38  # 1.0 in E4M3
_FP8_RMS = 0.32  # of bytes with the high exponent bit cleared
_NVFP4_RMS = 2.9  # of the codes


def random_weights(
    config: ModelConfig, encodings: Mapping[str, str], tp: int, rank: int, device: torch.device, seed: int = 0
) -> CudaWeights:
    """Rank `rank` of `tp`, without the vision tower. `encodings`: weight -> nvfp4, fp8_e4m3, bf16 or fp16.

    Raises InputError for another encoding, or a model that cannot be split so.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    summed: set[str] = set()
    cut: set[str] = set()
    specs = {name: spec for name, spec in inventory(config).items() if spec.group != "vision"}
    for name, spec in specs.items():
        split, shape = split_of(spec, config, tp), list(spec.shape)
        if split.axis is not None:
            shape[split.axis] = sum(stop - start for start, stop in split.ranges[rank])
            (cut if split.axis == 0 else summed).add(name)
        shapes[name] = tuple(shape)

    def nothing(name: str) -> np.ndarray:
        raise AssertionError(f"{name} is not read")

    source = WeightSource(
        "random weights", replace(config, vision=None), tp, rank, shapes, frozenset(summed), frozenset(cut), nothing
    )
    maker = _Maker(torch.Generator(device).manual_seed(seed), device)
    ready = {name: maker.make(source, spec, encodings[name]) for name, spec in specs.items()}
    return assemble(source, ready)


class _Maker:
    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator, self._device = generator, device

    def make(self, source: WeightSource, spec: TensorSpec, encoding: str) -> Tensor | Weight:
        shape = source.shapes[spec.name]
        if is_matrix(source, spec.name):
            return self._matrix(encoding, *shape)
        if spec.name == EMBED:
            return self._normal(shape).mul_(0.02).to(torch.bfloat16)
        if spec.name == DRAFT_IDS:
            rows = source.config.text.draft_rows
            order = torch.randperm(source.config.text.vocab_size, generator=self._generator, device=self._device)
            return order[:rows].sort().values[source.tp_rank * shape[0] : (source.tp_rank + 1) * shape[0]].int()
        if spec.role.endswith("linear_attn.norm"):
            return torch.ones(shape, device=self._device)
        if spec.role.endswith("A_log"):
            return self._normal(shape).abs_()
        return self._normal(shape).mul_(0.3 if spec.role.endswith("conv1d") else 0.05)

    def _matrix(self, encoding: str, rows: int, columns: int) -> Weight:
        bands, groups, unit = rows // BAND, columns // GROUP, columns**-0.5
        if encoding in ("bf16", "fp16") or rows % BAND:
            dtype = (
                torch.bfloat16 if encoding == "bf16" else torch.float16
            )  # what `HalfWeight.of` is given when loading
            return HalfWeight.of(self._normal((rows, columns)).mul_(unit).to(dtype))
        if encoding == "nvfp4":
            scales = self._words((bands, groups, BAND)).bitwise_and_(7).add_(_ONE)
            scale = torch.full((1,), unit / _NVFP4_RMS, device=self._device)
            return Nvfp4Weight(self._words((bands, groups, BAND, 8)), scales, scale)
        if encoding == "fp8_e4m3":
            words = self._words((bands, groups, BAND, 16)).bitwise_and_(0xBF)
            return Fp8Weight(words, torch.full((rows,), unit / _FP8_RMS, device=self._device))
        raise InputError(f"random weights are made as nvfp4, fp8_e4m3, bf16 or fp16, not {encoding}.")

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 256, shape, generator=self._generator, dtype=torch.uint8, device=self._device)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)
