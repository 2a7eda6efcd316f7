"""What every operation on a GPU demands of its tensors, and how it starts its kernel."""

import math

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .module import Argument, Grid, Module, load

ALIGNMENT = 16  # bytes: kernels load four float32 or eight fp16 at once


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse a tensor that is not contiguous, aligned, of this dtype and shape, on this device (InputError)."""
    check_rows(name, tensor, dtype, shape, device)
    if not tensor.is_contiguous():
        raise InputError(f"{name} {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())}).")


def check_rows(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    alignment: int = ALIGNMENT,
) -> int:
    """As `check`, but rows may stand apart: the elements between the starts of two rows. Raises InputError."""
    plain = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device
    if plain and tensor.numel() and tensor.data_ptr() % alignment == 0:  # nearly always: launches wait for this
        return tensor.numel() // shape[0] if shape else 1
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} is {list(tensor.shape)}: expected {list(shape)}.")
    if tensor.dtype != dtype:
        raise InputError(f"{name} is {tensor.dtype}: expected {dtype}.")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, the rest on {device}: they must share a device.")
    inner = 1
    for size, stride in list(zip(tensor.shape, tensor.stride(), strict=True))[:0:-1]:
        if size != 1 and stride != inner:
            raise InputError(f"{name} {list(shape)}: rows are not contiguous (strides {list(tensor.stride())}).")
        inner *= size
    stride = tensor.stride(0) if tensor.dim() and tensor.shape[0] > 1 else inner
    grain = math.gcd(alignment, inner * tensor.element_size())
    if tensor.numel() and tensor.data_ptr() % grain:
        raise InputError(f"{name} starts at an address that is not a multiple of {grain}.")
    if stride < inner or stride * tensor.element_size() % grain:
        raise InputError(
            f"{name} {list(shape)}: rows are {stride} elements apart; expected at least {inner}, and a multiple of "
            f"{grain} bytes."
        )
    return stride


def check_dimensions(name: str, tensor: Tensor, count: int, meaning: str) -> None:
    """Refuse a tensor of another number of dimensions, or an empty one (InputError). `meaning`: as in "[T, H]"."""
    if tensor.dim() != count or 0 in tensor.shape:
        raise InputError(f"{name} is {list(tensor.shape)}: expected {meaning}, nothing empty.")


def module_on(source: str, device: torch.device) -> Module:
    """The kernels of a source on a CUDA device. Raises InputError for another device."""
    if device.type != "cuda":
        raise InputError(f"the tensors are on {device}: this kernel runs on a CUDA device; its reference runs on any.")
    return load(source, torch.cuda.current_device() if device.index is None else device.index)


def launch(
    source: str,
    name: str,
    blocks: Grid,
    threads: int,
    arguments: tuple[Argument, ...],
    device: torch.device,
    shared_bytes: int = 0,
    overlap: bool = False,
    cluster: int = 1,
) -> None:
    """Start a kernel on torch's current stream, as `Module.launch` has it.

    Raises as `module_on`, and EnvironmentFault if it cannot start.
    """
    module_on(source, device).launch(name, blocks, threads, arguments, shared_bytes, overlap, cluster)
