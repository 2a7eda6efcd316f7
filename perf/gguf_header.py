"""The header of a GGUF file: metadata and the list of tensors, strictly and within bounds; tensor data is not touched.

The `gguf` library says which types there are and how many bytes their blocks take. Its reader is not used: it follows any
length that a file claims. Format: magic, version 2 or 3, u64 counts of tensors and of key-value pairs, the pairs, then per
tensor its name, extents (fastest first), type and offset; little-endian (docs of ggml, gguf.md).
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..checkpoint.errors import EnvironmentFault, InputError, naming

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 512 << 20  # bytes; vocabularies are a few tens of megabytes
MAX_TENSORS, MAX_PAIRS, MAX_NAME, MAX_DIMS = 1 << 17, 1 << 16, 1 << 16, 8
MAX_EXTENT = 1 << 40
KEPT_ITEMS = 4096  # of an array of numbers; longer ones are passed over
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """`shape`: rows before columns, the reverse of the file's order; `nbytes` by its type's blocks."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: numbers, strings, and arrays of up to 4,096 numbers; None stands for what is longer, or strings."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def whole(self, key: str, default: int | None = None) -> int:
        """A metadata number from 0 up. Raises InputError if it is missing (without a default) or no such number."""
        found = self.metadata.get(key, default)
        if type(found) is not int or not 0 <= found <= MAX_EXTENT:
            raise InputError(f"{self.path}: {key} is {found!r:.80}, expected a whole number.")
        return found


class _Reader:
    """Bytes of a header in order."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.position = file, path, 0

    def take(self, count: int) -> bytes:
        if count > MAX_HEADER - self.position:
            raise InputError(f"{self.path}: a header longer than {MAX_HEADER >> 20} MB, or a damaged length.")
        found = self.file.read(count)
        if len(found) != count:
            raise InputError(f"{self.path}: ends in its header, at byte {self.position + len(found)}. Fetch it again.")
        self.position += count
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, most: int, what: str) -> int:
        found = int(self.number("<Q"))
        if found > most:
            raise InputError(f"{self.path}: {found} {what}, more than the {most} allowed: a damaged file?")
        return found

    def text(self, most: int = MAX_HEADER) -> str:
        return self.take(self.count(most, "bytes of a string")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise InputError(f"{self.path}: a value of the unknown type {kind} at byte {self.position}.")
        item, count = self.number("<I"), self.count(MAX_HEADER, "items of an array")
        if item in _SCALARS:
            size = struct.calcsize(_SCALARS[item])
            raw = self.take(size * count)
            return [entry[0] for entry in struct.iter_unpack(_SCALARS[item], raw)] if count <= KEPT_ITEMS else None
        if item != _STRING:  # arrays of arrays are in no model, and could be nested without end
            raise InputError(f"{self.path}: an array of type {item} at byte {self.position}.")
        for _ in range(count):
            self.take(self.count(MAX_HEADER, "bytes of a string"))
        return None


def read_header(path: Path) -> GgufHeader:
    """Raises InputError for what is no GGUF file, damaged or of an unknown form, EnvironmentFault without the library."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise EnvironmentFault('the library gguf is missing: pip install "duovolt[gguf]".') from None
    if not path.is_file():
        raise InputError(f"{path}: no such file, or not a regular one.")
    sizes = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    with path.open("rb") as file, naming(path):
        reader = _Reader(file, path)
        if reader.take(4) != MAGIC:
            raise InputError(f"{path}: not a GGUF file.")
        version = reader.number("<I")
        if version not in VERSIONS:
            raise InputError(f"{path}: GGUF version {version}; 2 and 3 are read (little-endian).")
        tensors, pairs = reader.count(MAX_TENSORS, "tensors"), reader.count(MAX_PAIRS, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.text(MAX_NAME)
            if key in metadata:
                raise InputError(f"{path}: metadata {key!r:.80} stands twice.")
            metadata[key] = reader.value(reader.number("<I"))
        found: dict[str, GgufTensor] = {}
        for _ in range(tensors):
            tensor = _tensor(reader, sizes)
            if tensor.name in found:
                raise InputError(f"{path}: tensor {tensor.name!r:.80} stands twice.")
            found[tensor.name] = tensor
    return GgufHeader(path, metadata, found)


def _tensor(reader: _Reader, sizes: dict[int, tuple[str, int, int]]) -> GgufTensor:
    name, dims = reader.text(MAX_NAME), reader.number("<I")
    if not 1 <= dims <= MAX_DIMS:
        raise InputError(f"{reader.path}: tensor {name!r:.80} has {dims} dimensions.")
    shape = [int(reader.number("<Q")) for _ in range(dims)][::-1]
    kind, _ = reader.number("<I"), reader.number("<Q")
    if kind not in sizes:
        raise InputError(f"{reader.path}: tensor {name!r:.80} has type {kind}, which the installed gguf does not know.")
    label, block, size = sizes[kind]
    elements = 1
    for extent in shape:
        elements *= extent
    if not 0 < elements <= MAX_EXTENT or shape[-1] % block:
        raise InputError(f"{reader.path}: tensor {name!r:.80} {shape}: not whole blocks of {block} ({label}).")
    return GgufTensor(name, label, tuple(shape), elements // block * size)
