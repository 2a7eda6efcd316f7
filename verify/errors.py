"""How far quantised values may be from the source, and how far they are.

A value is within half a step of its encoding at its own magnitude. The step follows from the stored scale alone, so the
bound holds for any choice of scales, and no code of the quantiser is shared.
"""

from dataclasses import dataclass

import numpy as np

from ..checkpoint.encodings import fp8, nvfp4
from .report import ErrorRow

SLACK = np.float32(2.0**-20)  # relative: float32 roundings of scale, quotient and product
E4M3_LEAST_NORMAL = np.float32(2.0**-6)
E4M3_LARGEST = 0x7E


@dataclass(frozen=True)
class Allowance:
    """What a quantiser may do beyond rounding once.

    `steps_down`: E4M3 steps by which a block scale may be below the one that reaches the block's largest value, which is
    then clamped. `slack`: relative error of the roundings on the way.
    """

    steps_down: int = 0
    slack: np.float32 = SLACK


# By the recipe's quantiser. compressed-tensors rounds scales and quotients to the weight's dtype (2^-9) on the way.
ALLOWANCES = {"search": Allowance(steps_down=3), "compressed-tensors": Allowance(slack=np.float32(2.0**-7))}
PLAIN = Allowance()


def _e4m3_half_step(magnitude: np.ndarray) -> np.ndarray:
    """Half the distance of E4M3 values around `magnitude` (3 mantissa bits; fixed below 2^-6)."""
    exponent = np.frexp(np.maximum(magnitude, E4M3_LEAST_NORMAL))[1] - 1  # floor(log2): frexp's mantissa is in [0.5, 1)
    return np.ldexp(np.float32(1), exponent - 4)


def fp8_bound(weight: np.ndarray, row_scale: np.ndarray, allowance: Allowance = PLAIN) -> np.ndarray:
    """float32 [rows, columns]: largest allowed |weight - decoded| for scales [rows]."""
    scale = row_scale.reshape(-1, 1)
    return _e4m3_half_step(np.abs(weight) / scale) * scale + np.abs(weight) * allowance.slack


def nvfp4_bound(
    weight: np.ndarray, block_scale: np.ndarray, multiplier: np.float32, allowance: Allowance = PLAIN
) -> np.ndarray:
    """As `fp8_bound`, for block scales uint8 [rows, columns / 16].

    E2M1 steps are 0.5 up to 2, 1 up to 4, 2 up to 6. Beyond 6 the value was clamped: the block scale itself is rounded
    to E4M3, so that the block's largest value may pass 6 by 6 half steps of that scale, or of one some steps up.
    """
    scale = fp8.DECODE[block_scale]
    factor = np.repeat(scale * multiplier, nvfp4.GROUP, axis=1)
    y = np.abs(weight) / factor
    reaching = fp8.DECODE[np.minimum(block_scale.astype(np.int64) + allowance.steps_down, E4M3_LARGEST)]
    beyond = 6 * multiplier * (reaching - scale + _e4m3_half_step(reaching))
    clamped = np.repeat(beyond.astype(np.float32), nvfp4.GROUP, axis=1)
    half_step = np.where(y <= 2, np.float32(0.25), np.where(y <= 4, np.float32(0.5), np.float32(1))) * factor
    return np.where(y > 6, np.maximum(half_step, clamped), half_step) + np.abs(weight) * allowance.slack


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """On this thread alone: `a @ b` would start one a core, and several weights are compared at the same time."""
    return float(np.einsum("i,i->", a, b))


@dataclass
class ErrorSums:
    """Sums over the bands of one weight, in float64."""

    max_abs: float = 0.0
    error2: float = 0.0
    weight2: float = 0.0
    decoded2: float = 0.0
    product: float = 0.0
    nonzero: int = 0
    flushed: int = 0

    def add(self, weight: np.ndarray, decoded: np.ndarray) -> None:
        """Take in a band of float32 values."""
        w, d = weight.astype(np.float64).reshape(-1), decoded.astype(np.float64).reshape(-1)
        error = w - d
        self.max_abs = max(self.max_abs, float(np.abs(error).max(initial=0)))
        self.error2 += _dot(error, error)
        self.weight2 += _dot(w, w)
        self.decoded2 += _dot(d, d)
        self.product += _dot(w, d)
        self.nonzero += int(np.count_nonzero(w))
        self.flushed += int(np.count_nonzero((w != 0) & (d == 0)))

    def row(self, tensor: str, encoding: str) -> ErrorRow:
        """The measures; a tensor of zeros has relative error 0 and cosine 1 if it decodes to zeros."""
        norms = (self.weight2 * self.decoded2) ** 0.5
        exact = self.error2 == 0
        return ErrorRow(
            tensor=tensor,
            encoding=encoding,
            max_abs=self.max_abs,
            relative_l2=0.0 if exact else (self.error2 / self.weight2) ** 0.5 if self.weight2 else float("inf"),
            cosine=1.0 if exact else self.product / norms if norms else 0.0,
            flushed=self.flushed / self.nonzero if self.nonzero else 0.0,
        )
