"""Linears for many tokens: by the decode linear, the wide one, or the vendor's product of dequantised weights.

out[t, n] = sum_k x[t, k] * W[n, k] * s[n]. `kernels/tuning.py` says up to how many tokens which way is taken. The first two
decode the weights on their way (kernels/linear.py, kernels/wide.py). The third brings tiles to plain fp16 in a scratch buffer,
W[n, k] * s[n] rounded, and sums in float32 by the vendor's library. There the weights are dequantised at a factor that brings
the largest near 4, and the product is multiplied back in float32, so that neither small nor large scales leave fp16's range;
nvfp4 of one scale without that scale, so that its values stay exact.

What is promised of bits: a call of the same weights with the same x, on the same card, versions and choices, gives the same. A
token's may differ between numbers of tokens. In the wide linear they do not depend on the other tokens nor on its place.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import staging, wide
from .linear import MAX_TOKENS, check_addresses, check_rows, linear, linears, linears_reference
from .module import load
from .task import FLOAT, HALF, MATRICES, SWIGLU, matrix_of
from .tuning import choice
from .weights import BAND, GROUP, Fp8BlockWeight, HalfWeight, Nvfp4Weight, Weight, check

SOURCE = "dequantise.cu"
FEW_TOKENS = 96  # up to which the weights are read once for every 24 tokens, where the wide linear is not taken
SCRATCH_BYTES = 192 << 20  # of plain weights at a time, and so of a matrix that is multiplied whole
BESIDE_ROWS = (
    4096  # of a piece where the next one is made beside its product: two nearly full waves of tiles for 2,048 tokens
)
_BESIDE_PIECES = 3  # at least: what is made before the first product is hidden by none
_PARTIAL_BYTES = 20 << 20  # of the wide linear's sums on 160 multiprocessors
_LARGEST_FP8, _LARGEST_E2M1 = 448.0, 6.0
_LEAST_SCALE = 1e-20  # of which the inverse is far from the end of float32
_TARGET = 2  # the largest possible weight comes to lie at or below 2^2
_WARPS, _TILES_A_WARP = 8, 4  # of a block of the dequantising kernel


def linear_block(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """x float16 [T, K] times the weight transposed -> float16 [T, N], for any T; `out` contiguous if given.

    On torch's current stream; the first call for a weight synchronises, to see its largest scale.
    Raises InputError and EnvironmentFault as `linear` does.
    """
    out = _checked_output(x, weight, out)
    _check_device(x, [weight])
    if _takes_wide(x, weight):
        wide.multiply(x, [weight], [out], HALF)
    elif x.shape[0] <= FEW_TOKENS:
        for first in range(0, x.shape[0], MAX_TOKENS):
            few = slice(first, first + MAX_TOKENS)
            linear(x[few], weight, out[few], dtype=torch.float16)
    else:
        _multiply_plain(x, weight, out)
    return out


def linear_blocks(
    x: Tensor, weights: Sequence[Weight], outs: Sequence[Tensor], *, overflows: Tensor | None = None
) -> Sequence[Tensor]:
    """x float16 [T, K] times each weight into float32 [T, N], for any T; the outputs may be columns of one tensor.

    The sums as they are where the decode or the wide linear is taken; elsewhere through fp16, cut off at +-65504, and
    `overflows` int32 [T] gains what was. Otherwise as `linear_block`.
    """
    for weight, out in zip(weights, outs, strict=True):
        _check_input(x, weight)
        check_rows("out", out, torch.float32, (x.shape[0], weight.shape[0]), x.device)
    _check_device(x, weights)
    if x.shape[0] <= MAX_TOKENS:
        linears(x, weights, outs)
        return outs
    left = []
    for kind in dict.fromkeys(weight.encoding for weight in weights):
        alike = [(weight, out) for weight, out in zip(weights, outs, strict=True) if weight.encoding == kind]
        if not _takes_wide(x, alike[0][0]):
            left += alike
            continue
        for first in range(0, len(alike), MATRICES):
            some = alike[first : first + MATRICES]
            wide.multiply(x, [one for one, _ in some], [one for _, one in some], FLOAT)
    for weight, out in left:
        staging.widen(linear_block(x, weight), out, overflows=overflows)
    return outs


def swiglu_block(x: Tensor, gate: Weight, up: Weight, *, overflows: Tensor | None = None) -> Tensor:
    """silu(x gate^T) * (x up^T) -> float16 [T, N], for any T, cut off at +-65504.

    `overflows` int32 [T] gains what was cut off, of the products too where they pass through fp16. As `linear_block`.
    """
    for weight in (gate, up):
        _check_input(x, weight)
    if gate.shape != up.shape:
        raise InputError(f"gate is {list(gate.shape)}, up is {list(up.shape)}: they must agree.")
    _check_device(x, [gate, up])
    if gate.encoding == up.encoding and _takes_wide(x, gate):
        out = torch.empty(x.shape[0], gate.shape[0], dtype=torch.float16, device=x.device)
        wide.multiply(x, [gate, up], [out], SWIGLU, overflows=overflows)
        return out
    opened, raised = linear_block(x, gate), linear_block(x, up)
    return staging.silu_product(opened, raised, opened, overflows=overflows)


def linear_block_reference(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """What `linear_block` computes but for the rounding of the weights, in float32 on any device."""
    out = _checked_output(x, weight, out)
    return out.copy_((x.float() @ weight.values().t()) * weight.scale)


def linear_blocks_reference(
    x: Tensor, weights: Sequence[Weight], outs: Sequence[Tensor], *, overflows: Tensor | None = None
) -> Sequence[Tensor]:
    """What `linear_blocks` computes where sums of many tokens pass through fp16, on any device."""
    if x.shape[0] <= MAX_TOKENS:
        linears_reference(x, weights, outs)
        return outs
    for weight, out in zip(weights, outs, strict=True):
        staging.widen_reference(linear_block_reference(x, weight), out, overflows=overflows)
    return outs


def swiglu_block_reference(x: Tensor, gate: Weight, up: Weight, *, overflows: Tensor | None = None) -> Tensor:
    """What `swiglu_block` computes where products pass through fp16, on any device."""
    opened, raised = linear_block_reference(x, gate), linear_block_reference(x, up)
    return staging.silu_product_reference(opened, raised, opened, overflows=overflows)


def _takes_wide(x: Tensor, weight: Weight) -> bool:
    chosen = choice(x.device.index)
    wanted = x.shape[0] > MAX_TOKENS and chosen.wide_from <= x.shape[0] <= chosen.wide_up_to
    return wanted and wide.widest_on(weight.encoding, x.device) > 0


@dataclass(frozen=True)
class _Piece:
    """Bands of one matrix that are dequantised at a time, and the columns of its output."""

    weight: Weight
    first: int
    bands: int
    out: Tensor

    @property
    def elements(self) -> int:
        """Plain values, those of rows past the matrix's end too."""
        return self.bands * BAND * self.weight.shape[1]


