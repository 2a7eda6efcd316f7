"""How many multiprocessors the vendor's matrix products take of a card."""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch


@contextmanager
def products_on(multiprocessors: int) -> Iterator[None]:
    """Within it this thread's products on torch's current device take so many; 0: all. Where the library that torch uses
    cannot be told so, all."""
    tell = _teller() if multiprocessors else None
    if tell is None:
        yield
        return
    handle = torch.cuda.current_blas_handle()
    tell(handle, multiprocessors)
    try:
        yield
    finally:
        tell(handle, 0)


@functools.cache
def _teller() -> Callable[[int, int], int] | None:
    """cublasSetSmCountTarget(handle, count) of the library that torch has loaded, None if there is none."""
    if torch.version.cuda is None:
        return None
    torch.cuda.current_blas_handle()  # loads it
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        tell = library.cublasSetSmCountTarget
    except (OSError, AttributeError):  # linked otherwise, or older than 11.5
        return None
    tell.argtypes, tell.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
    return cast(Callable[[int, int], int], tell)
