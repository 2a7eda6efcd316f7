"""Digests: xxh3-128 of bytes, and of a JSON value in canonical form. Hex strings of 32 digits throughout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from .errors import naming

BLOCK = 8 << 20  # bytes per read: big and sequential, so that a slow network disk is no disaster
DIGEST_HEX = 32


def digest_bytes(data: bytes | memoryview) -> str:
    """xxh3-128 of `data` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_blocks(blocks: Iterable[bytes | memoryview]) -> str:
    """xxh3-128 of the concatenation of `blocks`."""
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block)
    return state.hexdigest()


def file_blocks(path: Path, block_bytes: int = BLOCK) -> Iterable[bytes]:
    """The file's bytes, in order, `block_bytes` at a time."""
    with naming(path), path.open("rb", buffering=0) as handle:
        while block := handle.read(block_bytes):
            yield block


def digest_file(path: Path) -> str:
    """xxh3-128 of a whole file."""
    return digest_blocks(file_blocks(path))


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space: equal values give equal bytes."""
    return msgspec.json.encode(msgspec.to_builtins(value), order="deterministic")


def json_bytes(value: Any) -> bytes:
    """Readable JSON, keys in the order they have, two spaces a level, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def digest_json(value: Any) -> str:
    """xxh3-128 of the canonical form of a JSON value."""
    return digest_bytes(canonical_json(value))
