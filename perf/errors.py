"""The error table of the nvfp4 quantisers: squared error over the sum of squares, by kind of weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings import nvfp4
from ..checkpoint.encodings.plain import to_bf16, to_float32
from ..convert.quantisers import QUANTISERS, Quantiser

SHAPE = (1024, 1024)


@dataclass(frozen=True)
class ErrorRow:
    """`errors[quantiser]`: sum of squared errors over the sum of squared weights."""

    weights: str
    errors: dict[str, float]


def _sums(weight: np.ndarray, quantiser: Quantiser) -> float:
    scale = quantiser.global_scale(float(np.abs(weight).max()), "BF16")
    words, block_scale = quantiser.nvfp4_words(weight, scale, "BF16")
    kind = "divisor" if quantiser.encoding.endswith("divisor") else "multiplier"
    decoded = nvfp4.decode(words, nvfp4.factors(block_scale, **{kind: scale}))
    return float(np.square(decoded.astype(np.float64) - weight).sum())


def _bf16(values: np.ndarray) -> np.ndarray:
    return to_float32(to_bf16(values.astype(np.float32)), "BF16")


def _kinds() -> Iterator[tuple[str, list[np.ndarray]]]:
    rng = np.random.default_rng(0)
    yield "Gaussian", [_bf16(rng.standard_normal(SHAPE) * 0.02)]
    yield "Student t, 3 degrees", [_bf16(rng.standard_t(3, SHAPE) * 0.02)]
    yield "Student t, 1.5 degrees", [_bf16(rng.standard_t(1.5, SHAPE) * 0.002)]
    checkpoint = Checkpoint.open(Path(str(resources.files("duovolt.tiny"))) / "checkpoint")
    names = [name for name in checkpoint.tensors if name.endswith("_proj.weight")]
    matrices = [name for name in names if checkpoint.tensors[name].shape[1] % nvfp4.GROUP == 0]
    yield (
        "bundled model, projections",
        [to_float32(checkpoint.read(name), checkpoint.tensors[name].dtype) for name in matrices],
    )


def error_table() -> list[ErrorRow]:
    """One row a kind of weights, every matrix with a global scale of its own."""
    rows = []
    for kind, weights in _kinds():
        total = sum(float(np.square(weight.astype(np.float64)).sum()) for weight in weights)
        errors = {
            name: sum(_sums(weight, quantiser) for weight in weights) / total for name, quantiser in QUANTISERS.items()
        }
        rows.append(ErrorRow(kind, errors))
    return rows
