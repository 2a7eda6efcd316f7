"""What weights are multiplied by on their way to fp16, and their product after: no scale, small or large, leaves fp16's range.

Powers of two, so that they change no digit; but for nvfp4 of one scale, whose own scale goes with the product, so that its values
stay exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .weights import Fp8BlockWeight, HalfWeight, Nvfp4Weight, Weight

_MOST_UP = 8  # powers of two by which a weight may move up beside a larger one: from 2^2 at most to 2^10
_LARGEST_FP8, _LARGEST_E2M1 = 448.0, 6.0
_LEAST_SCALE = 1e-20  # of which the inverse is far from the end of float32
_TARGET = 2  # the largest possible weight comes to lie at or below 2^2


def half_factors(weight: Weight) -> tuple[float, float]:
    """(what the weight times its scales is multiplied by on its way to fp16, what the product is multiplied by after).

    The weight's largest value comes to lie in (2, 4]: for fp16 matrices the largest that is there, for words the largest
    that their scales allow. 1 and 1 for a weight of zeros.
    """
    known = weight.__dict__.get("_half_factors")
    if known is None:
        known = _half_factors(weight)
        object.__setattr__(weight, "_half_factors", known)  # derived from the frozen fields, and costly
    return known


def _half_factors(weight: Weight) -> tuple[float, float]:
    if isinstance(weight, HalfWeight):
        over = (1, 2, 4)  # all but the rows
        rows = torch.maximum(weight.words.amax(over), -weight.words.amin(over)).flatten()[: weight.scale.numel()]
        return _power(float((rows.float() * weight.scale.abs()).max()))
    scales = weight.block_scale if isinstance(weight, Fp8BlockWeight) else weight.scale
    scale = float(scales.abs().max())
    if not isinstance(weight, Nvfp4Weight):
        return _power(_LARGEST_FP8 * scale)
    codes = int((weight.block_scale & 0x7F).max())
    values = _LARGEST_E2M1 * float(torch.tensor([codes], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    if scales.numel() > 1 or not _LEAST_SCALE < scale < 1 / _LEAST_SCALE or float(scales) < 0:
        return _power(values * scale)
    factor, back = _power(values)
    return factor / scale, back * scale


def _power(largest: float) -> tuple[float, float]:
    """A power of two that brings `largest` to (2, 4], and its inverse."""
    exponent = _TARGET - math.ceil(math.log2(largest)) if 0 < largest < math.inf else 0
    return 2.0**exponent, 2.0**-exponent


@dataclass(frozen=True)
class Shared:
    """`factors` that bring each of several weights to fp16 and one `back` for their product, after which each one's part is
    still to be multiplied by its number in `rests`, in [1, 2): 1 but for nvfp4 of unlike scales, whose values stay exact."""

    factors: tuple[float, ...]
    back: float
    rests: tuple[float, ...]


def shared_factors(weights: Sequence[Weight]) -> Shared | None:
    """None if the weights' sizes are too far apart for fp16. They move up alone, where no digit is lost."""
    found = [half_factors(weight) for weight in weights]
    back = min(own for _, own in found)
    factors, rests = [], []
    for factor, own in found:
        fraction, exponent = math.frexp(own / back)  # fraction in [0.5, 1)
        if exponent - 1 > _MOST_UP:
            return None
        factors.append(math.ldexp(factor, exponent - 1))
        rests.append(2 * fraction)
    return Shared(tuple(factors), back, tuple(rests))