def workspace_bytes(largest: int) -> int:
    """Memory of a call beside x and its outputs, whose largest matrix has `largest` values."""
    return max(min(SCRATCH_BYTES, 2 * largest), _PARTIAL_BYTES)


def _pieces(weight: Weight, out: Tensor, most: int, *, equal: bool) -> list[_Piece]:
    """Of at most `most` bands each: about equal, or all but the last of so many."""
    rows, bands = weight.shape[0], weight.words.shape[0]
    count = -(-bands // most)
    cuts = [number * bands // count if equal else min(number * most, bands) for number in range(count + 1)]
    return [
        _Piece(weight, first, end - first, out[:, first * BAND : min(end * BAND, rows)])
        for first, end in pairwise(cuts)
    ]


def _multiply_plain(x: Tensor, weight: Weight, out: Tensor) -> None:
    """By dequantised pieces and the vendor's product, one after the other or side by side.

    Buffers are this call's own: another thread's launches may come between the two of a piece, on this stream or another,
    and torch's allocator hands memory on only in the order of a stream, or of the graph that is being captured.
    """
    most = max(1, SCRATCH_BYTES // (2 * BAND * x.shape[1]))
    if choice(x.device.index).overlap_dequantising:
        few = min(BESIDE_ROWS // BAND, max(1, most // 2))
        if weight.words.shape[0] > few * (_BESIDE_PIECES - 1):
            _multiply_beside(x, _pieces(weight, out, few, equal=False))
            return
    pieces = _pieces(weight, out, most, equal=True)
    buffer = _buffers(x, pieces, 1)[0]
    for piece in pieces:
        _product(x, piece, _plain(piece, buffer))


def _multiply_beside(x: Tensor, pieces: Sequence[_Piece]) -> None:
    """Two buffers in turn: while one is multiplied, the other is filled on a stream of its own."""
    buffers = _buffers(x, pieces, 2)
    main = torch.cuda.current_stream(x.device)
    side = _side_stream(x.device, main.cuda_stream)
    side.wait_stream(main)  # who used the memory before
    multiplied: list[torch.cuda.Event] = []
    for number, piece in enumerate(pieces):
        half_factors(piece.weight)  # may synchronise
        with torch.cuda.stream(side):
            if number >= 2:
                side.wait_event(multiplied[number - 2])
            plain = _plain(piece, buffers[number % 2])
            filled = side.record_event()
        main.wait_event(filled)
        _product(x, piece, plain)
        multiplied.append(main.record_event())


def _buffers(x: Tensor, pieces: Sequence[_Piece], count: int) -> Tensor:
    """fp16, each as large as the largest piece."""
    return torch.empty(count, max(piece.elements for piece in pieces), dtype=torch.float16, device=x.device)


def _plain(piece: _Piece, buffer: Tensor) -> Tensor:
    """The piece in fp16, [32 * bands, K]."""
    columns = piece.weight.shape[1]
    plain = buffer[: piece.elements].view(-1, columns)
    dequantise(piece.weight, plain, piece.first, half_factors(piece.weight)[0])
    return plain


def _product(x: Tensor, piece: _Piece, plain: Tensor) -> None:
    out, back = piece.out, half_factors(piece.weight)[1]
    torch.addmm(out, x, plain[: out.shape[1]].t(), beta=0, alpha=back, out=out)


def dequantise(weight: Weight, out: Tensor, first_band: int, factor: float) -> None:
    """Bands from `first_band` on, times scale and factor, to `out` float16 [32 * bands, K]; rows past N become zero."""
    groups, bands = weight.shape[1] // GROUP, out.shape[0] // BAND
    blocks = -(-bands * -(-groups // _TILES_A_WARP) // _WARPS)
    module = load(SOURCE, out.device.index)
    arguments = (matrix_of(weight), out, groups, first_band, bands, float(factor))
    module.launch(f"dequantise_{weight.encoding}", blocks, 32 * _WARPS, arguments)


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
def _side_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Where pieces are made for products on `stream`: one of its own, for that one may be in a capture."""
    return torch.cuda.Stream(device)


def _check_device(x: Tensor, weights: Sequence[Weight]) -> None:
    if x.device.type != "cuda":
        raise InputError(f"x is on {x.device}: this kernel runs on a CUDA device; the reference runs on any.")
    check_addresses(x, weights)


def _checked_output(x: Tensor, weight: Weight, out: Tensor | None) -> Tensor:
    rows = weight.shape[0]
    _check_input(x, weight)
    if out is None:
        return torch.empty(x.shape[0], rows, dtype=torch.float16, device=x.device)
    check("out", out, torch.float16, (x.shape[0], rows), x.device)
    return out


def _check_input(x: Tensor, weight: Weight) -> None:
    columns = weight.shape[1]
    if x.dim() != 2 or x.shape[0] < 1:
        raise InputError(f"x is {list(x.shape)}: expected [T, {columns}].")
    check("x", x, torch.float16, (x.shape[0], columns), weight.words.device)
