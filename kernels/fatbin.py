"""Which GPU architectures a library holds code for, read from the CUDA fat binaries inside its file.

A fat binary begins with the magic word, its header's size and the size of what follows: entries, each with a kind (machine
code or PTX), its header's size, its size, and the architecture. The layout was read off files whose contents are known.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"\x50\xed\x55\xba"
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes that follow
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, header bytes, bytes that follow, architecture
_KINDS = {1: "compute", 2: "sm"}
_MOST_ARCHITECTURES = 64  # a damaged file names no more
_NEWEST = 999


def architectures(path: Path) -> list[str]:
    """`sm_XY` of machine code and `compute_XY` of PTX in a file, by number. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            return []
        with content:
            found = set(_entries(content))
    return [f"{kind}_{number}" for number, kind in sorted(found)]


def runs_on(found: list[str], capability: tuple[int, int]) -> bool:
    """Whether a card can run any of it: machine code of its major version and no newer minor, or PTX no newer than it."""
    number = 10 * capability[0] + capability[1]
    for name in found:
        kind, _, digits = name.partition("_")
        code = int("".join(filter(str.isdigit, digits)) or _NEWEST)  # sm_90a is for 9.0
        if kind == "sm" and code // 10 == capability[0] and code <= number:
            return True
        if kind == "compute" and code <= number:
            return True
    return False


def _entries(content: mmap.mmap) -> Iterator[tuple[int, str]]:
    begin, seen = content.find(_MAGIC), set()
    while begin >= 0:
        end = begin + len(_MAGIC)
        if begin + _CONTAINER.size <= len(content):
            _, _, header, size = _CONTAINER.unpack_from(content, begin)
            if header >= _CONTAINER.size and begin + header + size <= len(content):
                end = begin + header + size
                for entry in _of_container(content, begin + header, end):
                    seen.add(entry)
                    yield entry
        if len(seen) > _MOST_ARCHITECTURES:
            return
        begin = content.find(_MAGIC, end)


def _of_container(content: mmap.mmap, offset: int, end: int) -> Iterator[tuple[int, str]]:
    while offset + _ENTRY.size <= end:
        kind, _, header, size, number = _ENTRY.unpack_from(content, offset)
        if kind not in _KINDS or header < _ENTRY.size or not 0 < number <= _NEWEST:
            return
        yield number, _KINDS[kind]
        offset += header + size
