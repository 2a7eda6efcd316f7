"""Asking the kernel to begin writing what stands in its cache, so that a later fsync has little left to wait for."""

import ctypes
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait for the end


def _find() -> Any:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # not Linux: the fsync at the end does all
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find()


def begin_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Begin writing bytes [offset, offset + nbytes) of a file to the disk. A hint: errors show at the fsync."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, nbytes, _WRITE)
