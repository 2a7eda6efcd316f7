"""Reading one safetensors file, strictly.

Format: u64 little-endian header length, JSON header, data. Sizes are checked before anything is allocated, and
whatever another reader might take differently (duplicate keys, holes, overlaps, trailing bytes) is refused.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .digest import BLOCK
from .errors import InputError, naming, one_line

# safetensors dtype -> bytes an element. Sub-byte types (F4, F6) are not used by any source we know: peers store U8.
ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}

# What `read` gives for each dtype: numpy has no bfloat16 or float8, so their words come as unsigned integers.
NUMPY_DTYPE = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "C64": np.dtype("<c8"),
} | {name: np.dtype("u1") for name in ITEMSIZE if name.startswith("F8")}

MAX_HEADER = 100_000_000  # the reference library's own limit, bytes
MAX_NAME = 1024
MAX_RANK = 8


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place: `begin` and `end` are absolute byte offsets in `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in the order of their data, string metadata, size of the file in bytes."""

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    size: int


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found


def parse_json(raw: bytes, path: Path) -> Any:
    """JSON without duplicate keys. Raises InputError naming `path`."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({one_line(error)}). Fetch the file again.") from None


def _resembles(head: bytes) -> str | None:
    """What a file that is no safetensors file looks like, from its first bytes."""
    text = head.lstrip()[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML page (a failed download?)"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer (the content was never fetched: run `git lfs pull`)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (a PyTorch .bin file?)"
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "a Python pickle, which is never loaded"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    return None


def _entry(path: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    def refuse(why: str) -> InputError:
        return InputError(f"{path}: tensor {name!r}: {why}. The file is damaged; fetch it again.")

    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InputError(f"{path}: a tensor name is empty, too long or not printable: {name[:80]!r}.")
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise refuse("its header entry lacks dtype, shape or data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise refuse(f"unknown dtype {dtype!r}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or not all(type(n) is int and 0 <= n < 2**48 for n in shape)
    ):
        raise refuse(f"bad shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise refuse(f"bad data_offsets {offsets!r}")
    begin, end = offsets
    wanted = ITEMSIZE[dtype]
    for extent in shape:
        wanted *= extent
    if end < begin or end - begin != wanted:
        raise refuse(f"{end - begin} bytes stored, {wanted} needed for {dtype} {shape}")
    if data_start + end > size:
        raise refuse(f"data ends at byte {data_start + end}, the file has {size}")
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, data_start + end)


def read_header(path: Path) -> Header:
    """Read and check the header of `path`; no tensor data is read.

    Raises InputError for anything the reference library refuses, and for duplicate keys, which it accepts.
    """
    try:
        with naming(path), path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            head = handle.read(64)
            if (seems := _resembles(head)) is not None:
                raise InputError(f"{path}: not a safetensors file; it looks like {seems}.")
            if size < 8:
                raise InputError(f"{path}: {size} bytes, too short for a safetensors file. Fetch it again.")
            length = int.from_bytes(head[:8], "little")
            if length > MAX_HEADER or 8 + length > size:
                raise InputError(
                    f"{path}: header length {length} exceeds "
                    f"{'the limit of ' + str(MAX_HEADER) if length > MAX_HEADER else f'the file of {size}'} bytes; "
                    "not a safetensors file, or cut off. Fetch it again."
                )
            handle.seek(8)
            raw = handle.read(length)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, where a safetensors file was expected.") from None
    table = parse_json(raw, path)
    if not isinstance(table, dict):
        raise InputError(f"{path}: the header is not a JSON object. Fetch it again.")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InputError(f"{path}: __metadata__ must map strings to strings.")
    data_start = 8 + length
    entries = [_entry(path, name, value, data_start, size) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    reached = data_start
    for entry in entries:
        if entry.begin != reached:
            kind = "overlap" if entry.begin < reached else "hole"
            raise InputError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.begin}, expected {reached} ({kind})."
            )
        reached = entry.end
    if reached != size:
        raise InputError(f"{path}: {size} bytes, but the header accounts for {reached} ({size - reached} too many).")
    return Header(path, {entry.name: entry for entry in entries}, metadata, size)


class TensorFile:
    """A tensor opened for reading in order, into buffers that the caller has; a context manager."""

    def __init__(self, entry: TensorEntry, begin: int = 0) -> None:
        self.entry = entry
        self._handle = entry.path.open("rb", buffering=0)
        self._handle.seek(entry.begin + begin)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.close()

    def read_into(self, buffer: np.ndarray) -> None:
        """Fill `buffer`, uint8. Raises InputError if the file is shorter by now."""
        view = buffer.data
        while len(view):  # a single read may give less than was asked for
            with naming(self.entry.path):
                got = self._handle.readinto(view)
            if not got:
                raise InputError(
                    f"{self.entry.path}: ends inside tensor {self.entry.name!r}; the file changed while being read."
                )
            view = view[got:]


def read_range(entry: TensorEntry, begin: int, end: int) -> np.ndarray:
    """Bytes [begin, end) of a tensor, as a fresh uint8 array. Raises InputError if the file is shorter by now."""
    if not 0 <= begin <= end <= entry.nbytes:
        raise ValueError(f"range [{begin}, {end}) outside tensor {entry.name!r} of {entry.nbytes} bytes")
    buffer = np.empty(end - begin, np.uint8)
    with TensorFile(entry, begin) as file:
        file.read_into(buffer)
    return buffer


def blocks(entry: TensorEntry, block_bytes: int = BLOCK) -> Iterator[memoryview]:
    """A tensor's bytes in order, `block_bytes` at a time (the last may be shorter).

    Each block is only valid until the next.
    """
    buffer = np.empty(min(block_bytes, max(entry.nbytes, 1)), np.uint8)
    with TensorFile(entry) as file:
        left = entry.nbytes
        while left:
            block = buffer[: min(left, len(buffer))]
            file.read_into(block)
            yield block.data
            left -= len(block)


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """The whole tensor in its numpy form (BF16 as uint16, F8 as uint8), shape as stored."""
    return read_range(entry, 0, entry.nbytes).view(NUMPY_DTYPE[entry.dtype]).reshape(entry.shape)
