"""A kernel's start with as little of the host's time as Python allows: a prompt's chunk starts thousands.

The bindings of the driver take several times as long for a call as ctypes, and torch for its current stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_WORD = 8
_MASK = 2**64 - 1


class Parameters:
    """Arguments as the driver wants them: `address` of pointers to values, which live as long as this does."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        """Tensors by their address, whole numbers as int32 or wider, floats as float32, None as a null pointer; structures
        and other ctypes values as they are."""
        count = len(arguments)
        slots = (ctypes.c_uint64 * (2 * count))()
        self.address = ctypes.addressof(slots)
        value = self.address + _WORD * count
        for place, item in enumerate(arguments):
            kind = type(item)
            if kind is int:
                slots[count + place] = item & _MASK
            elif kind is float:
                slots[count + place] = _bits(item)
            elif isinstance(item, torch.Tensor):
                slots[count + place] = item.data_ptr()
            elif isinstance(item, int):  # a bool, or a number of some enumeration
                slots[count + place] = int(item) & _MASK
            elif item is not None:
                slots[place] = ctypes.addressof(item)
                continue
            slots[place] = value + _WORD * place
        self._kept = slots, arguments


def _bits(value: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value


@functools.cache
def starter() -> Callable[..., int]:
    """cuLaunchKernel: function, six extents, shared bytes, stream, parameters, null -> status. Raises OSError."""
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    call.restype = ctypes.c_int
    return call


@functools.cache
def _asker() -> Callable[..., int]:
    call = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent
    call.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    call.restype = ctypes.c_int
    return call


def current_context() -> int:
    """The calling thread's context, 0 if it has none. Raises OSError where there is no driver."""
    found = ctypes.c_void_p()
    _asker()(ctypes.byref(found))
    return found.value or 0


def current_stream(device: int) -> int:
    """The driver's handle of torch's current stream."""
    plain = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what torch's own compiler calls
    return int(torch.cuda.current_stream(device).cuda_stream if plain is None else plain(device))
