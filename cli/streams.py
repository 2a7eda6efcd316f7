"""The standard streams of a command: open whoever started it, and never the reason for which it ends otherwise."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Output(io.FileIO):
    """Standard output, whose errors name it: the system does not say which file was full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = error.filename or "standard output"
            raise


class _Words(io.FileIO):
    """Standard error: what nobody can be told (a full disk, a reader that has left) is lost, and changes no verdict."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def settle_streams() -> None:
    """Make descriptors 0 to 2 and the streams over them ready for anything that a command prints.

    A closed one (`>&-`, some service managers) becomes the null device, for children too, or the next file opened would be
    written to by whoever prints. Names of files may hold bytes that are no text: they are printed with backslashes.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _over(_Output(1, "w", closefd=False), sys.stdout)
    sys.stderr = _over(_Words(2, "w", closefd=False), sys.stderr, lines=True)


def _over(raw: io.FileIO, old: Any, lines: bool = False) -> io.TextIOWrapper:
    """Text over `raw` with the encoding and the buffering of the stream that it takes the place of."""
    through = bool(getattr(old, "write_through", False))
    return io.TextIOWrapper(
        raw if through else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=getattr(old, "encoding", None),
        errors="backslashreplace",
        line_buffering=lines or bool(getattr(old, "line_buffering", False)),
        write_through=through,
    )
