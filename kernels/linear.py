"""Decode linears on a GPU: few tokens times quantised or fp16 matrices in tiles, with what follows; torch references.

y[t, n] = s[n] * sum_k x[t, k] * W[n, k], with W the stored values before the last scale. Products of fp16 with fp16 are
exact, sums are float32, s is applied once at the end in float32. Row t of every output has the same bits for every T and
whatever else is in the launch. docs/kernels.md has the tiling, docs/layouts.md the bytes.

Every operation runs on torch's current stream, neither synchronises nor needs a workspace, and may be captured in a graph
once `prepare` was called. All raise InputError if shapes, dtypes, strides, alignment or devices do not fit, and
EnvironmentFault if a kernel cannot be built, loaded or started.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import one_pass, pair_pass, reference, slices
from .module import Module, block_shared_bytes, load, multiprocessor_shared_bytes
from .task import FLOAT, HALF, MATRICES, SWIGLU, Task, halve, task
from .tuning import HALF_BAND, PAIR_BLOCKS, SLICED, Choice, choice, multiprocessors, spread
from .weights import Fp8BlockWeight, Fp8Weight, HalfWeight, Nvfp4Weight, Weight, check

__all__ = [
    "Fp8BlockWeight", "Fp8Weight", "HalfWeight", "Nvfp4Weight", "Weight", "linear", "linear_reference", "linears",
    "linears_reference", "prepare", "swiglu", "swiglu_reference",
]  # fmt: skip
MAX_TOKENS = 24  # four lanes of one token and five drafts
THREADS = 256
LARGEST_HALF = 65504.0
_TOKENS_A_PRODUCT = 8
MIXED = "any"  # the kernel for matrices of different encodings: a block an item
_BAND_BYTES = {"half": 32, "fp8": 16, "fp8_blocks": 16, "nvfp4": 9}  # of a row of a tile
# Ways of a matrix: items of a band or half of one, slices of K past which rows stream, or one pass.
_ITEMS, _SLICES, _ONE_PASS = "items", "slices", "one pass"
SOURCES = {8: "linear_8.cu", 16: "linear_16.cu", 24: "linear_24.cu"}


def linear(
    x: Tensor,
    weight: Weight,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    overflows: Tensor | None = None,
) -> Tensor:
    """x float16 [T, K], T = 1..24, times the weight transposed -> [T, N], plus `residual` float32 [T, N] if given.

    Written into `out` if given: `dtype` (float32, or float16 cut off at +-65504), unit stride along N, no overlap with
    the inputs but that it may be the residual. `overflows` int32 [1] counts what was cut off.
    """
    outs = None if out is None else [out]
    return linears(x, [weight], outs, residuals=[residual], dtype=dtype, overflows=overflows)[0]


def linears(
    x: Tensor,
    weights: Sequence[Weight],
    outs: Sequence[Tensor] | None = None,
    *,
    residuals: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.float32,
    overflows: Tensor | None = None,
) -> list[Tensor]:
    """Up to eight matrices with the same K, of any encodings, in one launch: `linear` of each, with the same bits."""
    outs = _checked_outputs(x, weights, outs, residuals, dtype, overflows)
    _check_device(x, weights)
    epilogue = FLOAT if dtype == torch.float32 else HALF
    # Bands of more bytes first: a block that begins last should not take longest.
    order = sorted(range(len(weights)), key=lambda index: -_BAND_BYTES[weights[index].encoding])
    for kernel, way, members in _launches(x, weights, order):
        filled = task(
            *(x, [weights[index] for index in members], [outs[index] for index in members], epilogue),
            *([residuals[index] for index in members] if residuals else None, overflows),
        )
        _launch(x, kernel, way, filled)
    return outs


def swiglu(
    x: Tensor, gate: Weight, up: Weight, out: Tensor | None = None, *, overflows: Tensor | None = None
) -> Tensor:
    """silu(x gate^T) * (x up^T) -> float16 [T, N], cut off at +-65504; gate and up of one shape and encoding.

    Other arguments as for `linear`.
    """
    out = _checked_swiglu(x, gate, up, out, overflows)
    _check_device(x, [gate, up])
    way = _SLICES if _in_slices(x, gate.encoding) else _ITEMS
    _launch(x, gate.encoding, way, task(x, [gate, up], [out], SWIGLU, None, overflows))
    return out


def linear_reference(
    x: Tensor,
    weight: Weight,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    overflows: Tensor | None = None,
) -> Tensor:
    """What `linear` computes, in float32 torch operations on any device; errors and shapes are the same."""
    outs = None if out is None else [out]
    return linears_reference(x, [weight], outs, residuals=[residual], dtype=dtype, overflows=overflows)[0]


def linears_reference(
    x: Tensor,
    weights: Sequence[Weight],
    outs: Sequence[Tensor] | None = None,
    *,
    residuals: Sequence[Tensor | None] | None = None,
    dtype: torch.dtype = torch.float32,
    overflows: Tensor | None = None,
) -> list[Tensor]:
    """What `linears` computes, in float32 torch operations on any device."""
    outs = _checked_outputs(x, weights, outs, residuals, dtype, overflows)
    for index, (weight, out) in enumerate(zip(weights, outs, strict=True)):
        y = _product(x, weight)
        residual = residuals[index] if residuals else None
        _store(y if residual is None else y + residual, out, overflows)
    return outs


def swiglu_reference(
    x: Tensor, gate: Weight, up: Weight, out: Tensor | None = None, *, overflows: Tensor | None = None
) -> Tensor:
    """What `swiglu` computes, in float32 torch operations on any device."""
    out = _checked_swiglu(x, gate, up, out, overflows)
    opened = _product(x, gate)
    _store(opened / (1.0 + torch.exp(-opened)) * _product(x, up), out, overflows)
    return out


def prepare(device: torch.device) -> None:
    """Compile and load the kernels for a CUDA device, so that no later call has to."""
    index = torch.cuda.current_device() if device.index is None else device.index
    for source in SOURCES.values():
        load(source, index, choice(index).defines)


def _launches(x: Tensor, weights: Sequence[Weight], order: list[int]) -> list[tuple[str, str, list[int]]]:
    """Kernels, their ways and their matrices: one launch, unless some go a way of their own, as they do alone."""
    apart: dict[tuple[str, str, int], list[int]] = {}
    rest: list[int] = []
    for index in order:
        weight = weights[index]
        way = _way(x, weight)
        if way == _ITEMS:
            rest.append(index)
        else:
            apart.setdefault((weight.encoding, way, index if way == _ONE_PASS else 0), []).append(index)
    found = [(kernel, way, members) for (kernel, way, _), members in apart.items()]
    if rest:
        encodings = {weights[index].encoding for index in rest}
        found.append((encodings.pop() if len(encodings) == 1 else MIXED, _ITEMS, rest))
    return found


def _way(x: Tensor, weight: Weight) -> str:
    """The way of a matrix that meets x, the same for every number of tokens and in any company."""
    device = x.device.index
    tuned = choice(device)
    if tuned.slices and one_pass.goes(
        *(weight.encoding, *weight.shape, _module(x, tuned).arch),
        *(block_shared_bytes(device), multiprocessors(device)),
    ):
        return _ONE_PASS
    return _SLICES if _in_slices(x, weight.encoding) else _ITEMS


def _in_slices(x: Tensor, encoding: str) -> bool:
    """Whether matrices of an encoding that meet x go in slices."""
    device = x.device.index
    tuned = choice(device)
    arch = _module(x, tuned).arch
    return tuned.slices and slices.goes(encoding, x.shape[1], arch, block_shared_bytes(device))


def _padded(x: Tensor) -> int:
    return -(-x.shape[0] // _TOKENS_A_PRODUCT) * _TOKENS_A_PRODUCT


def _module(x: Tensor, tuned: Choice) -> Module:
    return load(SOURCES[_padded(x)], x.device.index, tuned.defines)


def _launch(x: Tensor, kernel: str, way: str, filled: Task) -> None:
    padded, device = _padded(x), x.device.index
    tuned = choice(device)
    module = _module(x, tuned)
    if way != _ITEMS and padded == slices.TOKENS:
        blocks = multiprocessors(device)
        if way == _ONE_PASS:
            name, shared_bytes = one_pass.KERNEL, one_pass.cut(filled, blocks)
        elif pair_pass.goes(filled, blocks):
            name, shared_bytes = pair_pass.KERNEL, pair_pass.cut(filled, blocks)
        else:
            name, shared_bytes = slices.KERNEL, slices.cut(filled, blocks, block_shared_bytes(device))
        module.launch(name, blocks, slices.THREADS, (filled,), shared_bytes, overlap=True)
        return
    paired, resident, processors = filled.epilogue == SWIGLU, 0, multiprocessors(device)
    rows = tuned.rows_of(kernel, filled.items, paired, processors, module.arch, padded)
    if way != _ITEMS:
        kernel = f"{kernel}_{SLICED}"
    if rows == HALF_BAND and paired:
        halve(filled)
        resident = PAIR_BLOCKS[padded]
    elif rows == HALF_BAND and way == _ITEMS:
        halve(filled)
        halves = tuned.halves_of(kernel, tuned.blocks(filled.items, processors), processors, padded)
        kernel = f"{kernel}_{halves}"
    blocks = filled.items if kernel == MIXED else tuned.blocks(filled.items, processors, resident)
    shared_bytes = tuned.shared_bytes(kernel, padded, module.arch)
    if module.overlapping:
        limits = block_shared_bytes(device), multiprocessor_shared_bytes(device)
        shared_bytes = spread(shared_bytes, blocks, processors, *limits)
    module.launch(f"linear_{kernel}_{padded}", blocks, THREADS, (filled,), shared_bytes, overlap=True)


def _product(x: Tensor, weight: Weight) -> Tensor:
    return reference.linear_rows(x.float(), weight.values()) * weight.scale


def _store(y: Tensor, out: Tensor, overflows: Tensor | None) -> None:
    if out.dtype == torch.float16:
        if overflows is not None:
            overflows += (y.abs() > LARGEST_HALF).sum().to(overflows.dtype)
        y = y.clamp(-LARGEST_HALF, LARGEST_HALF)
    out.copy_(y)


def _check_device(x: Tensor, weights: Sequence[Weight]) -> None:
    if x.device.type != "cuda":
        raise InputError(f"x is on {x.device}: this kernel runs on a CUDA device; the reference runs on any.")
    check_addresses(x, weights)


def check_addresses(x: Tensor, weights: Sequence[Weight]) -> None:
    """Raises InputError where something does not start at a multiple of 16 bytes."""
    for name, tensor in (("x", x), *(("words", weight.words) for weight in weights)):
        if tensor.data_ptr() % 16:
            raise InputError(f"{name} starts at an address that is not a multiple of 16: the kernel loads 16 bytes.")
    for weight in weights:
        if isinstance(weight, Nvfp4Weight) and weight.block_scale.data_ptr() % 16:
            raise InputError(
                "block_scale starts at an address that is not a multiple of 16: the kernel loads 16 bytes."
            )


def _checked_outputs(
    x: Tensor,
    weights: Sequence[Weight],
    outs: Sequence[Tensor] | None,
    residuals: Sequence[Tensor | None] | None,
    dtype: torch.dtype,
    overflows: Tensor | None,
) -> list[Tensor]:
    if not 1 <= len(weights) <= MATRICES:
        raise InputError(f"{len(weights)} matrices: one launch takes 1 to {MATRICES}.")
    if dtype not in (torch.float32, torch.float16):
        raise InputError(f"outputs of {dtype}: expected float32 or float16.")
    for weight in weights:
        _check_input(x, weight)
    if outs is None:
        outs = [torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device) for weight in weights]
    if len(outs) != len(weights) or (residuals is not None and len(residuals) != len(weights)):
        raise InputError(f"{len(weights)} matrices need as many outputs and residuals.")
    for weight, out in zip(weights, outs, strict=True):
        check_rows("out", out, dtype, (x.shape[0], weight.shape[0]), x.device)
    for out, residual in zip(outs, residuals or [None] * len(outs), strict=True):
        if residual is not None:
            check_rows("residual", residual, torch.float32, tuple(out.shape), x.device)
            if residual.shape[0] > 1 and residual.stride(0) != out.stride(0):
                raise InputError(f"residual has rows of {residual.stride(0)} elements, out of {out.stride(0)}.")
    _check_counter(overflows, x.device)
    return list(outs)


def _checked_swiglu(x: Tensor, gate: Weight, up: Weight, out: Tensor | None, overflows: Tensor | None) -> Tensor:
    _check_input(x, gate)
    if gate.encoding != up.encoding or gate.shape != up.shape:
        raise InputError(f"gate is {gate.encoding} {gate.shape}, up is {up.encoding} {up.shape}: they must agree.")
    _check_input(x, up)
    _check_counter(overflows, x.device)
    if out is None:
        return torch.empty(x.shape[0], gate.shape[0], dtype=torch.float16, device=x.device)
    check_rows("out", out, torch.float16, (x.shape[0], gate.shape[0]), x.device)
    return out


def _check_input(x: Tensor, weight: Weight) -> None:
    columns = weight.shape[1]
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise InputError(f"x is {list(x.shape)}: expected [T, {columns}] with T from 1 to {MAX_TOKENS}.")
    check("x", x, torch.float16, (x.shape[0], columns), weight.words.device)


def check_rows(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """As `check`, for a tensor that may be columns of a wider one."""
    unit = tensor.dim() != 2 or tensor.shape[1] == 1 or tensor.stride(1) == 1
    apart = tensor.dim() != 2 or tensor.shape[0] == 1 or tensor.stride(0) >= tensor.shape[1]
    if tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device == device and unit and apart:
        return
    if not (unit and apart) and tuple(tensor.shape) == shape:
        raise InputError(f"{name} {list(shape)} is not contiguous along its rows (strides {list(tensor.stride())}).")
    check(name, tensor, dtype, shape, device)


def _check_counter(overflows: Tensor | None, device: torch.device) -> None:
    if overflows is not None:
        check("overflows", overflows, torch.int32, (1,), device)
