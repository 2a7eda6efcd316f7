"""Linears for many tokens: tiles to plain fp16 in a scratch buffer, then the vendor's matrix product.

Some tokens more than the decode linear takes are cheaper as several of it. Beyond:
out[t, n] = sum_k x[t, k] * fp16(W[n, k] * s[n]), summed in float32 by the vendor's library, rounded to fp16. The weights are
dequantised at a factor that brings the largest near 4, and the product is multiplied back in float32, so that neither
small nor large scales leave fp16's range; nvfp4 of one scale without that scale, so that its values stay exact. Bits may
depend on T: prefill promises none.
"""

import functools
import math

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .linear import MAX_TOKENS, linear
from .module import load
from .task import matrix_of
from .weights import BAND, GROUP, Fp8BlockWeight, HalfWeight, Nvfp4Weight, Weight, check

SOURCE = "dequantise.cu"
FEW_TOKENS = 96  # up to which the weights are read once for every 24 tokens
SCRATCH_BYTES = 96 << 20  # of plain weights at a time
_LARGEST_FP8, _LARGEST_E2M1 = 448.0, 6.0
_LEAST_SCALE = 1e-20  # of which the inverse is far from the end of float32
_TARGET = 2  # the largest possible weight comes to lie at or below 2^2
_COLUMNS_A_BLOCK = 8 * 64  # eight warps, four tiles each


def linear_block(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """x float16 [T, K] times the weight transposed -> float16 [T, N], for any T; `out` contiguous if given.

    On torch's current stream; the first call for a weight synchronises, to see its largest scale.
    Raises InputError and EnvironmentFault as `linear` does.
    """
    out = _checked_output(x, weight, out)
    if x.device.type != "cuda":
        raise InputError(f"x is on {x.device}: this kernel runs on a CUDA device; the reference runs on any.")
    if x.shape[0] <= FEW_TOKENS:
        for first in range(0, x.shape[0], MAX_TOKENS):
            few = slice(first, first + MAX_TOKENS)
            linear(x[few], weight, out[few], dtype=torch.float16)
        return out
    rows, columns = weight.shape
    factor, back = half_factors(weight)
    bands = weight.words.shape[0]
    step = max(1, SCRATCH_BYTES // (2 * BAND * columns))
    for first in range(0, bands, step):
        count = min(step, bands - first)
        plain = _scratch(x.device, max(SCRATCH_BYTES // 2, BAND * columns))[: count * BAND * columns].view(-1, columns)
        dequantise(weight, plain, first, factor)
        part = out[:, first * BAND : min((first + count) * BAND, rows)]
        torch.addmm(part, x, plain[: part.shape[1]].t(), beta=0, alpha=back, out=part)
    return out


def linear_block_reference(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """What `linear_block` computes but for the rounding of the weights, in float32 on any device."""
    out = _checked_output(x, weight, out)
    return out.copy_((x.float() @ weight.values().t()) * weight.scale)


def dequantise(weight: Weight, out: Tensor, first_band: int, factor: float) -> None:
    """Bands from `first_band` on, times scale and factor, to `out` float16 [32 * bands, K]; rows past N become zero."""
    groups = weight.shape[1] // GROUP
    blocks = -(-weight.shape[1] // _COLUMNS_A_BLOCK)
    module = load(SOURCE, out.device.index)
    grid = (blocks, out.shape[0] // BAND)
    module.launch(
        f"dequantise_{weight.encoding}", grid, 256, (matrix_of(weight), out, groups, first_band, float(factor))
    )


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


@functools.cache
def _scratch(device: torch.device, elements: int) -> Tensor:
    return torch.empty(elements, dtype=torch.float16, device=device)


def _checked_output(x: Tensor, weight: Weight, out: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    if x.dim() != 2 or x.shape[0] < 1:
        raise InputError(f"x is {list(x.shape)}: expected [T, {columns}].")
    check("x", x, torch.float16, (x.shape[0], columns), weight.words.device)
    if out is None:
        return torch.empty(x.shape[0], rows, dtype=torch.float16, device=x.device)
    check("out", out, torch.float16, (x.shape[0], rows), x.device)
    return out
