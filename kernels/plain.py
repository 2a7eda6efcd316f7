"""Weights in plain fp16 for the vendor's product: which rows stand together, and the kernel that makes them of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .half_factors import Shared, half_factors
from .module import load
from .task import matrix_of
from .weights import BAND, GROUP, Weight

SOURCE = "dequantise.cu"
_WARPS, _TILES_A_WARP = 4, 4  # of a block


@dataclass(frozen=True)
class Plain:
    """What one product multiplies: bands of a weight, or several whole weights that share x, one below the other.

    factors  what each weight times its scales is multiplied by on its way to fp16
    back     what the product is multiplied by after
    first, bands  of the first weight's bands those that are taken, if it stands alone
    """

    weights: tuple[Weight, ...]
    factors: tuple[float, ...]
    back: float
    first: int
    bands: int

    @classmethod
    def piece(cls, weight: Weight, first: int, bands: int) -> Plain:
        """Bands of one weight."""
        factor, back = half_factors(weight)
        return cls((weight,), (factor,), back, first, bands)

    @classmethod
    def together(cls, weights: Sequence[Weight], shared: Shared) -> Plain:
        """Whole weights."""
        return cls(tuple(weights), shared.factors, shared.back, 0, weights[0].words.shape[0])

    @property
    def key(self) -> tuple[int, ...]:
        """The same for the same words, while they live."""
        return (*(weight.words.data_ptr() for weight in self.weights), self.first, self.bands)

    @property
    def columns(self) -> int:
        return self.weights[0].shape[1]

    @property
    def rows(self) -> int:
        """Of the product, without those past the end of the last weight."""
        if len(self.weights) > 1:
            return sum(weight.shape[0] for weight in self.weights)
        return min(self.bands * BAND, self.weights[0].shape[0] - self.first * BAND)

    @property
    def elements(self) -> int:
        """Values that are written, those of rows past the last weight's end too."""
        if len(self.weights) > 1:
            return (self.rows + -self.weights[-1].shape[0] % BAND) * self.columns
        return self.bands * BAND * self.columns

    def fill(self, memory: Tensor) -> Tensor:
        """float16 [rows, K] at the beginning of `memory`, float16 of at least `elements`, on torch's current stream."""
        plain = memory[: self.elements].view(-1, self.columns)
        if len(self.weights) == 1:
            dequantise(self.weights[0], plain, self.first, self.factors[0])
            return plain[: self.rows]
        begin = 0
        for weight, factor in zip(self.weights, self.factors, strict=True):
            whole = BAND * weight.words.shape[0]  # the rows past the weight's end are the next one's, which comes after
            dequantise(weight, plain[begin : begin + whole], 0, factor)
            begin += weight.shape[0]
        return plain[: self.rows]


def dequantise(weight: Weight, out: Tensor, first_band: int, factor: float) -> None:
    """Bands from `first_band` on, times scale and factor, to `out` float16 [32 * bands, K]; rows past N become zero."""
    groups, bands = weight.shape[1] // GROUP, out.shape[0] // BAND
    blocks = -(-bands * -(-groups // _TILES_A_WARP) // _WARPS)
    module = load(SOURCE, out.device.index)
    arguments = (matrix_of(weight), out, groups, first_band, bands, float(factor))
    module.launch(f"dequantise_{weight.encoding}", blocks, 32 * _WARPS, arguments)
