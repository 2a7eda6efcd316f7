"""Linears for many tokens: by the decode linear, the wide one, or the vendor's product of dequantised weights.

out[t, n] = sum_k x[t, k] * W[n, k] * s[n]. `kernels/tuning.py` says up to how many tokens which way is taken. The first two
decode the weights on their way (kernels/linear.py, kernels/wide.py). The third brings tiles to plain fp16 in a scratch buffer,
W[n, k] * s[n] rounded, and sums in float32 by the vendor's library. There the weights are dequantised at a factor that brings
the largest near 4, and the product is multiplied back in float32, so that neither small nor large scales leave fp16's range;
nvfp4 of one scale without that scale, so that its values stay exact.

Matrices that share x stand side by side in one plain matrix where they fit: a product's last wave of tiles is seldom full, and
each has one.

What is promised of bits: a call of the same weights with the same x, on the same card, versions and choices, gives the same. A
token's may differ between numbers of tokens. In the wide linear they do not depend on the other tokens nor on its place.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import plain_ahead, plain_kept, staging, wide
from .half_factors import Shared, shared_factors
from .linear import MAX_TOKENS, check_addresses, check_rows, linear, linears, linears_reference
from .plain import Plain
from .task import FLOAT, HALF, MATRICES, SWIGLU
from .tuning import choice, multiprocessors
from .vendor import products_on
from .weights import BAND, Weight, check

FEW_TOKENS = 96  # up to which the weights are read once for every 24 tokens, where the wide linear is not taken
SCRATCH_BYTES = 192 << 20  # of plain weights at a time, and so of a matrix that is multiplied whole
BESIDE_ROWS = (
    4096  # of a piece where the next one is made beside its product: two nearly full waves of tiles for 2,048 tokens
)
_BESIDE_PIECES = 3  # at least: what is made before the first product is hidden by none
_PARTIAL_BYTES = 20 << 20  # of the wide linear's sums on 160 multiprocessors
_GATES_TOGETHER = (8, 0)


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

    The sums as they are; only where torch is older than 2.8 dequantised weights' sums come through fp16, cut off at +-65504,
    and `overflows` int32 [T] gains what was. Otherwise as `linear_block`.
    """
    for weight, out in zip(weights, outs, strict=True):
        _check_input(x, weight)
        check_rows("out", out, torch.float32, (x.shape[0], weight.shape[0]), x.device)
    _check_device(x, weights)
    left = []
    for kind in dict.fromkeys(weight.encoding for weight in weights):
        alike = [(weight, out) for weight, out in zip(weights, outs, strict=True) if weight.encoding == kind]
        if not _takes_wide(x, alike[0][0]):
            left += alike
            continue
        for first in range(0, len(alike), MATRICES):
            some = alike[first : first + MATRICES]
            wide.multiply(x, [one for one, _ in some], [one for _, one in some], FLOAT)
    if left and x.shape[0] <= FEW_TOKENS:
        for first in range(0, x.shape[0], MAX_TOKENS):
            few = slice(first, first + MAX_TOKENS)
            linears(x[few], [weight for weight, _ in left], [out[few] for _, out in left])
        return outs
    left.sort(key=lambda pair: pair[1].data_ptr())  # neighbours beside each other, whatever their encodings
    for group in _neighbours(left, x.shape[1]):
        _multiply_sums(x, group, overflows)
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
    together = x.shape[0] > FEW_TOKENS and gates_together(x.device) and _fit([gate, up])
    shared = shared_factors([gate, up]) if together else None
    if shared is None:
        opened, raised = linear_block(x, gate), linear_block(x, up)
        return staging.silu_product(opened, raised, opened, overflows=overflows)
    rows = gate.shape[0]
    both = torch.empty(x.shape[0], 2 * rows, dtype=torch.float16, device=x.device)
    _multiply_together(x, [gate, up], shared, both)
    return staging.silu_product(
        both[:, :rows], both[:, rows:], rests=(shared.rests[0], shared.rests[1]), overflows=overflows
    )


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


@functools.cache
def gates_together(device: torch.device) -> bool:
    """Whether gate and up are multiplied side by side, which takes the memory of both: on an H200 3 to 5 % sooner; on a V100 as
    many waves of tiles as one after the other, by reckoning."""
    return torch.cuda.get_device_capability(device) >= _GATES_TOGETHER


def _fit(weights: Sequence[Weight]) -> bool:
    """Whether several are multiplied side by side: each with the rows of its last band, all within the memory of one."""
    nbytes = sum(2 * BAND * weight.words.shape[0] * weight.shape[1] for weight in weights)
    return nbytes <= SCRATCH_BYTES and not choice(weights[0].words.device.index or 0).overlap_dequantising


def _neighbours(pairs: Sequence[tuple[Weight, Tensor]], columns: int) -> list[list[tuple[Weight, Tensor]]]:
    """Runs of weights whose outputs are columns side by side, and which can share a product as they are."""
    groups: list[list[tuple[Weight, Tensor]]] = []
    for weight, out in pairs:
        if groups:
            last = groups[-1][-1][1]
            beside = (
                out.stride() == last.stride()
                and out.data_ptr() == last.data_ptr() + last.element_size() * last.shape[1]
            )
            together = [one for one, _ in groups[-1]] + [weight]
            if beside and _fit(together):
                shared = shared_factors(together)
                if shared is not None and all(rest == 1 for rest in shared.rests):
                    groups[-1].append((weight, out))
                    continue
        groups.append([(weight, out)])
    return groups


def _multiply_sums(x: Tensor, group: Sequence[tuple[Weight, Tensor]], overflows: Tensor | None) -> None:
    """Weights whose outputs are float32 columns side by side."""
    weights, first = [weight for weight, _ in group], group[0][1]
    width = sum(weight.shape[0] for weight in weights)
    out = first.as_strided((x.shape[0], width), first.stride())
    sums = out if _gives_float32() else torch.empty(x.shape[0], width, dtype=torch.float16, device=x.device)
    shared = shared_factors(weights) if len(group) > 1 else None
    if shared is None:
        _multiply_plain(x, weights[0], sums)
    else:
        _multiply_together(x, weights, shared, sums)
    if sums is not out:
        staging.widen(sums, out, overflows=overflows)


def _multiply_together(x: Tensor, weights: Sequence[Weight], shared: Shared, out: Tensor) -> None:
    """One product of several weights; out [T, all their rows]."""
    _multiply(x, Plain.together(weights, shared), out)


def workspace_bytes(largest: int) -> int:
    """Memory of a call beside x and its outputs, whose largest matrix has `largest` values."""
    return max(min(SCRATCH_BYTES, 2 * largest), _PARTIAL_BYTES)


def ahead_elements(layer: int, largest: int, layers: float) -> int:
    """Of a `PlainAhead` with room for so many layers, none of which has more than `layer` values, and for the largest matrix."""
    return max(int(layers * layer), min(SCRATCH_BYTES // 2, largest))


def _pieces(weight: Weight, out: Tensor, most: int, *, equal: bool) -> list[tuple[Plain, Tensor]]:
    """Of at most `most` bands each, and their columns of `out`: about equal, or all but the last of so many."""
    rows, bands = weight.shape[0], weight.words.shape[0]
    count = -(-bands // most)
    cuts = [number * bands // count if equal else min(number * most, bands) for number in range(count + 1)]
    return [
        (Plain.piece(weight, first, end - first), out[:, first * BAND : min(end * BAND, rows)])
        for first, end in pairwise(cuts)
    ]


def _multiply_plain(x: Tensor, weight: Weight, out: Tensor) -> None:
    """By dequantised pieces and the vendor's product, one after the other or side by side."""
    most = max(1, SCRATCH_BYTES // (2 * BAND * x.shape[1]))
    if choice(x.device.index).overlap_dequantising:
        few = min(BESIDE_ROWS // BAND, max(1, most // 2))
        if weight.words.shape[0] > few * (_BESIDE_PIECES - 1):
            _multiply_beside(x, _pieces(weight, out, few, equal=False))
            return
    for piece, columns in _pieces(weight, out, most, equal=True):
        _multiply(x, piece, columns)


def _multiply(x: Tensor, matrix: Plain, out: Tensor) -> None:
    """By the vendor's product of one plain matrix, which is kept, or which a pass of many products may have made before.

    Else its memory is this call's own: another thread's launches may come between the two, on this stream or another,
    and torch's allocator hands memory on only in the order of a stream, or of the graph that is being captured.
    """
    held = plain_kept.kept(matrix)
    if held is not None:
        _addmm(x, held, matrix.back, out)
        return
    going = plain_ahead.current()
    if going is None or matrix.elements > going.room:
        plain = matrix.fill(torch.empty(matrix.elements, dtype=torch.float16, device=x.device))
        _addmm(x, plain, matrix.back, out)
        return
    kept = choice(x.device.index).multiprocessors_of(x.shape[0], multiprocessors(x.device.index))
    with going.taken(matrix) as plain, products_on(kept):
        _addmm(x, plain, matrix.back, out)


def _multiply_beside(x: Tensor, pieces: Sequence[tuple[Plain, Tensor]]) -> None:
    """Two buffers in turn: while one is multiplied, the other is filled on a stream of its own."""
    largest = max(piece.elements for piece, _ in pieces)
    buffers = torch.empty(2, largest, dtype=torch.float16, device=x.device)
    main = torch.cuda.current_stream(x.device)
    side = _side_stream(x.device, main.cuda_stream)
    side.wait_stream(main)  # who used the memory before
    multiplied: list[torch.cuda.Event] = []
    for number, (piece, out) in enumerate(pieces):
        with torch.cuda.stream(side):
            if number >= 2:
                side.wait_event(multiplied[number - 2])
            plain = piece.fill(buffers[number % 2])
            filled = side.record_event()
        main.wait_event(filled)
        _addmm(x, plain, piece.back, out)
        multiplied.append(main.record_event())


def _addmm(x: Tensor, plain: Tensor, back: float, out: Tensor) -> None:
    """x times plain [N, K] transposed, times `back`, into `out` [T, N], fp16 or, where torch gives them, float32 sums."""
    if out.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(out, x, plain.t(), torch.float32, beta=0, alpha=back, out=out)
    else:
        torch.addmm(out, x, plain.t(), beta=0, alpha=back, out=out)


@functools.cache
def _gives_float32() -> bool:
    """Whether torch (2.8 and newer) writes the sums of fp16 factors as they are."""
    return "dtype_out" in torch.ops.aten.addmm.overloads()


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
